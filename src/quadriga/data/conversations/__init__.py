"""Conversations for fine-tuning, as token ids.

turns        the turns of a conversation → token ids, and which of them the assistant wrote
sft          `SFTDataset`: conversations for supervised fine-tuning
pairs        pairs of responses for a reward model
encoded      token ids of rows, in memory or in cache files
scored_rows  conversations as the rows that a scalar head is computed on
"""

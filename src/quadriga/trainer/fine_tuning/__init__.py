"""Training on given conversations.

sft   supervised fine-tuning, and the loop of a run with one worker group
rm    a reward model from pairs of responses
"""

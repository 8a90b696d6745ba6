"""Training on given conversations.

sft            supervised fine-tuning
rm             a reward model from pairs of responses
conversations  the data of fine-tuning, its end tokens and its loss
"""

"""Checks of settings, before any process starts.

settings      settings against each other and against the registries, for each command
batches       batches, mini-batches and data-parallel ranks
ranges        one setting: its range or its choices
unread        settings that another setting leaves without effect
generation    `quadriga generate` and `quadriga eval`
reward        rewards
reward_model  `quadriga rm`
trained_part  adapters and frozen weights
"""

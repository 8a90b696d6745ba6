"""Adapters (LoRA) of a model.

- `lora`: plan adapters, put them into a model, read and write their files.
- `layers`: which layers of a model can have one.
"""

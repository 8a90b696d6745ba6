"""Checks of the data of a run before a process is started.

- `sequence_checks.py`: lengths of prompts and responses, token budgets, the window of the model.
- `images.py`: which models, engines and settings take images; the rules by which images are read.
"""

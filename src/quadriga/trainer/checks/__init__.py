"""Checks of a run before a process is started. `trainer.preflight` calls them.

- `early.py`: what can be told in a moment; with `settings.py` it imports no torch.
- `settings.py`: settings against each other, against the registries and against the ranks.
- `options.py`: options of the policy loss and of the advantage estimator.
- `data.py`: lengths of prompts and responses, token budgets, the window of the model, images.
- `memory.py`: the memory that each rank of a run needs.
"""

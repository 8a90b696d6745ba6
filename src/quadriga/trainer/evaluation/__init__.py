"""Responses to prompts, generated on ranks, scored and summarised.

- `responses`: from prompts to rows of responses, on the worker group of `ranks`.
- `response_file`: a file of such rows, which a second run continues; `inputs` says what it depends
  on.
- `generate`: `quadriga generate`.
- `run`: `quadriga eval`; `report`: its table, JSON and plot.
- `scores`: pass@k, best@k, majority and bootstrap intervals. Validation in training uses it too.
"""

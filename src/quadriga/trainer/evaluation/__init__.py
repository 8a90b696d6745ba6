"""Responses to prompts, generated on ranks, scored and summarised.

- `scores`: pass@k, best@k, majority and bootstrap intervals, from scores.
"""

"""Responses to prompts, generated on ranks, scored and summarised.

generate.py   `quadriga generate`: from prompts to a file of responses, which a second run continues
evaluate.py   `quadriga eval`: scores of responses; its table, JSON and plot
"""

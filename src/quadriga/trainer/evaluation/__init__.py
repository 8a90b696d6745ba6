"""Responses to prompts, generated on ranks, scored and summarised.

generate.py        `quadriga generate`: from prompts to rows of responses, on ranks
evaluate.py        `quadriga eval`: scores of responses; its table, JSON and plot
response_file.py   a file of responses that a second run of the same command continues
"""

"""Rows of a batch by their numbers of tokens."""

import torch


def rows_of(lengths: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Make rows from (prompt number, prompt tokens, response tokens), with a column of responses at
    least. Prompts are told apart by their token id."""
    P, R = max(row[1] for row in lengths), max(1, *(row[2] for row in lengths))
    ids = torch.zeros(len(lengths), P + R, dtype=torch.int64)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(lengths), R, dtype=torch.int64)
    for row, (number, prompt, response) in enumerate(lengths):
        ids[row, P - prompt : P] = number + 1
        attention[row, P - prompt : P + response] = 1
        mask[row, :response] = 1
    return {"input_ids": ids, "attention_mask": attention, "response_mask": mask}

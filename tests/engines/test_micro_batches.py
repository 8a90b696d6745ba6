"""Micro-batches stay within the budget of computed tokens."""

from __future__ import annotations

import pytest
import torch

from quadriga.engines.micro_batches import plan_micro_batches, select_rows
from quadriga.parallel.aligned_rows import left_align
from quadriga.parallel.packing import pack_rows


def rows_of(lengths: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Make rows from (prompt number, prompt tokens, response tokens)."""
    P, R = (max(row[part] for row in lengths) for part in (1, 2))
    ids = torch.zeros(len(lengths), P + R, dtype=torch.int64)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(lengths), R, dtype=torch.int64)
    for row, (number, prompt, response) in enumerate(lengths):
        ids[row, P - prompt : P] = number + 1
        attention[row, P - prompt : P + response] = 1
        mask[row, :response] = 1
    return {"input_ids": ids, "attention_mask": attention, "response_mask": mask}


def computed_tokens(batch, micro_batches, *, packed: bool) -> list[int]:
    compute = pack_rows if packed else left_align
    parts = [select_rows(batch, rows, torch.device("cpu")) for rows in micro_batches]
    return [compute(*part.values()).input_ids.numel() for part in parts]


def test_prompt_counts_in_each_micro_batch_that_computes_it():
    batch = rows_of([(0, 800, 100)] * 5)
    micro_batches = plan_micro_batches(batch, size=None, max_tokens=1000, share_prompts=True)
    assert [rows.tolist() for rows in micro_batches] == [[0, 1], [2, 3], [4]]
    assert computed_tokens(batch, micro_batches, packed=True) == [1000, 1000, 900]


def test_example_in_the_code():
    batch = rows_of([(0, 4, 3), (0, 4, 2), (1, 4, 1), (0, 4, 4)])
    micro_batches = plan_micro_batches(batch, size=None, max_tokens=12, share_prompts=True)
    assert [rows.tolist() for rows in micro_batches] == [[0, 1], [3], [2]]
    assert computed_tokens(batch, micro_batches, packed=True) == [9, 8, 5]


def test_padding_counts_where_rows_are_padded():
    batch = rows_of([(0, 1, 1), (1, 3, 3), (2, 1, 1), (3, 3, 2), (4, 1, 0), (5, 1, 1)])
    micro_batches = plan_micro_batches(batch, size=None, max_tokens=12, share_prompts=False)
    assert [rows.tolist() for rows in micro_batches] == [[1, 3], [0, 2, 5]]
    assert computed_tokens(batch, micro_batches, packed=False) == [12, 6]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_no_micro_batch_exceeds_the_budget(packed, seed):
    random = torch.Generator().manual_seed(seed)

    def draw(last: int) -> int:
        return int(torch.randint(1, last, (1,), generator=random))

    prompts = [draw(40) for _ in range(4)]
    numbers = [draw(5) - 1 for _ in range(draw(18))]
    batch = rows_of([(number, prompts[number], draw(30)) for number in numbers])
    micro_batches = plan_micro_batches(batch, size=None, max_tokens=70, share_prompts=packed)
    assert sorted(torch.cat(micro_batches).tolist()) == list(range(len(numbers)))
    assert max(computed_tokens(batch, micro_batches, packed=packed)) <= 70


def test_row_longer_than_the_budget_is_a_micro_batch_of_its_own():
    batch = rows_of([(0, 4, 1), (1, 9, 9), (2, 4, 1)])
    for packed in (True, False):
        plan = plan_micro_batches(batch, size=None, max_tokens=10, share_prompts=packed)
        assert sorted(sorted(rows.tolist()) for rows in plan) in ([[0], [1], [2]], [[0, 2], [1]])

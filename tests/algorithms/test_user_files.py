"""A user's file adds entries, in this process and in a new process."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from quadriga.algorithms.advantages import compute_advantages
from quadriga.algorithms.catalog import describe_algorithms
from quadriga.algorithms.policy_losses import compute_policy_loss
from quadriga.algorithms.user_files import load_user_file, loaded_files
from quadriga.errors import InputError, NonFiniteError, ShapeError

GOOD = """
import torch
from quadriga.algorithms.advantages import register_advantage
from quadriga.algorithms.policy_losses import register_policy_loss


@register_advantage("signs", formula="sign of r − mean r", paper="none")
def signs(token_level_rewards_BT, response_mask_BT, groups, *, scale=2.0):
    scores = (token_level_rewards_BT * response_mask_BT).sum(-1)
    result = scale * torch.sign(groups.centre_B(scores))[:, None] * response_mask_BT
    return result, result


@register_policy_loss("squared", formula="A (log π)²")
def squared(log_prob_BT, advantages_BT, *, power=2.0):
    return advantages_BT * log_prob_BT.abs() ** power
"""


@pytest.fixture(autouse=True)
def _restored(restored_tables: None) -> None:
    """Every test of this file adds entries."""


@pytest.fixture
def good_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    return file


def use_additions() -> tuple[list[float], list[float]]:
    rewards, mask = torch.tensor([[1.0, float("nan")], [3.0, 5.0]]), torch.tensor([[1, 0], [1, 0]])
    result, _ = compute_advantages(
        "signs", token_level_rewards_BT=rewards, response_mask_BT=mask, group_ids=[7, 7], scale=3.0
    )
    loss = compute_policy_loss(
        "squared", log_prob_BT=torch.tensor([[-2.0, float("nan")]]),
        old_log_prob_BT=torch.zeros(1, 2), advantages_BT=torch.ones(1, 2),
        response_mask_BT=torch.tensor([[1, 0]]), power=3.0,
    ).loss_BT  # fmt: skip
    return result[:, 0].tolist(), loss.flatten().tolist()


WANT = ([-3.0, 3.0], [8.0, 0.0])


def test_added_entries_work_and_are_in_the_catalog(good_file: Path) -> None:
    assert load_user_file(good_file) == ("signs", "squared")
    assert use_additions() == WANT
    rows = {row.name: row for row in describe_algorithms()}
    assert rows["signs"].origin == str(good_file.resolve())
    assert (rows["signs"].settings, rows["squared"].settings) == (("scale",), ("power",))
    assert load_user_file(good_file) == ("signs", "squared")  # loading it again is allowed


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("result, result", "result * float('nan'), result", NonFiniteError,
         "`advantages of signs` is nan at row 0"),
        ("result, result", "result[:, :1], result", ShapeError,
         r"`advantages of signs` has shape \[2, 1\]"),
        ("log_prob_BT.abs() ** power", "(-log_prob_BT * 1e30).exp()", NonFiniteError,
         "`loss of squared` is inf at row 0, token 0"),
    ],
)  # fmt: skip
def test_an_invalid_result_is_named(
    tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD.replace(old, new))
    load_user_file(file)
    with pytest.raises(error, match=message):
        use_additions()


def in_worker(file: str, content: bytes) -> tuple[list[float], list[float]]:
    load_user_file(file, content)
    return use_additions()


def test_a_rank_loads_what_the_controller_has_loaded(good_file: Path) -> None:
    load_user_file(good_file)
    [loaded] = loaded_files([str(good_file)])
    good_file.write_text(GOOD.replace("scale * torch", "2 * scale * torch"))  # of another node
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(in_worker, loaded).get(timeout=120) == WANT


def test_a_changed_file_is_loaded_again(good_file: Path) -> None:
    load_user_file(good_file)
    good_file.write_text(GOOD.replace("scale * torch", "2 * scale * torch"))
    load_user_file(good_file)
    assert use_additions()[0] == [-6.0, 6.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        (GOOD.replace('"signs"', '"grpo"'), "The advantage estimator `grpo` exists already"),
        (GOOD.replace('"squared"', '"vanilla"'), "The policy loss `vanilla` exists already"),
        (GOOD.replace("scale=2.0", "scale"), "takes `scale`, which is neither an input"),
        (GOOD.replace("*, power=2.0", "**power"), r"takes `\*\*power`; name the inputs"),
    ],
)
def test_invalid_files_raise(tmp_path: Path, source: str, message: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(InputError, match=message):
        load_user_file(file)


def test_every_row_of_the_catalog_has_a_formula_and_a_source() -> None:
    rows = describe_algorithms()
    assert len({(row.kind, row.name) for row in rows}) == len(rows)
    assert all(row.formula for row in rows)
    assert all(row.paper for row in rows if row.kind in ("advantage", "policy loss"))
    assert {row.kind for row in rows} == {
        *("advantage", "policy loss", "aggregation", "KL estimator", "importance correction")
    }

"""Runs of `quadriga train` whose roles train with Megatron-core on two ranks."""

from pathlib import Path

import pytest
import torch
from run_cases import timeless
from run_process import started_run
from safetensors.torch import load_file

import megatron_on_cpu
from quadriga.observability.jsonl import read_jsonl

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]

LIMIT_S = 1200
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
SAME = (
    "algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true", "critic.optim.lr=1e-3",
    # Without it, Adam would turn the rounding of a gradient that is about 0 into a step.
    f"{ACTOR}.optim.eps=1e-3", "critic.optim.eps=1e-3",
    "reward.num_processes=0", "actor_rollout_ref.rollout.sampling.temperature=0.7",
)  # fmt: skip
TENSOR, STAGES, CONTEXT = (
    (f"{name}_parallel_size=2",) for name in ("tensor", "pipeline", "context")
)
LAYOUTS = {
    "tp 2": TENSOR,
    "tp 2 sp": (*TENSOR, "sequence_parallel=true"),
    "pp 2": STAGES,
    "cp 2": CONTEXT,
}


def megatron(*sizes: str, ranks: int = 2) -> list[str]:
    """Settings of actor, reference and critic on Megatron-core, on Ray."""
    engines = [f"{role}.engine.{s}" for role in (ACTOR, REF, "critic")
               for s in ("name=megatron", *sizes)]  # fmt: skip
    more = ["trainer.backend=ray", f"trainer.num_cpus={ranks}", f"trainer.n_gpus_per_node={ranks}"]
    return [*engines, *more]


@pytest.fixture
def train(train_overrides, rule, tmp_path):
    """train("name", …) runs `quadriga train` in a process of its own; returns its metrics."""
    pytest.importorskip("megatron.core")
    (tmp_path / "on_cpu.py").write_text(megatron_on_cpu.USER_FILE)
    files = [rule, f"algorithm.user_files=[{tmp_path / 'on_cpu.py'}]"]  # fmt: skip

    def _train(name: str, *more: str) -> list[dict[str, float]]:
        folder = f"trainer.default_local_dir={tmp_path / name}"
        overrides = [*train_overrides, *SAME, *files, folder, *more]
        with started_run(overrides, tmp_path / f"{name}.log") as run:
            assert run.popen.wait(LIMIT_S) == 0, run.output.read_text()[-3000:]
        return timeless(list(read_jsonl(tmp_path / name / "metrics.jsonl")))

    return _train


def assert_same(found, expected, *, rel: float = 1e-3) -> None:
    compared = ("actor/", "critic/", "reward/", "response_length/")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            if name.startswith(compared) and not name.endswith("micro_batches"):
                assert row[name] == pytest.approx(value, rel=rel, abs=1e-4), (row["step"], name)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def one_rank(train):
    return train("one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_roles_train_as_with_fsdp_on_one_rank(train, one_rank, tmp_path, layout):
    found = train("two", *megatron(*LAYOUTS[layout]))
    assert_same(found, one_rank)
    assert one_rank[-1]["actor/grad_norm"] > 1e-3
    assert found[-1]["mismatch/mean_abs"] < 1e-5 if "mismatch/mean_abs" in found[-1] else True
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, rtol=0, atol=1e-5)


def test_the_rollout_can_have_two_ranks_of_its_own(train, one_rank):
    apart = ("placement.actor=[0-1]", "placement.critic=[0-1]", "placement.rollout=[2-3]")
    assert_same(train("apart", *megatron(*TENSOR, ranks=4), *apart), one_rank)


def test_engines_that_take_turns_train_the_same(train, one_rank):
    # On a CPU nothing is moved; test_engine_conformance.py moves what an engine holds.
    turns = "actor_rollout_ref.rollout.take_turns=true"
    assert_same(train("turns", *megatron(*TENSOR), turns), one_rank)


@pytest.mark.parametrize("after", ["pp 2", "fsdp"])
def test_a_run_is_resumed_at_another_layout(train, tmp_path, after):
    """Four steps with two tensor-parallel ranks equal two of them, a resume, and two more."""
    four = ("trainer.total_training_steps=4", "trainer.save_freq=2")
    undisturbed = train("four", *megatron(*TENSOR), *four)
    checkpoint = next((tmp_path / "four" / "checkpoints").glob("*2"))
    other = megatron(*STAGES) if after == "pp 2" else []
    resumed = train("resumed", *other, *four, f"trainer.resume_mode={checkpoint}")
    assert_same(resumed[-2:], undisturbed[-2:], rel=1e-4)
    expected = weights(tmp_path / "four")
    for name, tensor in weights(tmp_path / "resumed").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)

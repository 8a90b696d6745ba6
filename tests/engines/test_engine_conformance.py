"""The FSDP engine and the Megatron engine compute the same, however their ranks are arranged."""

from pathlib import Path

import conformance
import pytest
import torch
from conformance import POLICY_UPDATES, STEPS, VALUE_UPDATES, Subject
from engine_cases import assert_close
from transformers import AutoModelForCausalLM

from rank_groups import fork_ranks

RANKS = 4
WAIT_S = 560


def megatron(name: str, family: str = "llama", head: str = "lm", **settings) -> Subject:
    recompute, updates = settings.pop("recompute", False), settings.pop("updates", [])
    return Subject(name, family, head, {"name": "megatron", **settings}, recompute, updates)


TENSOR, STAGES, EXPERTS, CONTEXT = (
    {f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "expert", "context")
)
SPLIT_TOKENS = TENSOR | {"sequence_parallel": True}
INTERLEAVED = STAGES | {"virtual_pipeline_parallel_size": 2}
OFFLOAD = {"param_offload": True, "optimizer_offload": True}
WHOLE_EXPERTS = SPLIT_TOKENS | {"expert_tensor_parallel_size": 1}

SUBJECTS = [
    megatron("tp2 pp2 interleaved tied", "qwen2 tied deep", **TENSOR, **INTERLEAVED,
             updates=POLICY_UPDATES[::6]),
    megatron("values cp2 pp2", head="value", **CONTEXT, **STAGES, updates=VALUE_UPDATES),
    megatron("tp2 sp dp2 offloaded", **SPLIT_TOKENS, **OFFLOAD),
    megatron("tp2 sp ep2 dp2", "qwen3_moe", **SPLIT_TOKENS, **EXPERTS),
]  # fmt: skip
NIGHTLY = [
    Subject("fsdp"),
    Subject("fsdp values", head="value"),
    megatron("window tp2 sp cp2", "mistral", **SPLIT_TOKENS, **CONTEXT),
    megatron("cp4 recomputed", context_parallel_size=4, recompute=True),
    megatron("tp2 cp2 tied", "qwen2 tied", **TENSOR, **CONTEXT),
    megatron("cp2 pp2 interleaved", "qwen2 tied deep", **CONTEXT, **INTERLEAVED,
             updates=POLICY_UPDATES),
    megatron("cp2 dp2", **CONTEXT, updates=POLICY_UPDATES),
    megatron("tp2 sp dp2", **SPLIT_TOKENS, updates=POLICY_UPDATES),
    megatron("values cp2 dp2", head="value", **CONTEXT, updates=VALUE_UPDATES),
    megatron("cp2 dp2 ep2", "qwen3_moe", **CONTEXT, **EXPERTS),
    megatron("cp2 dp2 ep4", "mixtral", **CONTEXT, expert_parallel_size=4),
    megatron("tp2 sp cp2 whole experts ep4", "mixtral", **WHOLE_EXPERTS, **CONTEXT,
             expert_parallel_size=4),
    megatron("scores tp2 cp2 offloaded", head="score", **TENSOR, **CONTEXT, **OFFLOAD),
    megatron("tp2 pp2 tied", "qwen2 tied", **TENSOR, **STAGES, updates=POLICY_UPDATES),
    megatron("ep2 dp2", "qwen3_moe", **EXPERTS),
    megatron("window pp2 interleaved dp2", "mistral deep", **INTERLEAVED),
    megatron("pp4 tied", "qwen2 tied deep", pipeline_parallel_size=4),
    megatron("values tp2 sp interleaved", "mistral deep", "value", **SPLIT_TOKENS, **INTERLEAVED),
    megatron("interleaved recomputed", "qwen2 tied deep", **TENSOR, **INTERLEAVED, recompute=True),
    megatron("tp2 sp whole experts ep4", "mixtral", **WHOLE_EXPERTS, expert_parallel_size=4),
    megatron("tp2 sp pp2 experts", "mixtral", **SPLIT_TOKENS, **STAGES),
    megatron("experts interleaved recomputed", "mixtral deep", **SPLIT_TOKENS, **INTERLEAVED,
             recompute=True),
    megatron("dp4 replicated optimizer", distributed_optimizer=False),
    megatron("pp2 dp2", **STAGES),
    megatron("tp2 sp pp2 recomputed", **SPLIT_TOKENS, **STAGES, recompute=True),
    megatron("qk norm tp2 sp", "qwen3", **SPLIT_TOKENS),
    megatron("mixtral pp2 ep2", "mixtral", **STAGES, **EXPERTS),
    megatron("values tp2 sp pp2", head="value", **SPLIT_TOKENS, **STAGES, updates=VALUE_UPDATES),
    megatron("score pp2", head="score", **STAGES),
]  # fmt: skip
BF16 = megatron("bf16 tp2 pp2", dtype="bfloat16", **TENSOR, **STAGES, **OFFLOAD)


class Observed:
    """What each subject was observed to do, and the reference for its family and head."""

    def __init__(self, root: Path, subjects: list[Subject], wait_s: int = WAIT_S) -> None:
        families = {s.family: conformance.FAMILIES[s.family] for s in subjects}
        conformance.write_models(root, families)
        updates = {}
        for s in subjects:
            updates.setdefault((s.family, s.head), {}).update({str(u): u for u in s.updates})
        self.reference = {
            key: conformance.observe(
                Subject(f"reference {key[0]} {key[1]}", *key, updates=[*own.values()]), root
            )
            for key, own in updates.items()
        }
        fork_ranks(
            conformance.rank_main, RANKS, str(root), subjects, limit=wait_s,
            modules=["quadriga.engines.megatron.engine"],
        )  # fmt: skip
        self.root = root
        self.found = {
            s.name: torch.load(root / f"{s.name}.pt", weights_only=False) for s in subjects
        }

    def pair(self, subject: Subject):
        return self.found[subject.name], self.reference[subject.family, subject.head]


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return Observed(tmp_path_factory.mktemp("conformance"), SUBJECTS)


@pytest.fixture(scope="module")
def observed_nightly(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return Observed(tmp_path_factory.mktemp("nightly"), [*NIGHTLY, BF16], 3 * WAIT_S)


def check_replayed(found, expected, own) -> None:
    """Compare a step with the experts of a rollout, and log-probabilities after it. `own`: the
    weights after the same step, if the routers choose."""
    if expected is None:
        return
    (metrics, after, forward), (wanted, trained, ((_, whole),)) = found, expected
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    assert_close(after, trained, atol=1e-5)
    for rows, outputs in forward:
        assert_close(outputs, {name: values[rows] for name, values in whole.items()}, atol=1e-5)
    assert max(float((trained[name] - own[name]).abs().max()) for name in own) > 1e-4


def check_updates(found, expected) -> None:
    """Compare updates with several losses and aggregations."""
    for name, (metrics, after) in found.items():
        wanted, trained = expected[name]
        for of in ("loss", "grad_norm", "lr"):
            (key,) = (k for k in wanted if k.endswith(f"/{of}"))
            assert metrics[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6), (name, of)
            assert of != "grad_norm" or wanted[key] > 1e-3, name
        assert_close(after, trained, atol=1e-5)


def check(subject: Subject, observed: Observed) -> None:
    found, expected = observed.pair(subject)
    assert_close(found["loaded"], expected["loaded"], atol=0)
    ((_, whole),) = expected["forward"]
    assert len(found["forward"]) == RANKS
    for rows, outputs in found["forward"]:
        assert_close(outputs, {name: values[rows] for name, values in whole.items()}, atol=1e-5)
    assert found["counts"] == [7.0, 14.0]
    for metrics, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        for name in ("loss", "rows", "grad_norm", "lr", "skipped_steps"):
            assert metrics[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    assert_close(found["trained"], expected["trained"], atol=1e-5)
    for held, kept in zip(found.get("offloaded", ()), found.get("reloaded", ()), strict=True):
        assert held == dict.fromkeys(held, 0)
        # float32: as many gradients as parameters; two data-parallel ranks divide two moments
        assert kept["gradients"] >= kept["parameters"] > 0
        assert kept["moments"] == pytest.approx(kept["parameters"], rel=0.1)
    assert found["damaged"] == 1.0
    assert_close(found["after_damage"], found["trained"], atol=0)
    assert found["steps"] == STEPS + 1
    # A checkpoint of the FSDP engine on one rank, continued by this engine.
    for name in ("loss", "grad_norm", "lr"):
        assert found["resumed"][name] == pytest.approx(expected["next"][name], rel=1e-4), name
    assert_close(found["undisturbed"], expected["undisturbed"], atol=1e-5)
    assert_close(found["after_resume"], expected["undisturbed"], atol=1e-6)
    assert_close(found["after_snapshot"], found["undisturbed"], atol=0)
    for size, (metrics, after) in found.get("pairs", {}).items():
        wanted, trained = expected["pairs"][size]
        for name in ("loss", "accuracy", "difference", "grad_norm"):
            assert metrics[f"rm/{name}"] == pytest.approx(wanted[f"rm/{name}"], rel=1e-4), name
        assert_close(after, trained, atol=1e-5)
        assert_close(trained, expected["pairs"][None][1], atol=1e-6)
    check_updates(found["updates"], expected["updates"])
    check_replayed(found["replayed"], expected["replayed"], expected["undisturbed"])
    # A checkpoint of this engine, continued by the FSDP engine on one rank.
    continued = conformance.build(Subject("continued", subject.family, subject.head), observed.root)
    continued.load(observed.root / f"saved {subject.name}", STEPS)
    conformance.step(continued, conformance.batch_of(), subject.head)
    assert_close(conformance.weights(continued), found["undisturbed"], atol=1e-6)
    if subject.head == "lm":
        exported = AutoModelForCausalLM.from_pretrained(observed.root / f"export {subject.name}")
        for held in found["synced"]:
            assert_close({n: held[n] for n in found["undisturbed"]}, found["undisturbed"], atol=0)
        kept = {name: p.detach() for name, p in exported.named_parameters(remove_duplicate=False)}
        assert_close({n: found["undisturbed"][n] for n in kept}, kept, atol=0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_an_engine_computes_what_fsdp_computes_on_one_rank(subject, observed):
    check(subject, observed)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subject", NIGHTLY, ids=lambda s: s.name)
def test_an_engine_computes_it_in_every_layout(subject, observed_nightly):
    check(subject, observed_nightly)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_steps_below_the_digits_of_bfloat16_add_up(observed_nightly):
    found, expected = observed_nightly.pair(BF16)
    for metrics, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        assert metrics["loss"] == pytest.approx(wanted["loss"], rel=0.05)
    engine = conformance.build(Subject("float32"), observed_nightly.root)
    before = conformance.weights(engine)
    engine.load(observed_nightly.root / f"saved {BF16.name}", STEPS)
    after = conformance.weights(engine)
    changes = [(after[n] - before[n], expected["trained"][n] - before[n]) for n in before]
    change, wanted = (torch.cat([c[i].flatten() for c in changes]) for i in (0, 1))
    # A step is at most 1e-3 of weights near 0.2, which have steps of 1e-3 in bfloat16.
    assert float((change - wanted).abs().mean()) < 0.2 * float(wanted.abs().mean())

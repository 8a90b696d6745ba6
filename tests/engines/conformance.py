"""What every training engine must do, observed on an engine over any number of ranks.

`observe` runs one engine through all that a run asks of it and returns the numbers. Engines conform
if their numbers are those of the FSDP engine on one rank.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import get_args

import engine_cases as cases
import torch
import transformers

from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.checkpoint.snapshots import receive_state, send_state
from quadriga.config import schema
from quadriga.engines import build_engine
from quadriga.engines.base import TrainEngine
from quadriga.parallel.distributed import gather_over_ranks, rank, world_size
from quadriga.protocol import DataProto, fields
from quadriga.rollout import build_rollout
from quadriga.single_controller.keepers import KeptValues
from quadriga.weight_sync.sync import WeightSync
from quadriga.workers.reward_model import update_pairs
from quadriga.workers.updates import update_policy, update_values

# A larger eps than usual: Adam divides gradients by their size, and 1e-8 / 1e-8 has no digits.
OPTIM = schema.OptimConfig(
    lr=1e-3, eps=1e-4, lr_scheduler="linear", lr_warmup_steps=2, grad_clip=0.5
)
STEPS = 3
weights = cases.weights
SIZES = {
    "vocab_size": 211,  # does not divide by the ranks
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 101,  # which prompts have as a word: its embedding has no gradient
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e3, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "qwen2 tied deep": lambda: transformers.Qwen2Config(
        **SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=True
    ),
    "mistral deep": lambda: transformers.MistralConfig(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=3
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    "qwen2 tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=False, tie_word_embeddings=False,
    ),
    "mixtral deep": lambda: transformers.MixtralConfig(
        **SIZES | {"num_hidden_layers": 4}, **EXPERTS, sliding_window=None
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS, sliding_window=None),
}  # fmt: skip


@dataclass(frozen=True)
class Update:
    """An update with a loss and an aggregation.

    Attributes:
        loss: of the policy; None: that of the value model.
        terms: settings of the terms beside the loss.
        old_given: whether the batch has old log-probabilities. If not, the update takes its own.
    """

    loss: str | None
    aggregation: schema.AggregationName
    old_given: bool = True
    terms: dict[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.loss} {self.aggregation}"


def policy_updates() -> list[Update]:
    """Return an update for each loss and aggregation. A third of them have a KL, with each
    estimator in turns; a third an entropy bonus; a third take their own old log-probabilities."""
    kl = cycle(get_args(schema.SampledKLName))
    found = []
    for number, (loss, mode) in enumerate(product(POLICY_LOSSES, get_args(schema.AggregationName))):
        terms: dict[str, object] = {}
        if number % 3 == 0:
            terms = {"use_kl_loss": True, "kl_loss_type": next(kl), "kl_loss_coef": 0.1}
        elif number % 3 == 1:
            terms = {"entropy_coeff": 0.1}
        found.append(Update(loss, mode, number % 3 != 2, terms))
    return found


POLICY_UPDATES = policy_updates()
VALUE_UPDATES = [Update(None, mode) for mode in get_args(schema.AggregationName)]


@dataclass(frozen=True)
class Subject:
    """An engine to observe. `updates`: what it computes beside a simple loss."""

    name: str
    family: str = "llama"
    head: str = "lm"
    settings: dict[str, object] = field(default_factory=dict)
    gradient_checkpointing: bool = False
    updates: list[Update] = field(default_factory=list, hash=False)


def write_models(root: Path, families) -> None:
    """Write one folder with random weights for each family: name -> function of its config."""
    for number, (family, config) in enumerate(families.items()):
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(config())
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide a missing one
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        model.save_pretrained(root / family)


def batch_of() -> dict[str, torch.Tensor]:
    """Return seven rows with weights of their losses in float32."""
    batch = cases.make_batch()
    return batch | {"weight": batch["weight"].float()}


def own_part(engine: TrainEngine) -> tuple[int, int]:
    """Return the number of this data-parallel rank, and the number of all."""
    ranks = getattr(engine, "ranks", None)
    if ranks is None:
        return rank(), world_size()
    degrees, context = ranks.degrees, ranks.engine.context_parallel_size
    return ranks.replica_rank // context, degrees.expert * degrees.replicas // context


def own_rows(engine: TrainEngine) -> list[int]:
    """Return the rows of this rank: unevenly many, on more than two ranks also none."""
    index, count = own_part(engine)
    return [row for row in range(7) if min(row // 3, count - 1) == index]


def share(engine: TrainEngine, rows):
    """Return a loss of log-probabilities and entropies, or of values."""
    (tokens,) = engine.global_counts(rows["response_mask"].sum())

    def loss(outputs, micro):
        name = "values" if "values" in outputs else "log_probs"
        total = (outputs[name] * micro["weight"]).sum()
        if "entropy" in outputs:
            total = total + 0.3 * (outputs["entropy"] * micro["weight"].square()).sum()
        return total / tokens, {"rows": float(len(micro["weight"]))}

    return loss


def step(engine: TrainEngine, rows, head: str, **settings) -> dict[str, float]:
    return engine.train_step(
        rows, share(engine, rows), entropy=head == "lm", temperature=0.7, **settings
    )


def pair_step(engine: TrainEngine, micro_batch_size: int | None) -> dict[str, float]:
    """Make a step on three pairs of neighbouring rows: unevenly many of them on each rank."""
    pairs = {row // 2 for row in own_rows(engine) if row % 2}
    chosen = [row for row in range(6) if row // 2 in pairs]
    rows = {name: values[chosen] for name, values in batch_of().items()}
    data = DataProto.from_dict(tensors=rows | {"margins": torch.full([len(chosen)], 0.25)})
    report = update_pairs(engine, data, micro_batch_size, forward_rows=micro_batch_size)
    return report.meta_info["metrics"]


def update_rows() -> dict[str, torch.Tensor]:
    """Return seven rows with everything that a loss can read. One has no advantages."""
    batch = batch_of()
    mask = batch["response_mask"]
    random = torch.Generator().manual_seed(7)

    def numbers(mean: float, spread: float) -> torch.Tensor:
        return (mean + spread * torch.randn(mask.shape, generator=random)) * mask

    old = numbers(-5.0, 0.6)
    advantages = numbers(0.0, 1.0)
    advantages[3] = 0
    return {name: batch[name] for name in ("input_ids", "attention_mask", "response_mask")} | {
        fields.OLD_LOG_PROBS: old,
        fields.ROLLOUT_LOG_PROBS: old + numbers(0.0, 0.1),
        fields.REF_LOG_PROB: old + numbers(0.0, 0.3),
        fields.ADVANTAGES: advantages,
        fields.SELECTED_TOKENS: (numbers(0.0, 1.0) > 0.5) & mask.bool(),
        fields.VALUES: numbers(0.0, 0.5),
        fields.RETURNS: numbers(0.5, 1.0),
    }


def updated(engine: TrainEngine, update: Update):
    """Return the metrics of an update, and the weights after it."""
    rows, chosen = update_rows(), own_rows(engine)
    if not update.old_given:
        del rows[fields.OLD_LOG_PROBS]
    data = DataProto.from_dict({name: tensor[chosen] for name, tensor in rows.items()})
    common = {"loss_agg_mode": update.aggregation, "ppo_micro_batch_size_per_gpu": 2}
    if update.loss is None:
        report = update_values(
            engine, data, schema.CriticConfig(cliprange_value=0.3, **common),
            responses_per_prompt=1, data_ranks=own_part(engine)[1], length_scale=cases.R,
        )  # fmt: skip
    else:
        loss = schema.PolicyLossConfig(name=update.loss)
        report = update_policy(
            engine, data, schema.ActorConfig(policy_loss=loss, **common, **update.terms),
            responses_per_prompt=1, temperature=0.7, length_scale=cases.R,
            data_ranks=own_part(engine)[1], seed=0,
        )  # fmt: skip
    return report.meta_info["metrics"], weights(engine)


def replayed(engine: TrainEngine, subject: Subject, load_from: Path):
    """Make a step with experts that a rollout may have reported. Return its metrics, the weights,
    and log-probabilities after it; None of a dense model."""
    config, rows, chosen = FAMILIES[subject.family](), batch_of(), own_rows(engine)
    if not hasattr(config, "num_experts_per_tok"):
        return None
    engine.load(load_from, STEPS)
    shape = (*rows[fields.INPUT_IDS].shape, config.num_hidden_layers, 4)
    chances = torch.rand(shape, generator=torch.Generator().manual_seed(9))
    rows[fields.ROUTED_EXPERTS] = chances.argsort(-1)[..., :2].to(torch.int8)
    given = {name: values[chosen] for name, values in rows.items()}
    metrics = step(engine, given, subject.head, micro_batch_size=2)
    after = engine.forward(given, entropy=True, temperature=0.7, micro_batch_size=1)
    return metrics, weights(engine), gather_over_ranks((chosen, after))


def build(subject: Subject, root: Path) -> TrainEngine:
    engine = build_engine(
        schema.ModelConfig(
            path=str(root / subject.family), gradient_checkpointing=subject.gradient_checkpointing
        ),
        schema.EngineConfig(**subject.settings),
        OPTIM,
        head=subject.head,
        total_steps=8,
    )
    if subject.settings.get("param_offload"):  # a CPU stands in for a device
        engine._memory.enabled = True
        engine.offload()
    return engine


def bytes_on_device(engine: TrainEngine) -> dict[str, int]:
    """Return state -> bytes of the storages that the engine could move to the host."""
    return {
        state: sum(tensor.untyped_storage().nbytes() for tensor in engine._tensors(state))
        for state in ("parameters", "gradients", "moments")
    }


def observe(subject: Subject, root: Path, load_from: Path | None = None) -> dict[str, object]:
    """Run an engine through everything. All ranks of the engine call it together."""
    engine = build(subject, root)
    chosen = own_rows(engine)
    rows = {name: values[chosen] for name, values in batch_of().items()}
    found: dict[str, object] = {"loaded": weights(engine), "updates": {}}
    entropy = subject.head == "lm"
    one = engine.forward(rows, entropy=entropy, temperature=0.7, micro_batch_size=1)
    found["forward"] = gather_over_ranks((chosen, one))
    found["counts"] = engine.global_counts(len(chosen), 2.0 * len(chosen))
    found["metrics"] = [
        step(engine, rows, subject.head, micro_batch_size=size) for size in (None, 2, 1)
    ]
    found["trained"] = weights(engine)
    if subject.settings.get("param_offload"):
        found["offloaded"] = gather_over_ranks(bytes_on_device(engine))
        engine.config = schema.EngineConfig()
        engine.reload()
        found["reloaded"] = gather_over_ranks(bytes_on_device(engine))
        engine.offload()
    folder = root / f"saved {subject.name}"
    engine.save(folder, STEPS)
    keeper = KeptValues()
    send_state(engine.copy_state(STEPS, whole=True), keeper, "rank")
    nan = {"weight": rows["weight"] * float("nan")} if 0 in chosen else {}
    found["damaged"] = step(engine, rows | nan, subject.head)["skipped_steps"]
    found["after_damage"] = weights(engine)
    gather_over_ranks(None)  # every rank has saved
    engine.load(folder, STEPS)
    found["next"] = step(engine, rows, subject.head)
    found["undisturbed"] = weights(engine)
    engine.restore(partial(receive_state, keeper=keeper, key="rank", step=STEPS))
    step(engine, rows, subject.head)
    found["after_snapshot"] = weights(engine)
    found["steps"] = engine.optimizer_steps
    if subject.head == "lm":
        engine.save_hf(root / f"export {subject.name}")  # a classifier needs a tokenizer
        rollout = build_rollout("hf", schema.ModelConfig(path=str(root / subject.family)))
        WeightSync(engine, rollout, bucket_bytes=4096).run(1)
        found["synced"] = gather_over_ranks(
            {name: tensor.clone() for name, tensor in rollout.module.state_dict().items()}
        )
    if subject.head == "score":
        found["pairs"] = {}
        for size in (None, 1):  # whole pairs in a micro-batch, and pairs in two of them
            engine.load(folder, STEPS)
            metrics = pair_step(engine, size)
            found["pairs"][size] = metrics, weights(engine)
    for update in subject.updates:
        engine.load(folder if load_from is None else load_from, STEPS)
        found["updates"][str(update)] = updated(engine, update)
    found["replayed"] = replayed(engine, subject, folder if load_from is None else load_from)
    if load_from is not None:
        resumed = build(subject, root)
        resumed.load(load_from, STEPS)
        found["resumed"] = step(resumed, rows, subject.head)
        found["after_resume"] = weights(resumed)
    return found


def rank_main(number: int, ranks: int, root: str, subjects: list[Subject]) -> None:
    """Observe the subjects one after another in one process group."""
    if any(subject.settings.get("name") == "megatron" for subject in subjects):
        import megatron_on_cpu

        megatron_on_cpu.install()
    reference = Path(root) / "saved reference"
    for subject in subjects:
        one_layout = Path(f"{reference} {subject.family} {subject.head}")
        found = observe(subject, Path(root), one_layout)
        if number == 0:
            torch.save(found, Path(root) / f"{subject.name}.pt")
        if subject.settings.get("name") == "megatron":
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()

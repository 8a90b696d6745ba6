"""What all training engines have in common, and the types of their batches, outputs and losses.

Shapes: B rows, P prompt columns, R response columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quadriga.checkpoint.files import SavedFile
from quadriga.checkpoint.shards import Block, Origin, RankState, load_rank_state, read_scalars
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.micro_batches import Batch as Batch, check_fields, plan_micro_batches
from quadriga.engines.optimizers import ShardedOptimizer, check_schedule
from quadriga.errors import ConfigError
from quadriga.models.folder import has_tokenizer, local_folder
from quadriga.models.images import MultiModalRows
from quadriga.observability.jsonl import JsonObject
from quadriga.parallel.costs import CostModel
from quadriga.parallel.device import host_empty
from quadriga.parallel.distributed import (
    init_distributed,
    local_device,
    max_over_ranks,
    rank,
    sum_metrics_over_ranks,
    sum_over_ranks,
    world_size,
)
from quadriga.protocol import fields

HeadKind = Literal["lm", "value", "score"]
"""What the model computes for a token: logits over the vocabulary, or one value. The head of a
value model has a bias; that of a reward model ("score") has none, as in a sequence classifier."""

EntropyUse = Literal["unused", "value", "gradient"]
"""What an update needs of the entropies: nothing, their values alone, or their gradients too,
because its loss depends on them."""

Outputs = dict[str, Tensor]
"""`LOG_PROBS` [B, R] (and `ENTROPY`, `FULL_KL` [B, R] if requested), or `VALUES` [B, R]; 0 outside
`response_mask`. Entry t belongs to the state in which response token t is chosen."""

# The names of `Outputs`, each with its unit.
LOG_PROBS = "log_probs"  # nats, log-probability of the response token
ENTROPY = "entropy"  # nats, of the distribution over the vocabulary
FULL_KL = "full_kl"  # nats, KL(policy ‖ reference) over the vocabulary
VALUES = "values"  # reward, expected return

WeightPart = Literal["merged", "unmerged", "adapters"]
"""What a weight sync sends of a model: see `TrainEngine.shard_stream`."""

Fill = Callable[[Mapping[str, Tensor] | Mapping[str, Block]], JsonObject]
"""Writes the tensors of a state, and returns its scalars."""
OwnWeights = Generator[tuple[str, Tensor | Block], None, None]
"""What a rank has of each weight, by checkpoint name."""

SKIPPED_STEPS = "skipped_steps"
"""Metric of `train_step`: the optimizer steps that were skipped so far."""

LossFn = Callable[[Outputs, Batch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(outputs, micro-batch) -> (loss, metrics). Both are this micro-batch's *share* of the value for
the mini-batch: sums over its rows, divided by counts of the whole mini-batch over all ranks
(`TrainEngine.global_counts`). The engine sums the shares over micro-batches and ranks, for the
gradient of the loss and for the metrics. The sum is exact however the rows are split.
Rows whose `response_mask` is all 0 have no outputs, so the function does not receive them."""

# Why shares: three rows with 2, 1 and 5 response tokens, and the mean loss of a token, whose
# denominator is 2 + 1 + 5 = 8. With the micro-batches {0, 1} and {2}:
#
#                        tokens   share of the loss      a token's weight   weight by mean of means
#   micro-batch {0, 1}      3     (l0 + l1 + l2) / 8           1/8                  1/6
#   micro-batch {2}         5     (l3 + … + l7) / 8            1/8                  1/10
#
# The shares add up to the mean over 8 tokens. Averaging the means of the two micro-batches would
# give the tokens of short micro-batches a larger weight, and the split would change the gradient.


State = Literal["parameters", "gradients", "moments"]
"""What an engine can offload: parameters; gradients that it keeps between steps, which are freed;
the optimizer's moments and float32 copies of parameters."""


@dataclass(frozen=True)
class Pass:
    """A forward pass over some micro-batches.

    Attributes:
        batch: the rows.
        plan: the rows of each micro-batch; None: a dummy micro-batch.
        temperature: the logits are divided by it.
        entropy: whether entropies are computed.
        images: of the rows.
    """

    batch: Batch
    plan: list[Tensor | None]
    temperature: float
    entropy: bool
    images: MultiModalRows | None


class TrainEngine(ABC):
    """A model and its optimizer. All ranks of the group must call the same method together.

    Concurrency, for every method:

    consumes      the rows of this data-parallel rank
    waits for     all ranks of the group, which must call the same methods in the same order
    produces      numbers for each response token, or one optimizer step
    unblocked by  the call of the last rank; a rank without rows computes dummy micro-batches

    Args:
        optim: None for a frozen model, for example the reference policy.
        head: "lm" for log-probabilities, "value" for one value a token, "score" for a reward model.
        device: the device of this rank, or its type ("cuda").
        total_steps: optimizer steps of the run, if `optim.total_steps` is not set.

    Raises:
        ModelError: the folder does not hold a suitable model.
        ConfigError: settings are in conflict.
    """

    shares_prompts = True  # packed rows compute equal prompts once
    stages = 1  # of a pipeline, each of which needs a micro-batch
    round_size = 1  # of which the number of micro-batches is a multiple
    cost: CostModel  # of sequences
    reports = True  # whether this rank reports the numbers of its data-parallel rank

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None = None,
        *,
        head: HeadKind = "lm",
        device: str | torch.device = "cpu",
        total_steps: int | None = None,
    ) -> None:
        self.config, self.head = engine, head
        self.model_config = in_local_folders(model)
        self.device = local_device(device)
        if optim is not None:
            self.total_steps = total_steps if optim.total_steps is None else optim.total_steps
            check_schedule(optim, self.total_steps)
        init_distributed(self.device.type)
        self.optimizer: ShardedOptimizer | None = None
        self._memory = DeviceMemory(self.device, self._tensors)
        self._build(optim)
        if engine.param_offload:
            self._memory.offload("parameters", "gradients")
        if engine.optimizer_offload:
            self._memory.offload("moments")

    @abstractmethod
    def _build(self, optim: OptimConfig | None) -> None:
        """Load the model, and make the optimizer if there is one."""

    @abstractmethod
    def _check_images(self, batch: Batch, images: MultiModalRows | None) -> None:
        """Raise an `InputError` if the images are not those of the rows, or cannot be computed."""

    @abstractmethod
    def _outputs(self, of: Pass) -> Iterator[tuple[Tensor | None, Outputs]]:
        """Yield the rows and the outputs of each micro-batch."""

    @abstractmethod
    def _accumulate(
        self, of: Pass, loss_fn: LossFn, reference: TrainEngine | None
    ) -> Iterator[Mapping[str, Tensor | float]]:
        """Add up gradients. Yield the loss and the metrics of each micro-batch with rows."""

    @abstractmethod
    def _tensors(self, state: State) -> Iterable[Tensor]:
        """Return the tensors of a state on the device. There are no moments before a step."""

    @abstractmethod
    def _state(
        self, *, save: bool, whole: bool = False
    ) -> Mapping[str, Tensor] | Mapping[str, Block]:
        """Return what a checkpoint holds of the rank: to be written, or to be read into. `whole`:
        with what other ranks write."""

    @abstractmethod
    def _take(self, state: Mapping[str, Tensor | Block]) -> dict[str, Tensor]:
        """Use what was read, and return the moments, named as the optimizer names them."""

    @abstractmethod
    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) of every weight.

        A tied name follows its weight, with the same tensor. All ranks must exhaust the iterator,
        because gathering a tensor is a collective.
        """

    @abstractmethod
    def shard_stream(self, part: WeightPart = "merged") -> OwnWeights:
        """Yield `state_stream` with what this rank has of each weight, so that no rank gathers it:
        a `DTensor`, a block, which may be empty, or the whole tensor.

        All ranks must exhaust it, and close it if they cannot: the engine may have loaded its
        weights for it. Adapters are yielded for a rollout engine that holds them beside its
        weights. B is multiplied by the scaling:

            part         what is yielded
            merged       W + B A of every layer
            unmerged     W of every layer, then A and B
            adapters     A and B

        Raises:
            ConfigError: the model has no adapters to yield.
        """

    @abstractmethod
    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder. Rank 0 writes; all ranks must call this."""

    def without_adapters(self) -> TrainEngine:
        """Return the base model, frozen, on the same weights; `ConfigError` without adapters."""
        raise ConfigError(
            f"{type(self).__name__} has no adapters; set engine.name=fsdp, or remove model.lora"
        )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps since the start of the run, those before a resume included; 0 for a
        frozen model."""
        return 0 if self.optimizer is None else self.optimizer.step_count

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> Outputs:
        """Compute outputs without gradients: float32, on the CPU, rows in the batch's order.

        Args:
            temperature: the logits are divided by it.
            entropy: also compute `entropy`.
            micro_batch_size: rows of a micro-batch. None: as the engine's settings say.
            images: of the rows, for a model that takes images; None: they are text.

        Raises:
            FieldError: the batch lacks a required field, or `images` do not fit it.
        """
        plan = self.micro_batches(batch, micro_batch_size=micro_batch_size, images=images)
        shape = batch[fields.RESPONSE_MASK].shape
        names = [VALUES] if self.head != "lm" else [LOG_PROBS, *[ENTROPY] * entropy]
        outputs: Outputs = {name: torch.zeros(shape) for name in names}
        with self._on_device("parameters"), torch.no_grad():
            for rows, found in self._outputs(Pass(batch, plan, temperature, entropy, images)):
                for name, values in found.items() if rows is not None else ():
                    outputs[name][rows] = values.float().cpu()
        return self._complete(outputs)

    def _complete(self, outputs: Outputs) -> Outputs:
        """Return outputs that other ranks have computed of the same rows."""
        return outputs

    def train_step(
        self,
        mini_batch: Batch,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        reference: TrainEngine | None = None,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step.

        Args:
            loss_fn: see `LossFn`.
            reference: an engine of the same kind on the same ranks, whose model has the same
                vocabulary. The outputs then contain `full_kl`: KL(policy ‖ reference) of each
                token, over the vocabulary and at `temperature`, with its gradient.
            images: as in `forward`.

        Returns:
            The metrics of the loss function and `loss`, summed over micro-batches and ranks;
            `grad_norm` (before clipping), `lr`, `skipped_steps` and `micro_batches`.

        Raises:
            ConfigError: the engine has no optimizer, or `reference` is of another kind.
            FieldError: the batch lacks a required field.
        """
        if self.optimizer is None:
            raise ConfigError("this engine has no optimizer, because it was built with optim=None")
        plan = self.micro_batches(mini_batch, micro_batch_size=micro_batch_size, images=images)
        of = Pass(mini_batch, plan, temperature, entropy, images)
        totals = {"loss": 0.0}  # also if no rank has rows
        with self._on_device("parameters", "gradients"):
            for metrics in self._accumulate(of, loss_fn, reference):
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
            # Activations and whole gradients are freed before the moments come to the device.
            with self._on_device("moments"):
                norm, rate = self.optimizer.step()
        # Ranks that compute the same rows together have the same numbers.
        return sum_metrics_over_ranks(totals if self.reports else {}) | {
            "grad_norm": norm,
            "lr": rate,
            SKIPPED_STEPS: float(self.optimizer.skipped),
            "micro_batches": float(len(plan)),
        }

    def micro_batches(
        self,
        batch: Batch,
        *,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> list[Tensor | None]:
        """Return the row indices of each micro-batch that `train_step` makes of a batch.

        Rows whose `response_mask` is all 0 are in none. None: a micro-batch without rows of this
        rank. All ranks have the same number of micro-batches. Waits for: the other ranks, which
        must call this together.
        """
        # FSDP's collectives must match. Three ranks whose rows make 2, 3 and 0 micro-batches; each
        # forward and backward gathers the parameters of every unit from all ranks:
        #
        #   rank 0   [rows] [rows] [rows]     the rows of two micro-batches, in smaller ones
        #   rank 1   [rows] [rows] [rows]
        #   rank 2   None   None   None
        #
        # If rank 0 had two prompt groups only, its third micro-batch would be None: a third one
        # would compute a prompt twice.
        check_fields(batch)
        self._check_images(batch, images)
        config = self.config
        plan = partial(
            plan_micro_batches, batch, size=micro_batch_size,
            max_tokens=config.micro_batch_tokens if config.use_dynamic_bsz else None,
            share_prompts=self.shares_prompts, cost=self.cost, stages=self.stages,
        )  # fmt: skip
        found = plan()
        count = max_over_ranks(max(len(found), 1), self.device)
        count = -(-count // self.round_size) * self.round_size
        if len(found) < count:
            found = plan(least=count)
        return [*found, *[None] * (count - len(found))]

    def global_counts(self, *counts: float | Tensor) -> list[float]:
        """Return the sum of each count over ranks. All of them are summed in one collective."""
        own = [float(count) if self.reports else 0.0 for count in counts]
        return sum_over_ranks(own, self.device)

    # Checkpoints

    def save(self, folder: str | Path, step: int = 0) -> list[SavedFile]:
        """Write this rank's parameter shards, optimizer state and random state.

        Args:
            step: the training step, which each file holds.

        Returns:
            The files of this rank, named relative to `folder`.
        """
        with self._rank_state(step) as state:
            return state.write(folder)

    def copy_state(
        self, step: int, into: RankState | None = None, *, whole: bool = False
    ) -> RankState:
        """Return a copy in host memory of what `save` writes; see `RankState.copied`. A `whole`
        one can be given to `restore`."""
        with self._rank_state(step, whole=whole) as state:
            return state.copied(into, whole=whole)

    @contextmanager
    def _rank_state(self, step: int, *, whole: bool = False) -> Iterator[RankState]:
        scalars = {} if self.optimizer is None else self.optimizer.scalars()
        with self._on_device("parameters", "moments"), torch.no_grad():
            if not whole:  # a checksum of frozen weights reads all of them
                scalars |= self._own_scalars()
            origin = Origin(step, rank(), world_size())
            yield RankState.of(self._state(save=True, whole=whole), scalars, origin)

    def restore(self, fill: Fill) -> None:
        """Take the state of a rank with the same place. `fill` also restores the random
        states."""
        with self._on_device("parameters", "moments"), torch.no_grad():
            state = self._state(save=False)
            saved = fill(state)
            moments = self._take(state)
            if self.optimizer is not None:
                self.optimizer.load(moments, saved)

    def load(self, folder: str | Path, step: int | None = None) -> None:
        """Read what `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: files are missing, of another model, or of another step than `step`
                (None: than each other).
        """
        saved = read_scalars(folder, step=step)

        def read(state: Mapping[str, Tensor] | Mapping[str, Block]) -> JsonObject:
            self._check_saved(folder, saved, state)
            load_rank_state(folder, state, rank=rank(), step=step)
            return saved

        self.restore(read)

    def _own_scalars(self) -> Mapping[str, object]:
        """Return what a checkpoint holds beside the tensors and the counts of the optimizer."""
        return {}

    def _check_saved(  # noqa: B027  # nothing to check by default
        self, folder: str | Path, saved: Mapping[str, object], state: Collection[str]
    ) -> None:
        """Raise `CheckpointError` if a checkpoint is of a model that is trained otherwise."""

    # Memory

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, and free their device memory.

        Methods that need them reload them for the call. Does nothing on a CPU.
        """
        self._end_pass(failed=False)
        self._memory.offload("parameters", "gradients", "moments")
        self._memory.return_freed()

    def reload(self) -> None:
        """Move parameters and optimizer state back to the device.

        A state that the settings keep in host memory between calls stays there.
        """
        if not self.config.param_offload:
            self._memory.reload("parameters", "gradients")
        if not self.config.optimizer_offload:
            self._memory.reload("moments")

    @contextmanager
    def _on_device(self, *states: State) -> Iterator[None]:
        """Reload what a method needs, and offload it again at the end of the block."""
        reloaded = self._memory.reload(*states)
        failed = False
        try:
            yield
        except (Exception, KeyboardInterrupt):  # not the end of a stream that is not exhausted
            failed = True
            raise
        finally:
            self._end_pass(failed=failed)
            self._memory.offload(*reloaded)

    def _end_pass(self, *, failed: bool) -> None:  # noqa: B027  # nothing is gathered by default
        """Free what a pass has gathered; if it failed, its gradients too."""


def in_local_folders(config: ModelConfig) -> ModelConfig:
    """Return the settings with folders in place of names of the hub (`hf://owner/name`).

    A name can stand for other files at the end of a run than at its start. The export takes the
    tokenizer and the dtypes from the files that were loaded. It has no tokenizer if there is none
    now, and one that is gone by then is an error.
    """
    path, tokenizer = str(local_folder(config.path)), config.tokenizer_path
    if tokenizer is not None:
        tokenizer = str(local_folder(tokenizer))
    elif has_tokenizer(path):
        tokenizer = path
    return replace(config, path=path, tokenizer_path=tokenizer)


Copies = list[tuple[torch.UntypedStorage, Tensor | None, int]]
"""Storages of the device, each with its values on the host (None: zeros) and its bytes."""


class DeviceMemory:
    """Which states of an engine are on the host.

    Storages are emptied in place. Several objects refer to the storage of one parameter (the
    module, FSDP's flat shard, the optimizer's view), and moving only one of them would leave the
    memory allocated for the others:

        module      ─┐
        FSDP shard  ─┼─► storage of 4 GB  ── offload ──►  storage of 0 bytes, and 4 GB on the host
        optimizer   ─┘

    After `reload` all of them refer to the same storage as before, with the same values.

    Args:
        device: the device of the engine. From a CPU nothing is offloaded.
        tensors: returns the tensors of a state that exist.
    """

    def __init__(self, device: torch.device, tensors: Callable[[State], Iterable[Tensor]]) -> None:
        self.enabled = device.type != "cpu"
        self.offloaded: dict[State, Copies] = {}
        self._device = device
        self._tensors = tensors

    def offload(self, *states: State) -> None:
        """Move those of the states to the host that are on the device."""
        for state in states:
            if not self.enabled or state in self.offloaded:
                continue
            found = {s.data_ptr(): s for s in (t.untyped_storage() for t in self._tensors(state))}
            # Memory that numpy or a mapped file shares belongs to the CPU and cannot be emptied.
            storages = [s for s in found.values() if s.nbytes() and s.resizable()]
            freed = state == "gradients"  # they are not needed again
            copies = [(s, None if freed else _to_host(s), s.nbytes()) for s in storages]
            self.offloaded[state] = copies
            for storage in storages:
                storage.resize_(0)

    def reload(self, *states: State) -> list[State]:
        """Move those of the states to the device that are on the host, and return them."""
        on_host = [state for state in states if state in self.offloaded]
        for state in on_host:
            for storage, host, size in self.offloaded.pop(state):
                storage.resize_(size)
                if host is None:
                    _bytes_of(storage).zero_()
                else:
                    _bytes_of(storage).copy_(host, non_blocking=True)
        return on_host

    def return_freed(self) -> None:
        """Return the freed memory to the driver.

        The allocator of torch keeps it otherwise, and only this process's tensors can use it.
        """
        if self._device.type != "cpu":
            getattr(torch, self._device.type).empty_cache()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of the whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    # Pinned memory makes the copies fast. They are in the order of the device's stream, so a
    # storage may be emptied, or its host copy dropped, before the copy has run.
    pinned = storage.device.type != "cpu"
    host = host_empty([storage.nbytes()], torch.uint8, pinned=pinned)
    return host.copy_(_bytes_of(storage), non_blocking=True)

"""The settings of a run that every rank needs, the setup of a rank, and the workers with one
engine: their base class and the critic."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from quadriga.checkpoint.files import SavedFile
from quadriga.checkpoint.snapshots import receive_state, send_state
from quadriga.checkpoint.writer import RankWriter, write_files
from quadriga.config.commands import RMConfig
from quadriga.config.schema import (
    CriticConfig,
    DeviceName,
    EngineConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
)
from quadriga.engines import build_engine, kind_of
from quadriga.engines.base import VALUES, HeadKind, TrainEngine
from quadriga.errors import ConfigError, QuadrigaError, WorkerError
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import (
    Dispatch,
    RankLayout,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.single_controller.environment import LOCAL_PORT
from quadriga.single_controller.keepers import Keeper
from quadriga.workers.method_fields import COMPUTE_VALUES, UPDATE_CRITIC

ConfigT = TypeVar("ConfigT", bound=CriticConfig | RewardModelConfig | RMConfig)


@dataclass(frozen=True)
class RankRuntime:
    """What every rank of a role is told about the run. All ranks of the role get the same."""

    device: DeviceName = "auto"
    threads: int | None = None  # CPU threads per rank; None: do not change the process's setting
    seed: int = 0
    total_steps: int | None = None  # optimizer steps of the role in the run, for its schedule
    max_response_length: int = 512  # tokens
    warmup_steps: int = 0  # first steps of the run, in which the actor is not updated
    correction: RolloutCorrectionConfig | None = None  # of old responses
    user_files: tuple[tuple[str, bytes], ...] = ()
    """Path and content of files that register estimators, losses, dispatch modes."""


def groups_of_copies(engine: EngineConfig | None, ranks: int, copy: int) -> list[tuple[int, ...]]:
    """Return the ranks that hold each copy of the rollout's weights together.

    With strides where each tensor-parallel shard of the actor is then a part of the rank's shard of
    the rollout, so that nothing is held twice (HybridFlow, arXiv 2409.19256, section 5.3), else
    neighbours. Neighbours of the FSDP engine that divide tokens have whole layers, so they are in
    one copy.

    Args:
        engine: of the actor on these ranks; None: they generate only.
        copy: ranks of a copy, which divide the ranks.
    """
    # 4 tensor-parallel ranks with a quarter each, copies of 2 ranks with a half each:
    #
    #   training           quarter 0   quarter 1   quarter 2   quarter 3
    #   (0, 2) and (1, 3)  half 0      half 0      half 1      half 1     each contains the quarter
    #   (0, 1) and (2, 3)  half 0      half 1      half 0      half 1     those of 1 and 2 do not
    tensor = 1 if engine is None else engine.tensor_parallel_size
    if engine is not None and not kind_of(engine).in_stages:
        tensor = tensor if engine.model_parallel_size == tensor else 1
    block, step = (tensor, tensor // copy) if tensor % copy == 0 else (copy, 1)
    return [
        tuple(range(first + start, first + block, step))
        for first in range(0, ranks, block)
        for start in range(step)
    ]


def register_groups(worker: Worker, mesh: str, groups: Sequence[tuple[int, ...]]) -> None:
    """Register a mesh in which the ranks of a group receive the same rows, and the first of them
    returns the result. All groups have one size.

    Raises:
        ConfigError: the size of a group does not divide the number of ranks.
    """
    _check_divides(worker, mesh, len(groups[0]))
    part = next(i for i, group in enumerate(groups) if worker.rank in group)
    is_collect = groups[part][0] == worker.rank
    worker._register_dispatch_collect_info(mesh, dp_rank=part, is_collect=is_collect)


def register_engine_ranks(worker: Worker, mesh: str, engine: EngineConfig) -> None:
    """Register the mesh of a training engine: which ranks receive the same rows, and which of them
    returns the result.

    Ranks of the FSDP engine that compute the same rows are neighbours.
    Those of the Megatron engine are the tensor- and context-parallel ranks of all stages, and the
    first of them in the last stage returns the result. Their coordinates are registered for the
    MEGATRON dispatch modes too. With 8 ranks, tensor 2 and pipeline 2:

        data-parallel rank 0    ranks 0 1 (stage 0), 4 5 (stage 1); rank 4 returns the result
        data-parallel rank 1    ranks 2 3 (stage 0), 6 7 (stage 1); rank 6 returns the result

    Raises:
        ConfigError: the ranks that receive the same rows do not divide the ranks.
    """
    together = engine.model_parallel_size
    if not kind_of(engine).in_stages:
        register_groups(worker, mesh, groups_of_copies(None, worker.world_size, together))
        return
    tensor, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    context = engine.context_parallel_size
    _check_divides(worker, mesh, together)
    at = RankLayout.of_rank(worker.rank, tensor, context, worker.world_size // together, stages)
    worker._register_rank_layout(at)
    is_collect = at.tp_rank == at.cp_rank == 0 and at.pp_rank == stages - 1
    worker._register_dispatch_collect_info(mesh, dp_rank=at.dp_rank, is_collect=is_collect)


def _check_divides(worker: Worker, mesh: str, size: int) -> None:
    if worker.world_size % size:
        raise ConfigError(
            f"{size} ranks of mesh {mesh!r} compute the same rows, which does not divide the "
            f"{worker.world_size} ranks of {type(worker).__name__}"
        )


def check_section(worker: Worker, config: object, *kinds: type) -> None:
    """Raise `ConfigError` if a worker is given other settings than Quadriga's."""
    if not isinstance(config, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{type(worker).__name__}: config must be {expected}, got {type(config).__name__}; use "
            "load_config. Worker classes of quadriga.compat translate settings of another library "
            "(docs/concepts/migration.md)",
            key="config",
        )


def prepare_rank(runtime: RankRuntime, *, generates: bool = False) -> str:
    """Set threads and seed, join the process group, load the user's files.

    `generates`: the rank does nothing else, which local ranks of one process do without a group.

    Consumes: the environment of the rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    Waits for: the other ranks of the worker group, which form the process group together.

    Returns:
        The name of the device: "cpu", "cuda" or "npu".
    """
    import torch

    from quadriga.algorithms.user_files import load_user_file
    from quadriga.observability.quiet import silence_libraries
    from quadriga.parallel.device import get_device_name
    from quadriga.parallel.distributed import init_distributed

    silence_libraries()
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    # Every rank uses the same seed: a value head with random initial weights must be equal on all
    # ranks before it is sharded.
    torch.manual_seed(runtime.seed)
    device = get_device_name() if runtime.device == "auto" else runtime.device
    init_distributed(device, alone=generates and os.environ.get("MASTER_PORT") == LOCAL_PORT)
    # The registries are per process: what a user's file registered on the controller is not
    # known here until the file is loaded here too.
    for path, content in runtime.user_files:
        load_user_file(path, content)
    return device


class SavedWorker(Worker):
    """A worker with a trained model, which it saves and exports."""

    def _trained(self) -> TrainEngine:
        """Return the engine of the model. Raises `WorkerError` if the worker has none."""
        raise NotImplementedError  # each worker keeps its engines in its own way

    def __init__(self) -> None:
        super().__init__()
        self._writer, self._snapshots = RankWriter(), RankWriter()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale_lr(self, factor: float) -> None:
        """Train with `factor` × the learning rate of the schedule. Checkpoints keep the factor."""
        if (optimizer := self._trained().optimizer) is not None:
            optimizer.lr_scale = factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int) -> list[SavedFile]:
        """Save the shard of this rank under `path`, as of `step`. Return its files."""
        return self._trained().save(path, step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_saving(self, path: str, step: int) -> list[SavedFile] | None:
        """Copy the shard of this rank to host memory, and write it beside the next calls, with a
        report of its files (`checkpoint.writer`). A subclass with its own `save_checkpoint`
        writes in the call, and returns its files."""
        if type(self).save_checkpoint is not SavedWorker.save_checkpoint:
            return self.save_checkpoint(path, step) or []
        copied = partial(self._trained().copy_state, step)
        self._writer.start(copied, partial(write_files, folder=Path(path)))
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_saving(self, wait: bool) -> None:
        """Raise what has failed in the writing of `start_saving`. `wait`: until it has ended."""
        self._writer.finish(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str, step: int) -> None:
        """Load a folder of `save_checkpoint` that was saved at `step`."""
        self._trained().load(path, step)
        self._loaded(step)

    def _loaded(self, step: int) -> None:
        """Continue with a state that was loaded."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_snapshot(self, role: str, step: int, keepers: Sequence[Keeper]) -> None:
        """Copy the state of this rank to host memory, and send it to its keeper beside the next
        calls."""
        keeper, key = keepers[self.rank], f"{role}/{self.rank}"
        copied = partial(self._trained().copy_state, step, whole=True)
        self._snapshots.start(copied, partial(send_state, keeper=keeper, key=key))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_snapshot(self) -> str:
        """Wait until the snapshot is sent. Return what has failed in a line, or ""."""
        try:
            self._snapshots.finish(wait=True)
        except QuadrigaError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_snapshot(self, role: str, step: int, keepers: Sequence[Keeper]) -> None:
        """Load the snapshot of a step from the keeper of this rank.

        Raises:
            LostObjectError: the keeper has ended, or does not have it.
        """
        keeper, key = keepers[self.rank], f"{role}/{self.rank}"
        self._trained().restore(partial(receive_state, keeper=keeper, key=key, step=step))
        self._loaded(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the model as a Hugging Face folder with its tokenizer."""
        self._trained().save_hf(path)


class EngineWorker(SavedWorker, Generic[ConfigT]):
    """A worker with one training engine, which `init_model` builds.

    Args:
        role: for messages, and as the name of the mesh of the engine's ranks.
        config: the section of the role.
        head: of the model.
        runtime: what every rank of the role is told about the run.
    """

    def __init__(
        self, role: str, config: ConfigT, head: HeadKind, runtime: RankRuntime | None
    ) -> None:
        super().__init__()
        check_section(self, config, CriticConfig, RewardModelConfig, RMConfig)
        self.config, self.head = config, head
        self.role = role
        self.runtime = runtime or RankRuntime()
        self.device = prepare_rank(self.runtime)
        self.engine: TrainEngine | None = None
        register_engine_ranks(self, role, config.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model with its head. A head that the folder of a trained model does not have is
        zero."""

        config: CriticConfig | RewardModelConfig | RMConfig = self.config
        self.engine = build_engine(
            config.model, config.engine,
            None if isinstance(config, RewardModelConfig) else config.optim, head=self.head,
            device=self.device, total_steps=self.runtime.total_steps,
        )  # fmt: skip

    def _engine(self) -> TrainEngine:
        if self.engine is None:
            text = f"rank {self.rank} with role {self.role!r} has no training engine"
            raise WorkerError(f"{text}: call init_model first", role=self.role, rank=self.rank)
        return self.engine

    def _trained(self) -> TrainEngine:
        return self._engine()


_ON_CRITIC = make_nd_compute_dataproto_dispatch_fn("critic")


class CriticWorker(EngineWorker[CriticConfig]):
    """The value model in one rank.

    Args:
        config: settings of the critic. `model.path` must be set; the trainer takes it, and
            `ppo_mini_batch_size` and `ppo_epochs`, from the actor where the user gave none.
        responses_per_prompt: sequences per prompt. `ppo_mini_batch_size` counts prompts.
        runtime: what every rank of the role is told about the run.
    """

    def __init__(
        self,
        config: CriticConfig,
        responses_per_prompt: int = 1,
        runtime: RankRuntime | None = None,
    ) -> None:
        super().__init__("critic", config, "value", runtime)
        self.responses_per_prompt = responses_per_prompt

    @register(dispatch_mode=_ON_CRITIC, reads=COMPUTE_VALUES.inputs)
    def compute_values(self, data: DataProto) -> DataProto:
        """Compute `values` [B, R] float32: the value of the state before each response token.

        Reads the fields `COMPUTE_VALUES.reads`.
        """
        rows = {key: data.batch[key] for key in COMPUTE_VALUES.reads}
        size = self.config.engine.forward_rows(self.config.ppo_micro_batch_size_per_gpu)
        outputs = self._engine().forward(rows, micro_batch_size=size)
        return DataProto.from_dict(tensors={fields.VALUES: outputs[VALUES]})

    @register(dispatch_mode=_ON_CRITIC, reads=UPDATE_CRITIC.inputs)
    def update_critic(self, data: DataProto) -> DataProto:
        """Minimise the value loss: epochs × mini-batches, one optimizer step each.

        Reads the fields `UPDATE_CRITIC.reads`.

        Returns:
            The metrics of the update; see `quadriga.workers.updates.update_values`.
        """
        from quadriga.workers.updates import update_values

        return update_values(
            self._engine(), data, self.config, responses_per_prompt=self.responses_per_prompt,
            data_ranks=self.world_size // self.config.engine.model_parallel_size,
            length_scale=self.runtime.max_response_length,
        )  # fmt: skip

"""Generation groups without redundancy: the 3D-HybridEngine of HybridFlow (arXiv 2409.19256, §5).

Training uses N = p · t · d ranks: p pipeline stages, t tensor-parallel ranks, d replicas. The same
ranks generate with p_g stages and t_g tensor-parallel ranks, which are fewer, so each training
replica becomes d_g = p·t / (p_g·t_g) generation replicas. The ranks that hold different shards of
one generation shard are a *micro data-parallel group*, of d_g ranks. M is the size of the model.

**Consecutive ranks** (`consecutive=True`, as engines group them by themselves) put a rank into a
generation shard that need not contain its training shard. **Strides** of t / t_g ranks (and p / p_g
stages) always do. With t = 4 and t_g = 2:

                              rank 0    rank 1    rank 2    rank 3
    training shard            quarter 0 quarter 1 quarter 2 quarter 3
    generation, consecutive   half 0    half 1    half 0    half 1       ranks 1 and 2 miss theirs
    generation, strides       half 0    half 0    half 1    half 1
    generation groups                   strides: (0, 2) (1, 3)
    micro data-parallel groups          strides: (0, 1) (2, 3)

Table 2 of the paper compares what one rank does at each change from training to generation:

    design         received                            peak memory   redundancy
    DS-Chat        (tpd − 1) / (tpd) · M               M             M / (tpd)
    HybridFlow-V   (tp − 1) / (tp) · M                 M             M / (tp)
    HybridFlow     (tp − t_g·p_g) / (t_g·p_g·tp) · M   M/(t_g·p_g)   0

DS-Chat trains with ZeRO-3 over all ranks and gathers the whole model on each. HybridFlow-V gathers
in each model-parallel group, with consecutive generation ranks. The redundancy is that of the rank
with the most; it is 0 where p_g · t_g = 1 and the whole model is generated with, and in
HybridFlow-V where the groups do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quadriga.config.schema import EngineConfig
from quadriga.errors import ConfigError
from quadriga.parallel.layouts import Degrees, Layout, Model, Stored, parallel_layout

Design = Literal["ds-chat", "hybridflow-v", "hybridflow"]


@dataclass(frozen=True)
class HybridDegrees:
    """Parallel degrees of training and of generation on the same ranks.

    Ranks are numbered with tensor parallelism innermost, then replicas, then stages, as in
    Megatron-LM.

    Raises:
        ConfigError: a degree is below 1, or a generation degree does not divide its training
            degree: then no grouping is without redundancy.
    """

    tensor: int
    pipeline: int
    replicas: int
    gen_tensor: int
    gen_pipeline: int = 1

    def __post_init__(self) -> None:
        for training, generation, name in (
            (self.tensor, self.gen_tensor, "tensor"),
            (self.pipeline, self.gen_pipeline, "pipeline"),
        ):
            if min(training, generation, self.replicas) < 1 or training % generation:
                raise ConfigError(
                    f"{name}-parallel ranks of generation must divide those of training, so that "
                    f"each training shard is part of a generation shard; got {generation} for "
                    f"{training}, with {self.replicas} replicas"
                )

    @property
    def world_size(self) -> int:
        """N."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def model_parallel(self) -> int:
        """Ranks that share one copy of the model in training: t · p."""
        return self.tensor * self.pipeline

    @property
    def gen_model_parallel(self) -> int:
        """Ranks that share one copy of the model in generation: t_g · p_g."""
        return self.gen_tensor * self.gen_pipeline

    @property
    def micro_replicas(self) -> int:
        """Generation replicas in one training replica, d_g."""
        return self.model_parallel // self.gen_model_parallel

    @property
    def training(self) -> Degrees:
        """The degrees of training."""
        return Degrees(tensor=self.tensor, replicas=self.replicas, pipeline=self.pipeline)

    def gen_place(self, rank: int, *, consecutive: bool = False) -> tuple[int, int]:
        """Return (tensor-parallel rank, stage) of a rank in generation."""
        place = self.training.place(rank)
        if consecutive:
            # Ranks of one training replica in order, split as an engine would split them.
            index = place.stage * self.tensor + place.tensor
            return index % self.gen_tensor, index // self.gen_tensor % self.gen_pipeline
        tensor_step = self.tensor // self.gen_tensor
        stage_step = self.pipeline // self.gen_pipeline
        return place.tensor // tensor_step, place.stage // stage_step

    def micro_groups(self) -> list[tuple[int, ...]]:
        """Return the micro data-parallel groups: ranks of one training replica whose training
        shards are together one generation shard."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.world_size):
            key = (self.training.place(rank).replica, *self.gen_place(rank))
            groups.setdefault(key, []).append(rank)
        return [tuple(group) for group in groups.values()]

    def generation_groups(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks that generate together: one of each micro data-parallel group
        of a training replica, in the order (stage, tensor-parallel rank)."""
        groups: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for group in self.micro_groups():
            for index, rank in enumerate(group):
                tensor, stage = self.gen_place(rank)
                key = (self.training.place(rank).replica, index)
                groups.setdefault(key, []).append((stage, tensor, rank))
        return [tuple(rank for *_, rank in sorted(group)) for group in groups.values()]


def groups_of_copies(tensor: int, pipeline: int, ranks: int, copy: int) -> list[tuple[int, ...]]:
    """Return the ranks that hold each copy of the rollout's weights together.

    With strides where each training shard is then part of a generation shard, else neighbours.

    Args:
        tensor, pipeline: the degrees of training; 1 if the ranks generate only.
        ranks: of the rollout.
        copy: ranks of a copy, which divide the ranks.
    """
    if tensor % copy == 0 and ranks % (tensor * pipeline) == 0:
        replicas = ranks // (tensor * pipeline)
        return sorted(HybridDegrees(tensor, pipeline, replicas, copy).generation_groups())
    return [tuple(range(first, first + copy)) for first in range(0, ranks, copy)]


def copies_of_actor(engine: EngineConfig, ranks: int, copy: int) -> list[tuple[int, ...]]:
    """Return `groups_of_copies` on the ranks of an actor.

    Neighbours of the FSDP engine that divide tokens have whole layers, so they are in one copy.
    """
    tensor, stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
    if engine.name == "fsdp" and engine.model_parallel_size > tensor:
        tensor = 1
    return groups_of_copies(tensor, stages, ranks, copy)


def generation_layout(
    stored: Sequence[Stored], model: Model, degrees: HybridDegrees, *, consecutive: bool = False
) -> Layout:
    """Return the layout of generation on the ranks of training.

    Args:
        stored: how the rollout engine stores each tensor, with the stages of generation.
        model: the weights.
        consecutive: generation groups of consecutive ranks instead of strides.
    """
    shards = parallel_layout(
        Model(model.weights, tuple(stored), model.tied),
        Degrees(tensor=degrees.gen_tensor, pipeline=degrees.gen_pipeline),
    )
    ranks = {}
    for rank in range(degrees.world_size):
        tensor, stage = degrees.gen_place(rank, consecutive=consecutive)
        ranks[rank] = shards.ranks[stage * degrees.gen_tensor + tensor]
    return Layout(model.weights, ranks, model.tied)


def layout_of_copies(model: Model, groups: Sequence[tuple[int, ...]]) -> Layout:
    """Return the layout of a model of which the ranks of each group hold a copy together."""
    shards = parallel_layout(model, Degrees(tensor=len(groups[0])))
    ranks = {rank: shards.ranks[i] for group in groups for i, rank in enumerate(group)}
    return Layout(model.weights, ranks, model.tied)


def transition_volume(design: Design, degrees: HybridDegrees) -> Fraction:
    """Return what a rank receives before generation, as a share of M (table 2, row 1)."""
    ranks = {
        "ds-chat": degrees.world_size,
        "hybridflow-v": degrees.model_parallel,
    }
    if design in ranks:
        return Fraction(ranks[design] - 1, ranks[design])
    # What it generates with, less what it has: M / (t_g·p_g) − M / (t·p).
    trained, generated = degrees.model_parallel, degrees.gen_model_parallel
    return Fraction(trained - generated, generated * trained)


def peak_memory(design: Design, degrees: HybridDegrees) -> Fraction:
    """Return the weights that a rank holds at most, as a share of M (table 2, row 2)."""
    if design == "hybridflow":
        return Fraction(1, degrees.gen_model_parallel)
    return Fraction(1)


def redundancy(design: Design, degrees: HybridDegrees) -> Fraction:
    """Return the training weights that a rank holds and does not generate with, as a share of M
    (table 2, row 3): of the rank with the most."""
    if design == "ds-chat":
        return Fraction(1, degrees.world_size)
    if design == "hybridflow-v":
        return Fraction(1, degrees.model_parallel)
    return Fraction(0)

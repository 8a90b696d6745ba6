"""The worker of the policy, and the one that trains it on given responses.

The policy has three uses: actor, rollout and reference. One process may have all three. The
training engine shards the trained parameters over the ranks. The rollout engine holds its own copy;
`sync_weights` updates that copy and compares a digest of every tensor. `generate_batch` is the part
of `generate_sequences` that fits any engine: from prompts to a batch with responses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from quadriga.config.schema import ActorRolloutRefConfig, EngineConfig, ModelConfig, SamplingConfig
from quadriga.engines.base import ENTROPY, LOG_PROBS, Outputs, TrainEngine
from quadriga.errors import ConfigError, FieldError, WorkerError
from quadriga.models.images import MultiModalRows, image_tokens
from quadriga.parallel.device import used_memory
from quadriga.parallel.distributed import local_device
from quadriga.protocol import DataProto, fields
from quadriga.rollout import loads_adapters, rollout_of
from quadriga.rollout.base import Continued, RolloutEngine, RolloutOutput, SamplingParams
from quadriga.rollout.guard import GuardedRollout, guarded
from quadriga.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from quadriga.weight_sync.sync import PolicyWeights
from quadriga.workers import method_fields
from quadriga.workers.runtime import (
    RankRuntime,
    SavedWorker,
    check_section,
    groups_of_copies,
    prepare_rank,
    register_engine_ranks,
    register_groups,
)

Use = Literal["actor", "rollout", "ref"]
_ON_ACTOR = make_nd_compute_dataproto_dispatch_fn("actor")

_ROLES = (
    "actor", "rollout", "ref", "actor_rollout", "actor_ref", "rollout_ref", "actor_rollout_ref",
)  # fmt: skip


class ActorRolloutRefWorker(SavedWorker, PolicyWeights):
    """The policy in one rank.

    Args:
        config: settings of model, actor, rollout and reference.
        role: the uses of this worker: `actor`, `rollout`, `ref`, or several of them in this order,
            such as `actor_rollout_ref`.
        runtime: what every rank of the role is told about the run.

    Raises:
        ConfigError: `role` is none of these.
    """

    def __init__(
        self, config: ActorRolloutRefConfig, role: str, runtime: RankRuntime | None = None
    ) -> None:
        super().__init__()
        check_section(self, config, ActorRolloutRefConfig)
        if role not in _ROLES:
            raise ConfigError(
                f"ActorRolloutRefWorker: role must be one of {sorted(_ROLES)}, got {role!r}"
            )
        self.config = config
        self.role = role
        self.runtime = runtime or RankRuntime()
        self.device = prepare_rank(self.runtime, generates=role == "rollout")
        self.actor: TrainEngine | None = None
        self.ref: TrainEngine | None = None
        self.rollout: RolloutEngine | None = None
        # Each use has a mesh of its own, because its ranks may share their rows in another way.
        for use, engine in (("actor", config.actor.engine), ("ref", self._ref_settings())):
            if use in role.split("_"):
                register_engine_ranks(self, use, engine)
        if self.uses("rollout"):
            register_groups(self, "rollout", self._copies())

    def uses(self, use: Use) -> bool:
        """Return whether this worker is used as `use`."""
        return use in self.role.split("_")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the engines that the role needs, and copy the actor's weights to the rollout."""
        from quadriga.engines import build_engine

        model, actor = self.config.model, self.config.actor
        if self.uses("actor"):
            steps = self.runtime.total_steps
            self.actor = build_engine(
                model, actor.engine, actor.optim, head="lm", device=self.device, total_steps=steps
            )
        if self.uses("ref") and self.actor is not None and model.lora.enabled:
            self.ref = self.actor.without_adapters()
        elif self.uses("ref"):
            self.ref = build_engine(
                model.frozen(), self.config.ref.engine, None, head="lm", device=self.device
            )
        if self.uses("rollout"):
            settings, copies = self.config.rollout, self._copies()
            engine = rollout_of(settings).build(
                model if loads_adapters(settings, model.lora) else model.frozen(),
                self.device,
                releasable=settings.take_turns,
                copies=copies if len(copies[0]) > 1 else None,
            )
            self.rollout = GuardedRollout(engine, deadline=settings.deadline_s, rank=self.rank)
        if self.uses("actor") and self.uses("rollout"):
            self.sync_weights()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row, or its next tokens.

        Args:
            prompts: the fields `GENERATE_SEQUENCES.reads`; `meta_info["sampling"]` is "train"
                (the default), "val" or "greedy". With `meta_info["at_most"]` each row gets so many
                new tokens at most, and the batch may have the fields `BEGUN_RESPONSES`, and
                `greedy`, which says it for each row; the engine keeps the caches of at most
                `meta_info["keep"]` rows for later calls, with `meta_info["keep_ended"]` also those
                of rows that have ended.

        Returns:
            The fields `GENERATE_SEQUENCES.writes`; `CONTINUE_SEQUENCES.writes` with `at_most`.
        """
        settings = self.config.rollout
        modes = {
            "train": settings.sampling,
            "val": settings.val_sampling,
            # A greedy response ends with the same stop strings and tokens as a sampled one.
            "greedy": replace(settings.sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0),
        }
        limit, model = self.runtime.max_response_length, self.config.model
        names = "at_most", "keep", "keep_ended"
        about = {name: prompts.meta_info[name] for name in names if name in prompts.meta_info}

        def generated(rows: DataProto, mode: str) -> DataProto:
            sampling = sampling_params(modes[mode], model, max_new_tokens=limit)
            return generate_batch(self._rollout(), rows, sampling, **about)

        greedy_B: Tensor | None = prompts.batch.get(fields.GREEDY)
        if greedy_B is None or not len(prompts):
            return generated(prompts, prompts.meta_info.get("sampling", "train"))
        parts = [(m, (greedy_B == i).nonzero()[:, 0]) for i, m in enumerate(("train", "greedy"))]
        found = [generated(prompts.select_idxs(rows), m) for m, rows in parts if len(rows)]
        order = greedy_B.argsort(stable=True).argsort()
        return DataProto.concat(found).select_idxs(order)

    @register(dispatch_mode=_ON_ACTOR, reads=method_fields.COMPUTE_LOG_PROB.inputs)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute `old_log_probs` and `entropys` [B, R] float32 with the actor's current weights.

        Reads the fields `COMPUTE_LOG_PROB.reads`.
        """
        outputs = self._forward("actor", data, temperature=self._temperature(), entropy=True)
        found = {fields.OLD_LOG_PROBS: outputs[LOG_PROBS], fields.ENTROPYS: outputs[ENTROPY]}
        return DataProto.from_dict(tensors=found)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"),
        reads=method_fields.COMPUTE_REF_LOG_PROB.inputs,
    )
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute `ref_log_prob` [B, R] float32 with the reference policy.

        Reads the fields `COMPUTE_REF_LOG_PROB.reads`.
        """
        outputs = self._forward("ref", data, temperature=self._temperature())
        return DataProto.from_dict(tensors={fields.REF_LOG_PROB: outputs[LOG_PROBS]})

    @register(dispatch_mode=_ON_ACTOR, reads=method_fields.UPDATE_ACTOR.inputs)
    def update_actor(self, data: DataProto) -> DataProto:
        """Minimise the policy loss: epochs × mini-batches, one optimizer step each.

        Reads the fields `UPDATE_ACTOR.reads`, and of `UPDATE_ACTOR.reads_if_present` those that
        the batch has. With `kl_loss_type=full` this worker must hold the reference too, because
        the loss needs the logits of both models for each micro-batch.

        Returns:
            The metrics of the update; see `quadriga.workers.updates.update_policy`.
        """
        from quadriga.workers.updates import shuffle_seed, update_policy

        engine = self._engine("actor")
        self._routes(data)
        return update_policy(
            engine, data, self.config.actor, responses_per_prompt=self.config.rollout.n,
            temperature=self._temperature(), length_scale=self.runtime.max_response_length,
            data_ranks=self.world_size // self.config.actor.engine.model_parallel_size,
            seed=shuffle_seed(self.runtime.seed, engine.optimizer_steps),
            reference=self._engine("ref") if self.config.actor.reads_full_kl else None,
            mismatch_bound=self.config.rollout.mismatch.bound, correction=self.runtime.correction,
        )  # fmt: skip

    def _loaded(self, step: int) -> None:
        """Continue the weight version, which is that of the step without the warm-up of a critic,
        and copy the weights to the rollout engine."""
        self.weight_version = max(0, step - self.runtime.warmup_steps)
        if self.uses("rollout"):
            self.sync_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> dict[str, float]:
        """Free device memory for generation: offload the training engines, resume the rollout.

        The trainer calls it before each generation if `rollout.take_turns` is set. An engine that
        has dropped its weights, and was given none since, gets those of the actor: of the version
        that it had, or of a new one if the actor has been trained since. Return metrics of
        the device memory in use before and after.
        """
        used = self._used_memory("rollout_mode_before")
        if self._rollout().lacks_weights():
            if self._trained_since_sync():
                self._count_version()
            self._sync_here()
        for engine in (self.actor, self.ref):
            if engine is not None:
                engine.offload()
        self._rollout().resume()
        return used | self._used_memory("rollout_mode_after")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> dict[str, float]:
        """Free device memory for training: release the rollout, reload the training engines.

        The trainer calls it after each generation if `rollout.take_turns` is set. Return metrics
        of the device memory in use before and after.
        """
        used = self._used_memory("trainer_mode_before")
        if self.rollout is not None:
            self.rollout.release()
        for engine in (self._engine("actor"), self.ref):
            if engine is not None:
                engine.reload()
        return used | self._used_memory("trainer_mode_after")

    def _used_memory(self, moment: str) -> dict[str, float]:
        return {f"memory/{moment}": used_memory(local_device(self.device)) / 2**30}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_rollout(self) -> None:
        """End the rollout engine with its processes and files, if the worker has one."""
        if self.rollout is not None:
            self.rollout.close()

    def _ref_settings(self) -> EngineConfig:
        """Return the settings of the engine that computes the reference policy.

        With adapters it is the actor with adapters off, if this worker has the actor.
        """
        base_in_actor = self.config.model.lora.enabled and self.uses("actor")
        return self.config.actor.engine if base_in_actor else self.config.ref.engine

    def _copies(self) -> list[tuple[int, ...]]:
        """Return the ranks that hold each copy of the rollout's weights together."""
        rollout = self.config.rollout
        engine = self.config.actor.engine if self.uses("actor") else None
        copy = rollout_of(rollout).ranks_of_copy
        return groups_of_copies(engine, self.world_size, copy)

    def _forward(
        self,
        use: Literal["actor", "ref"],
        data: DataProto,
        temperature: float = 1.0,
        *,
        entropy: bool = False,
    ) -> Outputs:

        actor, names = self.config.actor, list(method_fields.MODEL_INPUTS)
        engine = actor.engine if use == "actor" else self._ref_settings()
        names += self._routes(data) if use == "actor" else []
        return self._engine(use).forward(
            {key: data.batch[key] for key in names},
            temperature=temperature,
            entropy=entropy,
            micro_batch_size=engine.forward_rows(actor.ppo_micro_batch_size_per_gpu),
            images=MultiModalRows.of(data),
        )

    def _routes(self, data: DataProto) -> list[str]:
        """Return the name of the field with the experts of the rollout, if the actor takes them.

        Raises:
            FieldError: the batch has no such field.
        """
        names = [fields.ROUTED_EXPERTS] * self.config.rollout.replay_routes
        if not {*names} <= {*data.batch.keys()}:
            problem = f"replay_routes=true needs the field {names[0]!r}; generate the rows again"
            raise FieldError(problem, field=names[0])
        return names

    def _temperature(self) -> float:
        """Return the temperature at which log-probabilities are computed.

        It is the sampling temperature, so that old and rollout log-probabilities are of the same
        distribution. Greedy decoding (temperature 0) has no such distribution; 1 is used then.
        """
        temperature = self.config.rollout.sampling.temperature
        return temperature if temperature > 0 else 1.0

    def _engine(self, use: Literal["actor", "ref"]) -> TrainEngine:
        engine = self.actor if use == "actor" else self.ref
        if engine is None:
            raise self._lacks(f"training engine for {use!r}", use)
        return engine

    def _trained(self) -> TrainEngine:
        return self._engine("actor")

    def _rollout(self) -> RolloutEngine:
        if self.rollout is None:
            raise self._lacks("rollout engine", "rollout")
        return self.rollout

    def _lacks(self, engine: str, use: Use) -> WorkerError:
        remedy = f"build the worker with a role that includes {use!r}"
        if self.uses(use):
            remedy = "call init_model first"
        return WorkerError(
            f"rank {self.rank} with role {self.role!r} has no {engine}: {remedy}",
            role=self.role,
            rank=self.rank,
        )


class InFlightWorker(ActorRolloutRefWorker):
    """A rollout that receives weights while it generates (`rollout.update=in_flight`)."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, beside=True)
    def stage_weights(self, parts: list[DataProto]) -> None:
        """Copy one round of `send_weights` to memory of its own. `finish_weights`, which is called
        when all rounds are there, gives them to the rollout engine.

        Raises:
            WorkerError: a bucket was sent twice, or one is lost.
        """
        self._receiver.receive(parts, stage=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, beside=True)
    def weight_bytes(self) -> dict[str, float]:
        """See `PolicyWeights.weight_bytes`. It waits for no generation."""
        return super().weight_bytes()


class SFTWorker(ActorRolloutRefWorker):
    """An actor that takes supervised steps, with a rollout if responses are validated."""

    @register(dispatch_mode=_ON_ACTOR, reads=method_fields.UPDATE_SFT.inputs)
    def update_sft(self, data: DataProto) -> DataProto:
        """Take one optimizer step on the mean of −log p over the response tokens of all ranks.

        Reads the fields `UPDATE_SFT.reads`.

        Returns:
            `meta_info["metrics"]`: `sft/loss`, nats per token, and the metrics of the engine.
        """
        from quadriga.workers.updates import BatchCounts, SupervisedObjective, rows_of_update

        engine = self._engine("actor")
        rows = rows_of_update(data, method_fields.UPDATE_SFT.reads)
        objective = SupervisedObjective(counts=BatchCounts.of(rows[fields.RESPONSE_MASK], engine))
        metrics = engine.train_step(
            rows, objective, micro_batch_size=self.config.actor.ppo_micro_batch_size_per_gpu
        )
        return DataProto(meta_info={"metrics": {f"sft/{k}": v for k, v in metrics.items()}})

    @register(dispatch_mode=_ON_ACTOR, reads=method_fields.COMPUTE_SFT_LOG_PROB.inputs)
    def compute_sft_log_prob(self, data: DataProto) -> DataProto:
        """Compute `old_log_probs` [B, R] float32 of given responses, for the validation loss.

        Reads the fields `COMPUTE_SFT_LOG_PROB.reads`. Unlike `compute_log_prob` it computes no
        entropies, which a loss does not need.
        """
        outputs = self._forward("actor", data)
        return DataProto.from_dict(tensors={fields.OLD_LOG_PROBS: outputs[LOG_PROBS]})


def generate_batch(
    engine: RolloutEngine,
    prompts: DataProto,
    sampling: SamplingParams,
    at_most: int | None = None,
    keep: int = 0,
    keep_ended: bool = False,
) -> DataProto:
    """Generate one response per row, check them, and lay the sequences out as fields.

    Two rows, P = 3, R = 4; "." is padding, "e" the end token. The second response is cut at the
    length limit:

                          prompt   response
        input_ids         . p p    r r e .
                          p p p    r r r r
        attention_mask    0 1 1    1 1 1 0
                          1 1 1    1 1 1 1
        position_ids      0 0 1    2 3 4 4
                          0 1 2    3 4 5 6
        sequence_length   5        finished   1
                          7                   0

    Args:
        prompts: the fields `GENERATE_SEQUENCES.reads`: `input_ids`, `attention_mask` [B, P] int64,
            padded on the left, and `sample_seed` [B] int64. With `at_most` also `BEGUN_RESPONSES`,
            of rows that are to go on; the mask of a row is 0 if its response is new. Without these
            fields all are new.
        at_most: new tokens of each row, at most; a row that has not ended then is paused.
        keep, keep_ended: see `Continued`.

    Returns:
        The fields `GENERATE_SEQUENCES.writes`; R is `sampling.max_new_tokens`. With `at_most`, the
        fields `CONTINUE_SEQUENCES.writes` of the responses so far.

    Raises:
        RolloutError: the prompts, the settings or the engine's output cannot be used; see
            `rollout.guard`.
        FieldError: some of `BEGUN_RESPONSES` are missing, or have another shape than [B, R].
    """

    from quadriga.data.loader import positions

    engine = guarded(engine)  # that of a worker class of the user may have no guard
    prompt_ids = prompts.batch[fields.INPUT_IDS]
    prompt_mask = prompts.batch[fields.ATTENTION_MASK]
    images = MultiModalRows.of(prompts)
    more: dict[str, Tensor] = {}
    if at_most is None:
        request = prompt_ids, prompt_mask, sampling, prompts.batch[fields.SAMPLE_SEED]
        out = engine.generate(*request, images)
        known = out.response_mask
    else:
        out, versions = _continued(engine, prompts, sampling, images, at_most, (keep, keep_ended))
        known = context_numbers(out.response_mask, versions)
        more[fields.TOKEN_VERSIONS] = versions
        more[fields.PAUSED] = torch.tensor([r == "paused" for r in out.finish_reason]).long()
    if out.routed_experts is not None:
        more[fields.ROUTED_EXPERTS] = out.routed_experts
    attention_mask = torch.cat([prompt_mask, known], dim=1)
    if images is not None:
        more[fields.POSITION_IDS] = images.followed_by(known)
    return DataProto.from_dict(
        tensors={
            fields.PROMPTS: prompt_ids,
            fields.RESPONSES: out.response_ids,
            fields.RESPONSE_MASK: out.response_mask,
            fields.ROLLOUT_LOG_PROBS: out.rollout_log_probs,
            fields.INPUT_IDS: torch.cat([prompt_ids, out.response_ids], dim=1),
            fields.ATTENTION_MASK: attention_mask,
            fields.POSITION_IDS: positions(attention_mask),
            fields.SEQUENCE_LENGTH: attention_mask.bool().sum(-1),
            fields.FINISHED: torch.tensor([r == "stop" for r in out.finish_reason]).long(),
            fields.WEIGHT_VERSION: out.weight_versions,
            **more,
        }
    )


def _continued(
    engine: RolloutEngine,
    prompts: DataProto,
    sampling: SamplingParams,
    images: MultiModalRows | None,
    at_most: int,
    kept: tuple[int, bool],
) -> tuple[RolloutOutput, Tensor]:
    """Return the whole responses after at most so many new tokens, and the version of each token.

    Two rows, P = 3, R = 5, at_most = 2. Row 0 has two tokens of an earlier call, row 1 is new:

        prompts   begun        sent to the engine    new    whole responses
        . p p     a b . . .    . . . . p p a b       c d    a b c d .         paused
        p p p     . . . . .    . . . . . p p p       e .    e . . . .

    Of a row with several contexts, the last one is sent.
    """

    from quadriga.models.routes import UNKNOWN

    begun, limit = _begun_responses(prompts, sampling), sampling.max_new_tokens
    mask = known_tokens(begun[fields.RESPONSE_MASK], begun[fields.TOKEN_VERSIONS])
    sampled = mask.sum(-1)
    ids = torch.cat([prompts.batch[fields.INPUT_IDS], begun[fields.RESPONSES]], dim=1)
    numbers = context_numbers(begun[fields.RESPONSE_MASK], begun[fields.TOKEN_VERSIONS])
    whole_mask = torch.cat([prompts.batch[fields.ATTENTION_MASK], numbers], dim=1)
    context = whole_mask.amax(1, keepdim=True)
    whole_mask = ((whole_mask == context) & (whole_mask > 0)).long()
    # The padding behind the response of a row goes before its prompt.
    width = ids.shape[1]
    source = (torch.arange(width) - (limit - sampled)[:, None]) % width
    ids, whole_mask = ids.gather(1, source), whole_mask.gather(1, source)
    if images is not None:  # the next token is behind the largest number, so padding has 0
        positions = images.followed_by(mask).gather(2, source[:, None].expand(-1, 3, -1))
        images = MultiModalRows(images.inputs, positions * whole_mask[:, None])
    # Contexts that begin with the same tokens draw other numbers.
    seeds = prompts.batch[fields.SAMPLE_SEED] + (context[:, 0].clamp(min=1) - 1)
    request = ids, whole_mask, sampling, seeds
    own = begun[fields.RESPONSE_MASK]
    first = begun[fields.TOKEN_VERSIONS].gather(1, own.argmax(1, keepdim=True))[:, 0]
    began = first.where(own.any(1), engine.version)
    continued = Continued(sampled, min(at_most, limit), *kept, began)
    out = engine.generate(*request, images, continued)
    row, column = out.response_mask.nonzero(as_tuple=True)
    versions = out.weight_versions[:, None].expand_as(out.response_ids)
    new = out.response_ids, out.response_mask, out.rollout_log_probs, versions
    for name, tensor in zip(method_fields.BEGUN_RESPONSES, new, strict=True):
        begun[name][row, sampled[row] + column] = tensor[row, column]
    responses, mask, log_probs, versions = begun.values()
    routes = out.routed_experts
    if routes is not None:
        # A token keeps the experts of the call that has computed it first: its log-probability, or
        # that of the token behind it, is of that call.
        placed = torch.full_like(routes[:, :width], UNKNOWN)
        placed[torch.arange(len(ids))[:, None], source] = routes[:, :width]
        placed[row, width - limit + sampled[row] + column] = routes[row, width + column]
        before = prompts.batch.get(fields.ROUTED_EXPERTS, placed)
        routes = torch.where(before == UNKNOWN, placed, before)
    whole = RolloutOutput(responses, mask, log_probs, out.finish_reason, versions[:, 0], routes)
    return whole, versions


def _begun_responses(prompts: DataProto, sampling: SamplingParams) -> dict[str, Tensor]:
    """Return a copy of `BEGUN_RESPONSES`, [B, R], with padding outside the mask.

    Raises:
        FieldError: the batch has some of them only, or in another form.
    """

    shape = len(prompts), sampling.max_new_tokens
    none = torch.zeros(shape, dtype=torch.int64)
    padding = torch.full_like(none, sampling.pad_token_id)
    names = method_fields.BEGUN_RESPONSES
    blank = dict(zip(names, (padding, none, torch.zeros(shape), none), strict=True))
    found = {name: prompts.batch[name] for name in blank if name in prompts.batch.keys()}  # noqa: SIM118
    for name, tensor in blank.items() if found else ():
        given = found.get(name)
        if given is None or (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
            form = "is missing" if given is None else f"is {list(given.shape)} of {given.dtype}"
            raise FieldError(
                f"generate_sequences: responses that go on need {', '.join(names)} of [B, R] = "
                f"{list(shape)}; {name!r} {form}, and must be {tensor.dtype}",
                field=name,
            )
    known = none.bool()
    if found:
        known = known_tokens(found[fields.RESPONSE_MASK], found[fields.TOKEN_VERSIONS]).bool()
    return {name: torch.where(known, found.get(name, t), t) for name, t in blank.items()}


def known_tokens(response_mask: Tensor, token_versions: Tensor) -> Tensor:
    """Return [B, R] int64, 1 at the tokens of responses: those of the policy, and those that an
    environment has answered."""
    return response_mask | (token_versions <= method_fields.OBSERVED).long()


def context_numbers(response_mask: Tensor, token_versions: Tensor) -> Tensor:
    """Return [B, R] int64, the number of the context at the tokens of responses, from 1; 0 at
    padding."""
    begun = (token_versions <= method_fields.CONTEXT).long().cumsum(1)
    return known_tokens(response_mask, token_versions) * (begun + 1)


def sampling_params(
    settings: SamplingConfig, model: ModelConfig, *, max_new_tokens: int
) -> SamplingParams:
    """Return the settings in the form that rollout engines take, with the padding and end tokens
    of the model."""

    pad, ends, excluded = special_tokens(model)
    return SamplingParams.of(settings, max_new_tokens, pad, ends, excluded)


@lru_cache(maxsize=8)
def special_tokens(model: ModelConfig) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return (padding token, end tokens, tokens of images), as token ids.

    A response ends with the end tokens of the folder, and with the token that ends a turn in the
    chat template. A sampled image token would stand for an image that does not exist.
    """
    from quadriga.data.conversations import turn_end_ids
    from quadriga.models.folder import end_token_ids
    from quadriga.models.loading import tokenizer_of

    tokenizer = tokenizer_of(model)
    pad: int = tokenizer.pad_token_id
    images = image_tokens(model)
    excluded = () if images is None else images.never_sampled
    ends = {*end_token_ids(model.path, tokenizer), *turn_end_ids(tokenizer)}
    return pad, tuple(sorted(ends)), excluded

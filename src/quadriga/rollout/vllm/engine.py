"""`VLLMRollout`: generation with vLLM in the process of the rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from quadriga.config.schema import DtypeName, ModelConfig
from quadriga.errors import QuadrigaError, RolloutError
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import local_device, rank
from quadriga.parallel.layouts import Box
from quadriga.rollout.abilities import ALL_SETTINGS, RolloutAbilities
from quadriga.rollout.base import RolloutOutput, SamplingParams, tensor_digest
from quadriga.rollout.requests import check_request, check_sequences
from quadriga.rollout.responses import Response, padded_output
from quadriga.rollout.stop_strings import StopStringsOfModel
from quadriga.rollout.vllm.isolation import Isolation
from quadriga.rollout.vllm.options import check_installed, check_temperature, parse_options
from quadriga.rollout.vllm.requests import Deadline, generate_rows, score_rows
from quadriga.rollout.vllm.start import RunningEngine, StartSettings

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

State = Literal["ready", "released", "failed", "closed"]
"""Whether the engine can generate, waits for `resume`, stopped in the middle, or has ended."""

_WHAT_TO_DO: Mapping[State, str] = {
    "released": "call resume first",
    "failed": "it failed before; restart the worker",
    "closed": "build another engine",
}


class VLLMRollout:
    """See `RolloutEngine`. `micro_batch_size` rows are generated at once.

    Each rank has an engine in its own process, with a whole copy of the weights or, with
    `tensor_parallel_size`, a part of one. `copies` are the ranks that hold each copy together, in
    ascending order, which is that of their parts; None: neighbouring ranks. On a GPU `release`
    moves the weights to host memory and drops the key-value cache; on a CPU it frees nothing.

    In float32 the log-probabilities agree with transformers' to about 1e-5, and the response of a
    row is drawn with random numbers of its own. The rounding of a row depends a little on the rows
    that are computed with it. This changes a token only if two tokens come closer than that.

    Raises:
        ConfigError: vLLM is not installed, or an option does not fit.
        ModelError: vLLM cannot load the model, or does not hold its weights by their names.
        RolloutError: vLLM did not start.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: str | torch.device = "cpu",
        dtype: DtypeName = "auto",
        micro_batch_size: int = 256,
        releasable: bool = True,
        copies: Sequence[tuple[int, ...]] | None = None,
        **options: object,
    ) -> None:
        self.options = parse_options(options)
        check_installed(self.options)
        self.model = model
        self.device = local_device(device)
        self.dtype = compute_dtype(dtype, self.device)
        self._isolation = Isolation()
        self._state: State = "closed"
        self._releasable = releasable or self.device.type == "cpu"
        settings = StartSettings(
            model, self.device, self.dtype, micro_batch_size, self.options, releasable, copies
        )
        self._running = RunningEngine(settings, self._isolation)
        self._state = "ready"
        self._version = -1
        self._weights_awake = True
        self._unknown: set[str] = set()  # weights that an update has left half-way
        self._stop_strings = StopStringsOfModel(model)
        self._abilities = RolloutAbilities(
            vocabulary=self._running.vocabulary,
            window=self._running.window,
            log_probs={"policy": "always", "sampled": "always", "temperature_1": "always"},
            settings=ALL_SETTINGS - {"excluded_token_ids"},
            filter_order="min_p, top_k, top_p",
            seeded=True,
            batch_invariant=self.dtype == torch.float32,
            exposes_weights=True,
        )

    @property
    def name(self) -> str:
        return "vllm"

    @property
    def abilities(self) -> RolloutAbilities:
        return self._abilities

    @property
    def version(self) -> int:
        return self._version

    # Generation

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
    ) -> RolloutOutput:
        self._check("generate", "ready")
        self._check_weights("generate")
        check_request(self.name, self.abilities, prompt_ids, attention_mask, sampling, sample_seeds)
        check_temperature(sampling.temperature)
        prompts = _tokens(prompt_ids, attention_mask)
        deadline = Deadline("generate", self.options.call_timeout_s)
        with self._failures("generate"), self._isolation.inside():
            results = generate_rows(
                self._running.engine,
                prompts,
                sampling,
                sample_seeds.tolist(),
                vocabulary=self.abilities.vocabulary,
                stop_strings=self._stop_strings.check(sampling.stop_strings),
                deadline=deadline,
                adapter=self._adapter(),
            )
        responses = [
            Response(row.tokens, row.log_probs, "stop" if row.stopped else "length")
            for row in results
        ]
        return padded_output(responses, sampling, self._version)

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self._check("score", "ready")
        self._check_weights("score")
        check_sequences(self.name, self.abilities, ids, attention_mask)
        sequences = _tokens(ids, attention_mask)
        deadline = Deadline("score", self.options.call_timeout_s)
        with self._failures("score"), self._isolation.inside():
            results = score_rows(
                self._running.engine, sequences, deadline=deadline, adapter=self._adapter()
            )
        log_probs = torch.zeros(ids.shape)
        for row, result in enumerate(results):
            columns = attention_mask[row].nonzero()[1:, 0].cpu()
            log_probs[row, columns] = torch.tensor(result.log_probs)
        return log_probs

    def _adapter(self) -> LoRARequest | None:
        adapter = self._running.adapter
        return None if adapter is None else adapter.request()

    # Weights

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._update(stream, version, shards=False)

    def weight_boxes(self) -> Mapping[str, Box]:
        self._check("weight_boxes", "ready", "released")
        return self._running.weights.boxes()

    def update_shards(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._update(stream, version, shards=True)

    def _update(self, stream: Iterable[tuple[str, Tensor]], version: int, *, shards: bool) -> None:
        self._check("update_weights", "ready", "released")
        weights = self._running.weights
        write = weights.write_box if shards else weights.write
        written: set[str] = set()
        with self._isolation.inside():
            with self._failures("update_weights"):
                self._wake_weights()
            try:
                for name, tensor in stream:
                    with self._failures("update_weights"):
                        write(name, tensor)
                    written.add(name)
            except BaseException:
                if written:  # some weights are new and some old
                    self._unknown = weights.names_that_are_sent()
                raise
            finally:
                with self._failures("update_weights"):
                    self._forget_old_keys()
        self._unknown -= written
        self._version = version

    def _forget_old_keys(self) -> None:
        """Empty the prefix cache, whose keys and values are of the old weights."""
        if self._running.engine.reset_prefix_cache() is False:
            self._state = "failed"
            raise RolloutError(
                f"rollout engine 'vllm' on rank {rank()} kept keys and values of old weights, "
                "because a request still uses them; restart the worker",
                engine=self.name,
                rank=rank(),
                method="update_weights",
            )

    def weights_digest(self) -> dict[str, int]:
        self._check("weights_digest", "ready", "released")
        weights = self._running.weights
        with self._failures("weights_digest"), self._isolation.inside():
            self._wake_weights()
            return {name: tensor_digest(weights.read(name)) for name in weights.names()}

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        self._check("weight_dtypes", "ready", "released")
        return self._running.weights.dtypes()

    # Memory and end

    def release(self) -> None:
        self._check("release", "ready", "released")
        if self._state == "released":
            return
        if not self._releasable:
            raise RolloutError(
                f"rollout engine 'vllm' on rank {rank()} was started without the means to release "
                "its memory; set actor_rollout_ref.rollout.take_turns=true, or build it with "
                "releasable=True",
                engine=self.name,
                rank=rank(),
                method="release",
            )
        with self._failures("release"), self._isolation.inside():
            self._running.engine.reset_prefix_cache()
            if self.device.type != "cpu":
                self._running.engine.sleep(level=self.options.sleep_level)
                self._weights_awake = False
        if self.options.sleep_level == 2:  # on a CPU too, where nothing is freed
            self._unknown = self._running.weights.names_that_are_sent()
        self._state = "released"

    def lacks_weights(self) -> bool:
        """Return whether weights must be sent before it can generate; see `DropsWeights`."""
        return bool(self._unknown)

    def resume(self) -> None:
        self._check("resume", "ready", "released")
        if self._state == "ready":
            return
        with self._failures("resume"), self._isolation.inside():
            if self.device.type != "cpu":
                self._wake_weights()
                self._running.engine.wake_up(tags=["kv_cache"])
        self._state = "ready"

    def _wake_weights(self) -> None:
        """Move the weights of a released engine back to the device. The cache stays released."""
        if not self._weights_awake:
            self._running.engine.wake_up(tags=["weights"])
            self._weights_awake = True
            if self._unknown and self._running.adapter is not None:
                self._running.adapter.clear()

    def close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        with self._isolation.inside():
            self._running.close()

    def _check(self, method: str, *states: State) -> None:
        if self._state not in states:
            raise RolloutError(
                f"rollout engine 'vllm' on rank {rank()} is {self._state}, so {method} cannot be "
                f"called; {_WHAT_TO_DO[self._state]}",
                engine=self.name,
                rank=rank(),
                method=method,
            )

    def _check_weights(self, method: str) -> None:
        """Refuse to compute with weights of which some are new and some old."""
        if self._unknown:
            raise RolloutError(
                f"rollout engine 'vllm' on rank {rank()}: {method} was called after an update of "
                f"weights that broke off, or after a release that dropped them, and "
                f"{min(self._unknown)!r} was not sent since; sync all weights first",
                engine=self.name,
                rank=rank(),
                method=method,
            )

    @contextmanager
    def _failures(self, method: str) -> Iterator[None]:
        """Turn an error of vLLM into a typed one. The engine is not used again after it."""
        try:
            yield
        except QuadrigaError:
            raise
        except Exception as error:
            self._state = "failed"
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise RolloutError(
                f"rollout engine 'vllm' on rank {rank()} failed in {method} with weight version "
                f"{self._version}: {cause}. Restart the worker; if it "
                "happens again, lower actor_rollout_ref.rollout.micro_batch_size",
                engine=self.name,
                rank=rank(),
                method=method,
                version=self._version,
            ) from error


def _tokens(ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the token ids of each row without padding."""
    return [row[valid].tolist() for row, valid in zip(ids, attention_mask.bool(), strict=True)]

"""`SGLangRollout`: the rollout protocol over SGLang."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from quadriga.config.schema import DtypeName, ModelConfig
from quadriga.errors import RolloutAbilityError, RolloutError, RolloutOutputError
from quadriga.models.context_window import context_window
from quadriga.models.folder import local_folder
from quadriga.models.loading import read_config
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import local_device, rank
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutOutput
from quadriga.rollout.params import SamplingParams
from quadriga.rollout.requests import check_request, check_sequences
from quadriga.rollout.responses import Response, padded_output
from quadriga.rollout.sglang.client import Client
from quadriga.rollout.sglang.declared import declared_abilities
from quadriga.rollout.sglang.options import check_installed, sglang_options
from quadriga.rollout.sglang.process import NAME
from quadriga.rollout.sglang.processes.frames import Json
from quadriga.rollout.sglang.sampling import (
    generate_body,
    read_samples,
    read_scores,
    score_body,
)
from quadriga.rollout.sglang.start import Launch
from quadriga.rollout.sglang.untested import check_numbers, probe_length
from quadriga.rollout.sglang.weights import model_end_tokens, model_shapes
from quadriga.rollout.stop_strings import StopStrings, StopStringsOfModel

State = Literal["ready", "released", "closed"]
PauseMode = Literal["abort", "retract", "in_place"]
"""What SGLang does with responses that it is generating: end them; compute them again when it
continues; or keep them as they are."""


class SGLangRollout:
    """See `RolloutEngine`; `options` are those of `SGLangOptions`.

    At most `micro_batch_size` rows are generated at once. One thread may call at a time; the others
    wait. `pause_generation`, `continue_generation` and `abort` do not wait.

    Raises:
        ConfigError: an option is wrong, or SGLang is not installed.
        ModelError: the folder does not hold a causal language model, or one whose weights cannot be
            sent to SGLang.
        RolloutError: SGLang did not start.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: str | torch.device = "cpu",
        dtype: DtypeName = "auto",
        micro_batch_size: int = 256,
        releasable: bool = True,
        **options: object,
    ) -> None:
        self._options = sglang_options(options)
        if self._options.url is None:
            check_installed(self._options)
        self._model = model
        config = read_config(local_folder(model.path), trust_remote_code=model.trust_remote_code)
        window = context_window(config)
        place = local_device(device)
        launch = Launch(
            model,
            self._options,
            place,
            compute_dtype(dtype, place),
            window.tokens if window else None,
            releasable,
        )
        # An SGLang that runs already may be able to, whatever this engine was built for.
        self._releasable = releasable or place.type == "cpu" or self._options.url is not None
        shapes = model_shapes(model)
        self._names = frozenset(shapes)
        self._own_ends = frozenset(model_end_tokens(model)) if self._options.url else frozenset()
        self._lock = threading.Lock()
        self._state: State = "ready"
        self._stop_strings = StopStringsOfModel(model)
        self._request_rows = min(self._options.request_rows, micro_batch_size)
        at_once = micro_batch_size // self._request_rows
        self._client = Client(launch, shapes, at_once)
        self._abilities = declared_abilities(
            self._options,
            config.get_text_config().vocab_size,
            launch.window,
            exposes_weights=self._client.held.keys() == shapes.keys(),
        )
        tokens = probe_length(config, launch.window)
        # All ranks have the same SGLang, and the comparison loads the model once more.
        if tokens is not None and rank() == 0:
            try:
                if self.version != -1:
                    raise self._state_error(
                        "be compared with transformers", "its weights are not those of the folder"
                    )
                check_numbers(self.score, model, config, launch.dtype, tokens)
            except BaseException:
                self._client.close()
                raise

    @property
    def name(self) -> str:
        return NAME

    @property
    def abilities(self) -> RolloutAbilities:
        return self._abilities

    @property
    def version(self) -> int:
        return self._client.version

    @property
    def restarts(self) -> int:
        """How often SGLang was started again."""
        return self._client.restarts

    # Generation

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
    ) -> RolloutOutput:
        with self._lock:
            self._check_ready("generate")
            check_request(NAME, self.abilities, prompt_ids, attention_mask, sampling, sample_seeds)
            self._check_ends(sampling)
            prompts = _rows(prompt_ids, attention_mask)
            seeds = sample_seeds.tolist() if self._options.seeds else None
            size, version = self._request_rows, self.version
            starts = range(0, len(prompts), size)
            bodies = [
                generate_body(
                    prompts[start : start + size],
                    sampling,
                    None if seeds is None else seeds[start : start + size],
                )
                for start in starts
            ]

            def read(i: int, answer: Json) -> list[Response]:
                count = len(prompts[starts[i] : starts[i] + size])
                return read_samples(answer, count, sampling, version, starts[i])

            samples = [sample for part in self._client.run(bodies, read) for sample in part]
            stops = self._stop_strings.check(sampling.stop_strings)
            if stops is not None:
                samples = [_stopped(sample, stops) for sample in samples]
            return padded_output(samples, sampling, version)

    def _check_ends(self, sampling: SamplingParams) -> None:
        """Refuse what a server that others started cannot do: ignore end tokens of the model."""
        ends = sampling.end_token_ids
        missing = sorted(self._own_ends - frozenset(ends))
        if missing and ends:  # without any end token, SGLang can ignore those of the model
            raise RolloutAbilityError(
                f"rollout engine {NAME!r}: the server at {self._options.url} ends responses with "
                f"the tokens {missing} of the model's files too, but the request has the end "
                f"tokens {list(ends)} only; add them, or let Quadriga start SGLang (without "
                "rollout.options.url)",
                engine=NAME,
                setting="eos_token_ids",
            )

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        with self._lock:
            self._check_ready("score")
            if self._client.pauses.mode is not None:  # SGLang would answer after the pause only
                raise self._state_error("score", "it is paused; call continue_generation() before")
            check_sequences(NAME, self.abilities, ids, attention_mask)
            rows = _rows(ids, attention_mask)
            size, version = self._request_rows, self.version
            starts = range(0, len(rows), size)

            def read(i: int, answer: Json) -> list[list[float]]:
                lengths = [len(row) for row in rows[starts[i] : starts[i] + size]]
                return read_scores(answer, lengths, version, starts[i])

            bodies = [score_body(rows[start : start + size]) for start in starts]
            found = [scores for part in self._client.run(bodies, read) for scores in part]
            result = torch.zeros(ids.shape, dtype=torch.float32)
            for row, scores in enumerate(found):
                result[row, attention_mask[row].bool().cpu()] = torch.tensor(scores)
            return result

    def pause_generation(self, mode: PauseMode = "retract") -> None:
        """Let SGLang generate nothing until `continue_generation`, also over weight updates and
        restarts. Another thread may call it."""
        self._client.pauses.pause(mode)

    def continue_generation(self) -> None:
        """End a pause."""
        self._client.pauses.go_on()

    def abort(self) -> None:
        """End all responses that are being generated; their `generate` raises
        `RolloutOutputError`. Another thread may call it."""
        self._client.call("/abort_request", {"abort_all": True})

    # Weights

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._lock:
            self._check_open("update_weights")
            self._client.update(stream, version)

    def weights_digest(self) -> dict[str, int]:
        with self._lock:
            self._check_open("weights_digest")
            if not self.abilities.exposes_weights:
                raise RolloutAbilityError(
                    f"rollout engine {NAME!r}: the weights of this SGLang cannot be read back; "
                    "compare scores of probe prompts",
                    engine=NAME,
                    setting="exposes_weights",
                )
            held = self._client.read_back()
            missing = sorted(self._names - held.keys())
            if missing:
                raise RolloutOutputError(
                    f"rollout engine {NAME!r}: it no longer has the weight {missing[0]!r}",
                    engine=NAME,
                    fault="weights",
                    row=None,
                )
            return {name: weight.digest for name, weight in held.items()}

    def received_digests(self) -> Mapping[str, int]:
        """See `ReportsReceipts`."""
        self._check_open("received_digests")
        return self._client.received

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        self._check_open("weight_dtypes")
        return self._client.dtypes

    def release(self) -> None:
        with self._lock:
            self._check_open("release")
            if not self._releasable:
                raise self._state_error(
                    "release", "it was started without the means to; set rollout.take_turns=true"
                )
            self._client.memory.release()
            if self._state == "ready":  # not if another thread has closed the engine
                self._state = "released"

    def resume(self) -> None:
        with self._lock:
            self._check_open("resume")
            if self._state == "released":
                self._client.resume()
                if self._state == "released":
                    self._state = "ready"

    def close(self) -> None:
        # Without the lock: a call that waits for an answer ends with SGLang.
        self._state = "closed"
        self._client.close()

    def _check_open(self, method: str) -> None:
        if self._state == "closed":
            raise self._state_error(method, "it is closed; build another engine")

    def _check_ready(self, method: str) -> None:
        self._check_open(method)
        if self._state == "released":
            raise self._state_error(method, "it is released; call resume() before")

    def _state_error(self, method: str, why: str) -> RolloutError:
        return RolloutError(
            f"rollout engine {NAME!r} of rank {rank()} cannot {method}: {why}",
            engine=NAME,
            rank=rank(),
            method=method,
        )


def _stopped(sample: Response, stops: StopStrings) -> Response:
    """Return the sample up to the token that completes a stop string."""
    # SGLang has no tokenizer here, so it samples on behind a stop string. The tokens up to it do
    # not depend on the tokens behind it.
    for count in range(1, len(sample.tokens) + 1):
        if stops.completed_by_last(sample.tokens[:count]):
            return Response(sample.tokens[:count], sample.log_probs[:count], "stop")
    return sample


def _rows(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the tokens of each row without padding."""
    rows: list[list[int]] = [
        row[valid].tolist() for row, valid in zip(ids, mask.bool(), strict=True)
    ]
    return rows

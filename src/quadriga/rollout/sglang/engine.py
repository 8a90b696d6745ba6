"""`SGLangRollout`: the rollout protocol over SGLang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError, RolloutOutputError
from quadriga.models.folder import local_folder
from quadriga.models.images import MultiModalRows
from quadriga.models.limits import context_window
from quadriga.models.loading import load_causal_lm, read_config
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import local_device, rank
from quadriga.rollout.base import RolloutEngine, RolloutOutput, SamplingParams, UpdateForm
from quadriga.rollout.checks import check_request, check_sequences
from quadriga.rollout.responses import Response, StopStringsOfModel, padded_output, token_rows
from quadriga.rollout.sglang.client import Client, Launch
from quadriga.rollout.sglang.options import SGLang
from quadriga.rollout.sglang.requests import (
    generate_body,
    read_rows,
    read_sample,
    read_scores,
    score_body,
)
from quadriga.rollout.sglang.transports import NAME, Body, failed
from quadriga.rollout.sglang.weights import model_end_tokens, model_shapes

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
"""What SGLang does with responses that it is generating: end them; compute them again when it
continues; or keep them as they are."""


class SGLangRollout(RolloutEngine):
    """See `RolloutEngine`; `rollout.options` are `SGLangOptions`.

    At most `rollout.settings.micro_batch_size` rows are generated at once. One thread may call at a
    time; the others wait. `pause_generation`, `continue_generation` and `abort` do not wait.

    Raises:
        ModelError: the folder does not hold a causal language model, or one whose weights cannot be
            sent to SGLang.
        RolloutError: SGLang did not start.
    """

    name = NAME

    def __init__(
        self,
        rollout: SGLang,
        model: ModelConfig,
        device: str | torch.device,
        *,
        releasable: bool,
        copies: Sequence[tuple[int, ...]] | None,  # SGLang divides a copy by itself
    ) -> None:
        self._options = rollout.options
        config = read_config(local_folder(model.path), trust_remote_code=model.trust_remote_code)
        found, place = context_window(config), local_device(device)
        dtype = compute_dtype(rollout.settings.dtype, place)
        window = found.tokens if found else None
        launch = Launch(model, self._options, place, dtype, window, releasable)
        # An SGLang that runs already may be able to, whatever this engine was built for.
        self._releasable = releasable or place.type == "cpu" or self._options.url is not None
        shapes = model_shapes(model)
        self._names = frozenset(shapes)
        self._own_ends = frozenset(model_end_tokens(model)) if self._options.url else frozenset()
        self._lock = threading.Lock()
        self._stop_strings = StopStringsOfModel(model)
        rows = rollout.settings.micro_batch_size
        self._request_rows = min(self._options.request_rows, rows)
        self._client = Client(launch, shapes, rows // self._request_rows)
        self.abilities = replace(
            rollout.abilities(config.get_text_config().vocab_size, window),
            exposes_weights=self._client.held.keys() == shapes.keys(),
        )
        tokens = probe_length(config, window)
        # All ranks have the same SGLang, and the comparison loads the model once more.
        if tokens is not None and rank() == 0:
            try:
                if self.version != -1:
                    raise self._error("compare", "its weights are not those of the model folder")
                check_numbers(self.score, model, config, dtype, tokens)
            except BaseException:
                self._client.close()
                raise

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
        images: MultiModalRows | None = None,
    ) -> RolloutOutput:
        with self._lock:
            self._check_generates("generate", images)
            check_request(NAME, self.abilities, prompt_ids, attention_mask, sampling, sample_seeds)
            self._check_ends(sampling)
            prompts, version = token_rows(prompt_ids, attention_mask), self.version
            seeds = sample_seeds.tolist() if self._options.seeds else None

            def body(rows: range) -> Body:
                own = None if seeds is None else [seeds[row] for row in rows]
                return generate_body([prompts[row] for row in rows], sampling, own)

            read = partial(read_sample, sampling=sampling)
            samples = self._run(len(prompts), body, read)
            stops = self._stop_strings.check(sampling.stop_strings)
            if stops is not None:
                # SGLang has no tokenizer here, so it samples on behind a stop string. The tokens up
                # to it do not depend on the tokens behind it.
                for row, sample in enumerate(samples):
                    end = stops.completed_at(sample.tokens, 1)
                    if end is not None:
                        of_row = sample.tokens[:end], sample.log_probs[:end]
                        samples[row] = Response(*of_row, "stop")
            return padded_output(samples, sampling, version)

    def _check_ends(self, sampling: SamplingParams) -> None:
        """Refuse what a server that others started cannot do: ignore end tokens of the model."""
        ends = sampling.end_token_ids
        missing = sorted(self._own_ends - frozenset(ends))
        if missing and ends:  # without any end token, SGLang can ignore those of the model
            raise self._unable(
                f"ignore the end tokens {missing} of the model's files: the server at "
                f"{self._options.url} ends responses with them too, but the request has the end "
                f"tokens {list(ends)} only; add them, or let Quadriga start SGLang (without "
                "rollout.options.url)",
                "eos_token_ids",
            )

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        with self._lock:
            self._check_generates("score")
            if self._client.paused is not None:  # SGLang would answer after the pause only
                raise self._error("score", "it is paused; call continue_generation() before")
            check_sequences(NAME, self.abilities, ids, attention_mask)
            rows = token_rows(ids, attention_mask)
            found = self._run(
                len(rows),
                lambda part: score_body([rows[row] for row in part]),
                lambda entry, row: read_scores(entry, row, len(rows[row])),
            )
            result = torch.zeros(ids.shape, dtype=torch.float32)
            for row, scores in enumerate(found):
                result[row, attention_mask[row].bool().cpu()] = torch.tensor(scores)
            return result

    def _run(
        self,
        count: int,
        body: Callable[[range], Body],
        read: Callable[[Mapping[str, Any], int], T],
    ) -> list[T]:
        """Send requests for all rows of a batch; return what `read` makes of each row."""
        starts, size, version = (
            range(0, count, self._request_rows),
            self._request_rows,
            self.version,
        )
        parts = [range(start, min(start + size, count)) for start in starts]
        answers = zip(parts, self._client.run([body(part) for part in parts]), strict=True)
        return [row for part, a in answers for row in read_rows(a, part, version, read)]

    def pause_generation(self, mode: PauseMode = "retract") -> None:
        """Let SGLang generate nothing until `continue_generation`, also over weight updates and
        restarts. Another thread may call it."""
        self._client.pause(mode)

    def continue_generation(self) -> None:
        """End a pause."""
        self._client.go_on()

    def abort(self) -> None:
        """End all responses that are being generated; their `generate` raises
        `RolloutOutputError`. Another thread may call it."""
        self._client.call("/abort_request", {"abort_all": True})

    # Weights

    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, form: UpdateForm = "whole"
    ) -> None:
        with self._lock:
            self._check("update_weights", "ready", "released")
            with self._writing(stream, version, lambda: self._names) as weights:
                self._client.update(weights, version)

    def weights_digest(self) -> dict[str, int]:
        with self._lock:
            self._check("weights_digest", "ready", "released")
            if not self.abilities.exposes_weights:
                raise self._unable("show its weights; compare scores of probe prompts", "weights")
            held = self._client.read_back()
            missing = sorted(self._names - held.keys())
            if missing:
                problem = f"it no longer has the weight {missing[0]!r}"
                raise failed(RolloutOutputError, problem, fault="weights", row=None)
            return {name: weight.digest for name, weight in held.items()}

    def received_digests(self) -> Mapping[str, int]:
        return self._client.received

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        self._check("weight_dtypes", "ready", "released")
        return self._client.dtypes

    def release(self) -> None:
        with self._lock:
            super().release()

    def resume(self) -> None:
        with self._lock:
            super().resume()

    def _free(self) -> None:
        self._client.release()

    def _get_back(self) -> None:
        self._client.resume()

    def close(self) -> None:
        # Without the lock: a call that waits for an answer ends with SGLang.
        self._state = "closed"
        self._client.close()


# SGLang has its own implementation of each architecture. Some generate other numbers: 0.5.23
# ignores the sliding window of Mistral and Qwen2, for example, and computes OLMo 3 differently. No
# error says so, and digests of weights do not show it. So models that were not tested with it are
# compared with transformers.

TESTED = ("llama", "qwen2")
"""Values of `model_type` that tests/real_engines compares with `hf`, without sliding windows."""

_TOKENS = 48
# Largest difference of a log-probability, in nats. Correct models differ by rounding, incorrect
# ones by about the size of a log-probability.
_TOLERANCE = {torch.float32: 1e-2}
_TOLERANCE_16_BIT = 0.5


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the most tokens that some layer attends to; None if all layers attend to all."""
    text = config.get_text_config()
    size = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
    if getattr(text, "use_sliding_window", True) is False or kinds == {"full_attention"}:
        return None
    return size if isinstance(size, int) else None


def probe_length(config: PreTrainedConfig, longest: int | None) -> int | None:
    """Return how many tokens to compare; None for a model that was tested.

    Args:
        longest: the most tokens of a sequence. A window that is not shorter changes nothing.
    """
    window = sliding_window(config) or 0
    if longest is not None and window >= longest:
        window = 0
    if not window and config.model_type in TESTED:
        return None
    return min(_TOKENS + window, longest or _TOKENS + window)


def check_numbers(
    score: Callable[[Tensor, Tensor], Tensor],
    model: ModelConfig,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    tokens: int,
) -> None:
    """Compare the scores of SGLang, which holds the weights of the folder, with transformers.

    The model is loaded once more, in host memory, and freed again.

    Raises:
        ModelError: the log-probabilities differ.
    """
    vocabulary: int = config.get_text_config().vocab_size
    ids = ((torch.arange(tokens) * 7 + 5) % vocabulary)[None]
    found = score(ids, torch.ones_like(ids))[0, 1:]
    reference = load_causal_lm(
        model.path,
        dtype=dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )
    with torch.inference_mode():
        log_probs = reference(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    expected = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    differences = (found - expected).abs()
    worst = float(differences.max())
    if worst <= _TOLERANCE.get(dtype, _TOLERANCE_16_BIT):
        return
    token = int(differences.argmax()) + 1
    window = sliding_window(config)
    hint = f" (its layers have a window of {window} tokens)" if window else ""
    raise ModelError(
        f"rollout engine {NAME!r}: SGLang computes model_type {config.model_type!r} differently "
        f"from transformers: the log-probability of token {token} of a probe differs by "
        f"{worst:.2g} nats{hint}, so responses would be of another distribution than the one that "
        "is trained; use rollout.name=hf or vllm",
        path=config.name_or_path,
    )

"""`SGLangRollout`: the rollout protocol over one SGLang."""

import contextlib
import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from quadriga.config.schema import ModelConfig
from quadriga.errors import (
    ModelError,
    RolloutDiedError,
    RolloutError,
    RolloutOutputError,
    RolloutTimeoutError,
)
from quadriga.models.folder import local_folder
from quadriga.models.images import MultiModalRows
from quadriga.models.limits import context_window
from quadriga.models.loading import load_causal_lm, model_without_weights, read_config
from quadriga.models.routes import Routers
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import local_device, rank
from quadriga.rollout.base import (
    Continued,
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
    UpdateForm,
)
from quadriga.rollout.responses import Response, padded_output, stop_strings_of, token_rows
from quadriga.rollout.sglang.client import NAME, Body, HostTransport, Launch, failed
from quadriga.rollout.sglang.host import Json
from quadriga.rollout.sglang.options import SGLang
from quadriga.rollout.sglang.weights import READBACK, buckets, checked, model_shapes, question

T = TypeVar("T")
_Entry = Mapping[str, Any]
"""The answer for one row: {"output_ids": […], "meta_info": {…}}."""

_MOST_THREADS = 64
_WEIGHTS = ("weights",)
_MEMORY = (*_WEIGHTS, "kv_cache", "cuda_graph")
"""Kinds of device memory, as SGLang names them."""
_IDLE_S = 30.0  # for the last request to leave SGLang's scheduler


class SGLangRollout(RolloutEngine):
    """See `RolloutEngine`; `rollout.options` are `SGLangOptions`.

    At most `rollout.settings.micro_batch_size` rows are generated at once. Another thread may call
    `close` while one waits for an answer.

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
        self._model, self._options = model, rollout.options
        config = read_config(local_folder(model.path), trust_remote_code=model.trust_remote_code)
        found, place = context_window(config), local_device(device)
        dtype = compute_dtype(rollout.settings.dtype, place)
        window = found.tokens if found else None
        launch = Launch(
            model, self._options, place, dtype, window, releasable, rollout.records_routes
        )
        # An SGLang that runs already may be able to, whatever this engine was built for.
        self._releasable = releasable or place.type == "cpu" or self._options.url is not None
        self._resets_caches = rollout.resets_caches
        self._shapes = model_shapes(model)
        self._routers = Routers(model_without_weights(model)) if rollout.records_routes else None
        self._decoder_layers: int = config.get_text_config().num_hidden_layers
        rows = rollout.settings.micro_batch_size
        self._request_rows = min(self._options.request_rows, rows)
        self._at_once = min(rows // self._request_rows, _MOST_THREADS)
        self._received: dict[str, int] = {}
        self.moved: Counter[str] = Counter()  # see `GuardedRollout.moved`
        self._released: frozenset[str] = frozenset()  # kinds of device memory
        self._device = place
        given = self._options.weight_handles
        by_handle = place.type == "cuda" and self._options.url is None if given is None else given
        self._handles = self._options.tensor_parallel * by_handle
        self._transport = launch.start()
        self._dtypes = dict.fromkeys(self._shapes, dtype)
        try:
            held = {}  # what SGLang holds, as far as it can be read back
            if isinstance(self._transport, HostTransport):
                held = self._read_back()
                self._dtypes |= {name: dtype for name, (dtype, _) in held.items()}
            else:
                self._version = self._transport.weight_version(self._options.call_timeout_s)
            self.abilities = replace(
                rollout.abilities(config.get_text_config().vocab_size, window),
                exposes_weights=held.keys() == self._shapes.keys(),
            )
            tokens = probe_length(config, window)
            # All ranks have the same SGLang, and the comparison loads the model once more.
            if tokens is not None and rank() == 0:
                if self.version != -1:
                    raise self._error("compare", "its weights are not those of the model folder")
                check_numbers(self.score, model, config, dtype, tokens)
        except BaseException:
            self.close()
            raise

    # Generation

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows | None = None,
        continued: Continued | None = None,
    ) -> RolloutOutput:
        self._check_generates("generate", images)
        begun = self.check_request(prompt_ids, attention_mask, sampling, sample_seeds, continued)
        prompts, version = token_rows(prompt_ids, attention_mask), self.version
        sampled = begun.sampled.tolist()
        limits = [min(begun.at_most, sampling.max_new_tokens - count) for count in sampled]
        own: list[dict[str, Json]] = [{"max_new_tokens": limit} for limit in limits]
        if self._options.seeds:  # SGLang draws by seed and position in the sequence
            for of_row, seed in zip(own, sample_seeds.tolist(), strict=True):
                of_row["sampling_seed"] = seed

        def body(rows: range) -> Body:
            part = slice(rows.start, rows.stop)
            body: dict[str, Json] = {**generate_body(prompts[part], own[part], sampling)}
            if caches:
                body["extra_key"] = [*caches[part]]
            return body if self._routers is None else {**body, "return_routed_experts": True}

        caches = self._caches(begun)
        read = partial(read_sample, sampling=sampling, limits=limits)

        def read_row(entry: _Entry, row: int) -> Response:
            sample = read(entry, row)
            if self._routers is None:
                return sample
            tokens = len(prompts[row]) + len(sample.tokens) - 1
            layers = read_routes(entry, row, tokens, self._decoder_layers)
            return replace(sample, routes=self._routers.of_decoder_layers(layers))

        samples = self._run(len(prompts), body, read_row)
        stops = stop_strings_of(self._model, sampling.stop_strings)
        if stops is not None:
            # SGLang has no tokenizer here, so it samples on behind a stop string. The tokens up
            # to it do not depend on the tokens behind it.
            for row, sample in enumerate(samples):
                before = prompts[row][max(0, len(prompts[row]) - sampled[row]) :]
                whole = stops.completed_at([*before, *sample.tokens], len(before) + 1)
                if whole is not None:
                    end = whole - len(before)
                    tokens, log_probs = sample.tokens[:end], sample.log_probs[:end]
                    samples[row] = Response(tokens, log_probs, "stop", sample.routes)
        return padded_output(samples, sampling, version, begun, attention_mask)

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self._check_generates("score")
        self.check_sequences(ids, attention_mask)
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
        self, count: int, body: Callable[[range], Body], read: Callable[[Mapping[str, Any], int], T]
    ) -> list[T]:
        """Send requests for all rows of a batch; return what `read` makes of each row."""
        size, version = self._request_rows, self.version
        transport, limit = self._transport, self._options.generate_timeout_s
        faults: list[RolloutError] = []

        def ask(rows: range) -> Json:
            try:
                return None if faults else transport.call("/generate", body(rows), limit)
            except (RolloutDiedError, RolloutTimeoutError) as error:
                faults.append(error)
                self._fail()  # so that the other requests end before their deadlines
                return None

        parts = [range(count)[start : start + size] for start in range(0, count, size)]
        with ThreadPoolExecutor(self._at_once) as pool:
            answers = list(pool.map(ask, parts))
        if faults:
            raise faults[0]
        answered = zip(parts, answers, strict=True)
        return [row for part, a in answered for row in read_rows(a, part, version, read)]

    def _fail(self) -> None:
        """End an SGLang that does not answer now, because it may answer later."""
        if self._state != "closed":  # another thread may have closed the engine
            self._state = "failed"
        self._transport.close()

    # Weights

    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, form: UpdateForm = "whole"
    ) -> None:
        self._check("update_weights", "ready", "released")
        with self._writing(stream, version, lambda: self._shapes) as weights:
            device = self._device if self._handles else torch.device("cpu")
            self._send(checked(weights, self._shapes, self._dtypes, device), version)

    def weights_digest(self) -> dict[str, int]:
        self._check("weights_digest", "ready", "released")
        if not self.abilities.exposes_weights:
            raise self._unable("show its weights; compare scores of probe prompts", "weights")
        return {name: digest for name, (_, digest) in self._read_back().items()}

    def received_digests(self) -> Mapping[str, int]:
        return self._received

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        self._check("weight_dtypes", "ready", "released")
        return self._dtypes

    def _send(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._take_back(_WEIGHTS)
        parts = buckets(stream, self._options.bucket_mb << 20, self._handles)
        part = next(parts, None)  # the first bucket is checked before anything is changed
        sent: dict[str, int] = {}
        self._call("/pause_generation", {"mode": "retract"})
        with self._at_the_end("/continue_generation"):
            self._call("/begin_weight_update")
            with self._at_the_end("/end_weight_update"):
                while part is not None:
                    self._load("flattened_bucket", part.pickles)
                    self.moved["handles" if self._handles else "pipe"] += part.data.nbytes
                    sent.update(part.digests)
                    part = next(parts, None)
            body: Body = {"new_version": str(version), "abort_all_requests": False}
            self._call("/update_weight_version", body)
            if self._resets_caches:
                self._call("/flush_cache")
        self._received |= sent

    def _load(self, load_format: str, pickles: Sequence[bytes]) -> None:
        """Send tensors to SGLang, one pickle for all of its ranks, or one for each.

        Its cache is flushed once, after the last bucket.
        """
        body: dict[str, Json] = {"load_format": load_format, "flush_cache": False}
        if self._handles and len(pickles) == self._handles:  # some hundred bytes each
            body["serialized_named_tensors"] = [b64encode(each).decode() for each in pickles]
            self._call("/update_weights_from_tensor", body)
        else:
            body["ranks"] = self._options.tensor_parallel
            self._call("/update_weights_from_tensor", body, pickles[0])

    @contextlib.contextmanager
    def _at_the_end(self, path: str) -> Iterator[None]:
        """Call `path` after the block; an error of the block is the one to raise."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RolloutError):
                self._call(path)
            raise
        self._call(path)

    def _read_back(self) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and `tensor_digest` of each weight that SGLang can locate.

        Raises:
            RolloutError: reading back failed.
        """
        assert isinstance(self._transport, HostTransport), "a server elsewhere is not read"
        self._take_back(_WEIGHTS)
        file = self._transport.folder / "held.json"
        self._call("/begin_weight_update")
        with self._at_the_end("/end_weight_update"):
            self._load(READBACK, [question(self._shapes, file)])
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            file.unlink()
        except FileNotFoundError:
            content = {"error": f"there is no answer in {file}; look at the log of SGLang"}
        if "error" in content:
            problem = f"its weights could not be read back: {content['error']}"
            raise failed(RolloutOutputError, problem, fault="weights", row=None)
        return {
            name: (getattr(torch, dtype), int(digest))
            for name, (dtype, digest) in content["held"].items()
        }

    # Calls, device memory and end

    def _call(self, path: str, body: Body | None = None, payload: bytes = b"") -> Json:
        """Return the answer to a request that generates nothing.

        Raises:
            RolloutError: SGLang refused it, has ended, or did not answer in time.
        """
        try:
            answer = self._transport.call(path, body or {}, self._options.call_timeout_s, payload)
        except (RolloutDiedError, RolloutTimeoutError):
            self._fail()
            raise
        if isinstance(answer, dict) and answer.get("success") is False:
            problem = f"SGLang did not carry out {path}: {answer.get('message')}"
            raise failed(RolloutError, problem, method=path)
        return answer

    def _free(self) -> None:
        # The trainer needs the device memory meanwhile. Without a GPU nothing is freed.
        # It ends SGLang if the last request has not left the scheduler yet; a flush waits for that.
        self._call("/flush_cache", {"timeout_s": _IDLE_S})
        self._call("/release_memory_occupation", {"tags": list(_MEMORY)})
        self._released = frozenset(_MEMORY)

    def _get_back(self) -> None:
        self._take_back(_MEMORY)

    def _take_back(self, tags: Sequence[str]) -> None:
        missing: list[Json] = [tag for tag in tags if tag in self._released]
        if missing:
            self._call("/resume_memory_occupation", {"tags": missing})
            self._released -= frozenset(tags)

    def close(self) -> None:
        """End SGLang if it was started here. Requests of other threads fail."""
        self._state = "closed"
        self._transport.close()


# Requests and answers of SGLang's `/generate`


def generate_body(
    prompts: Sequence[Sequence[int]], own: Sequence[dict[str, Json]], sampling: SamplingParams
) -> Body:
    """Return the body of a request for one response to each prompt.

    Args:
        own: the parameters of each prompt: most new tokens, and a seed if SGLang has seeds.
    """
    parameters: dict[str, Json] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.end_token_ids),
        # With an end token, `ignore_eos` would make SGLang ignore `stop_token_ids` too. The model
        # that it was started with has no end token of its own.
        "ignore_eos": not sampling.end_token_ids,
    }
    return {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": [{**parameters, **of_row} for of_row in own],
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def score_body(sequences: Sequence[Sequence[int]]) -> Body:
    """Return the body of a request for the log-probability of each token of the sequences."""
    return {
        "input_ids": [list(sequence) for sequence in sequences],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def read_rows(
    answer: Any, rows: Sequence[int], version: int, read: Callable[[_Entry, int], T]
) -> list[T]:
    """Return what `read_sample` or `read_scores` makes of each row of an answer.

    Args:
        rows: of the batch, which the request had; also for messages.
        version: the version of the weights that were set last.

    Raises:
        RolloutOutputError: a row is missing, was aborted, has another number of log-probabilities
            than of tokens, or was computed by weights of another version.
    """
    entries = [answer] if isinstance(answer, dict) else answer
    if not isinstance(entries, list) or len(entries) != len(rows):
        raise _fault(rows[0], "rows", f"{str(answer)[:80]} for {len(rows)} prompts")
    found = []
    for row, entry in zip(rows, entries, strict=True):
        try:
            _check_version(entry["meta_info"], version, row)
            found.append(read(entry, row))
        except (LookupError, TypeError, ValueError) as error:
            raise _fault(row, "form", f"{type(error).__name__}: {error}") from error
    return found


def read_sample(
    entry: _Entry, row: int, sampling: SamplingParams, limits: Sequence[int]
) -> Response:
    """Return the response of a row of an answer to `generate_body`."""
    ids = [int(token) for token in entry["output_ids"]]
    log_probs = _log_probs(entry["meta_info"]["output_token_logprobs"], len(ids), row)
    reason = entry["meta_info"]["finish_reason"]
    kind = reason["type"]
    if kind == "length" and len(ids) == limits[row]:
        return Response(ids, log_probs, "length")
    if kind == "stop" and ids and ids[-1] in sampling.end_token_ids:
        return Response(ids, log_probs, "stop")
    raise _fault(row, "finish reason", f"{reason!r} after {len(ids)} tokens")


def read_routes(entry: _Entry, row: int, tokens: int, layers: int) -> Tensor:
    """Return the experts of each token of a row that was computed, [tokens, decoder layers, K]."""
    text = entry["meta_info"].get("routed_experts")
    if text is None:
        problem = "none; start the server with --enable-return-routed-experts"
        raise _fault(row, "experts of its tokens", problem)
    numbers = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.int32)
    if len(numbers) == 0 or len(numbers) % (tokens * layers):
        problem = f"{len(numbers)} numbers for {tokens} tokens and {layers} layers"
        raise _fault(row, "experts of its tokens", problem)
    return numbers.view(tokens, layers, -1)


def read_scores(entry: _Entry, row: int, length: int) -> list[float]:
    """Return the log-probabilities of a row of an answer to `score_body`: 0 at the first token."""
    behind = entry["meta_info"]["input_token_logprobs"][1:]  # the first has none
    return [0.0, *_log_probs(behind, length - 1, row)]


def _check_version(info: _Entry, version: int, row: int) -> None:
    """Check that one version sampled all tokens, and that it is the one that was set."""
    spans = info.get("weight_versions") or []
    versions = {str(info["weight_version"]), *(str(span["version"]) for span in spans)}
    if versions != {str(version)}:
        raise _fault(
            row,
            "weight version",
            f"it was sampled by the weight versions {sorted(versions)}, but {version} was set; "
            "does another program update this SGLang?",
        )


def _log_probs(entries: Sequence[Sequence[Any]], count: int, row: int) -> list[float]:
    """Read [[log-probability, token id, text], …]."""
    if len(entries) != count or not all(isinstance(entry[0], float | int) for entry in entries):
        raise _fault(row, "log-probabilities", f"{entries!r} for {count} tokens")
    return [float(entry[0]) for entry in entries]


def _fault(row: int, fault: str, found: str) -> RolloutOutputError:
    problem = f"wrong {fault} in the answer for row {row}: {found}"
    return failed(RolloutOutputError, problem, fault=fault, row=row)


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
    alone = replace(model, use_shm=False)  # no other rank loads it
    reference = load_causal_lm(alone, dtype=dtype)
    with torch.inference_mode():
        log_probs = reference(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    expected = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    differences = (found - expected).abs()[-_TOKENS:]
    # In 16 bits, rounding can give a few tokens other experts.
    share = 1.0 if dtype == torch.float32 else 0.9
    if differences.quantile(share) <= _TOLERANCE.get(dtype, _TOLERANCE_16_BIT):
        return
    worst = float(differences.max())
    token = tokens - len(differences) + int(differences.argmax())
    window = sliding_window(config)
    hint = f" (its layers have a window of {window} tokens)" if window else ""
    raise ModelError(
        f"rollout engine {NAME!r}: SGLang computes model_type {config.model_type!r} differently "
        f"from transformers: the log-probability of token {token} of a probe differs by "
        f"{worst:.2g} nats{hint}, so responses would be of another distribution than the one that "
        "is trained; use rollout.name=hf or vllm",
        path=config.name_or_path,
    )

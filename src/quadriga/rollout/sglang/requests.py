"""Requests and answers of SGLang's `/generate`, in the terms of the rollout protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quadriga.errors import RolloutOutputError
from quadriga.rollout.abilities import SamplingParams
from quadriga.rollout.responses import Response
from quadriga.rollout.sglang.host import Json
from quadriga.rollout.sglang.transports import Body, failed

T = TypeVar("T")
_Entry = Mapping[str, Any]
"""The answer for one row: {"output_ids": […], "meta_info": {…}}."""


def generate_body(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int] | None
) -> Body:
    """Return the body of a request for one response to each prompt.

    Args:
        seeds: one for each prompt, or None if SGLang was started without seeds.
    """
    parameters: dict[str, Json] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.end_token_ids),
        # With an end token, `ignore_eos` would make SGLang ignore `stop_token_ids` too. The model
        # that it was started with has no end token of its own.
        "ignore_eos": not sampling.end_token_ids,
    }
    own = [{}] * len(prompts) if seeds is None else [{"sampling_seed": seed} for seed in seeds]
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


def read_sample(entry: _Entry, row: int, sampling: SamplingParams) -> Response:
    """Return the response of a row of an answer to `generate_body`."""
    ids = [int(token) for token in entry["output_ids"]]
    log_probs = _log_probs(entry["meta_info"]["output_token_logprobs"], len(ids), row)
    reason = entry["meta_info"]["finish_reason"]
    kind = reason["type"]
    if kind == "length" and len(ids) == sampling.max_new_tokens:
        return Response(ids, log_probs, "length")
    if kind == "stop" and ids and ids[-1] in sampling.end_token_ids:
        return Response(ids, log_probs, "stop")
    raise _fault(row, "finish reason", f"{reason!r} after {len(ids)} tokens")


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

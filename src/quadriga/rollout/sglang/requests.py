"""Requests and answers of SGLang's `/generate`, in the terms of the rollout protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quadriga.errors import RolloutOutputError
from quadriga.rollout.abilities import SamplingParams
from quadriga.rollout.responses import Response
from quadriga.rollout.sglang.host import Json
from quadriga.rollout.sglang.transports import NAME


def generate_body(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int] | None
) -> dict[str, Json]:
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
    each: list[Json] = [
        parameters if seeds is None else {**parameters, "sampling_seed": seeds[row]}
        for row in range(len(prompts))
    ]
    return {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": each,
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def score_body(sequences: Sequence[Sequence[int]]) -> dict[str, Json]:
    """Return the body of a request for the log-probability of each token of the sequences."""
    return {
        "input_ids": [list(sequence) for sequence in sequences],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def read_samples(
    answer: Json, count: int, sampling: SamplingParams, version: int, first_row: int
) -> list[Response]:
    """Return the samples of an answer to `generate_body`, checked.

    Args:
        count: the prompts of the request.
        version: the version of the weights that were set last.
        first_row: the row of the batch that is the first of the request, for messages.

    Raises:
        RolloutOutputError: a sample is missing, was aborted, has another number of
            log-probabilities than of tokens, or was sampled by weights of another version.
    """
    return [
        _sample(entry, sampling, version, first_row + i)
        for i, entry in enumerate(_entries(answer, count, first_row))
    ]


def read_scores(
    answer: Json, lengths: Sequence[int], version: int, first_row: int
) -> list[list[float]]:
    """Return the log-probabilities of an answer to `score_body`: 0 at each first token.

    Raises:
        RolloutOutputError: as `read_samples`.
    """
    found = []
    for i, entry in enumerate(_entries(answer, len(lengths), first_row)):
        row = first_row + i
        info = _info(entry, row)
        _check_version(info, version, row)
        entries = info.get("input_token_logprobs")
        behind = entries[1:] if isinstance(entries, list) else entries  # the first has none
        log_probs = [0.0, *_log_probs(behind, row, "scores")]
        if len(log_probs) != lengths[i]:
            raise _fault(row, "scores", f"{len(log_probs)} scores for {lengths[i]} tokens")
        found.append(log_probs)
    return found


def _entries(answer: Json, count: int, row: int) -> list[Mapping[str, Json]]:
    entries = [answer] if isinstance(answer, dict) else answer
    if not isinstance(entries, list) or len(entries) != count:
        found = len(entries) if isinstance(entries, list) else type(entries).__name__
        raise _fault(row, "rows", f"{found} answers to {count} prompts")
    checked: list[Mapping[str, Json]] = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise _fault(row + i, "rows", f"an answer of type {type(entry).__name__}")
        checked.append(entry)
    return checked


def _sample(
    entry: Mapping[str, Json], sampling: SamplingParams, version: int, row: int
) -> Response:
    info = _info(entry, row)
    _check_version(info, version, row)
    tokens = entry.get("output_ids")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise _fault(row, "tokens", "no output_ids")
    ids = tuple(int(str(token)) for token in tokens)
    log_probs = tuple(_log_probs(info.get("output_token_logprobs"), row, "log-probabilities"))
    if len(log_probs) != len(ids):
        raise _fault(row, "log-probabilities", f"{len(log_probs)} for {len(ids)} tokens")
    reason = info.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "length" and len(ids) == sampling.max_new_tokens:
        return Response(ids, log_probs, "length")
    if kind == "stop" and ids and ids[-1] in sampling.end_token_ids:
        return Response(ids, log_probs, "stop")
    raise _fault(row, "finish reason", f"{reason!r} after {len(ids)} tokens")


def _info(entry: Mapping[str, Json], row: int) -> Mapping[str, Json]:
    info = entry.get("meta_info")
    if not isinstance(info, dict):
        raise _fault(row, "rows", "no meta_info")
    return info


def _check_version(info: Mapping[str, Json], version: int, row: int) -> None:
    """Check that one version sampled all tokens, and that it is the one that was set."""
    versions = {str(info.get("weight_version"))}
    spans = info.get("weight_versions")
    if isinstance(spans, list):
        versions |= {str(span.get("version")) for span in spans if isinstance(span, dict)}
    if versions != {str(version)}:
        raise _fault(
            row,
            "weight version",
            f"it was sampled by the weight versions {sorted(versions)}, but {version} was set; "
            "does another program update this SGLang?",
        )


def _log_probs(entries: Json, row: int, what: str) -> list[float]:
    """Read [[log-probability, token id, text], …]."""
    if not isinstance(entries, list):
        raise _fault(row, what, "none were returned")
    values = []
    for entry in entries:
        value = entry[0] if isinstance(entry, list) and entry else None
        if not isinstance(value, (int, float)):
            raise _fault(row, what, f"{value!r} in place of a number")
        values.append(float(value))
    return values


def _fault(row: int, fault: str, found: str) -> RolloutOutputError:
    return RolloutOutputError(
        f"rollout engine {NAME!r}: wrong {fault} in the answer for row {row}: {found}",
        engine=NAME,
        fault=fault,
        row=row,
    )

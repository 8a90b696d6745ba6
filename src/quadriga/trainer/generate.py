"""`quadriga generate`: responses of a model folder to one prompt, or to files of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.schema import GenerateConfig
from quadriga.errors import ConfigError
from quadriga.protocol import fields
from quadriga.trainer.run.preflight import check_files, require_model_path
from quadriga.trainer.run.sequence_checks import check_generation_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data import PromptDataset

Messages = Sequence[Mapping[str, object]]
"""A chat: messages with `role` and `content`."""


@dataclass(frozen=True)
class Answer:
    """One prompt and the responses to it."""

    prompt: Messages
    responses: list[str]


def run_generation(config: GenerateConfig) -> list[Answer]:
    """Generate `n` responses per prompt, and write them to `output` if it is set.

    Returns:
        One entry per prompt, in the order of the prompts.

    Raises:
        ConfigError: neither or both of `prompt` and `data_files` are set, or the suffix of
            `output` is unknown.
        ModelError: the folder holds no model, or a sequence or a token does not fit it.
    """
    from quadriga.models import check_model_folder

    if (config.prompt is None) == (not config.data_files):
        raise ConfigError("set either prompt=… or data_files=[…], and not both")
    if config.output is not None and Path(config.output).suffix not in _WRITERS:
        raise ConfigError(f"output must end in one of {sorted(_WRITERS)}, got {config.output!r}")
    check_files(config.data_files, "data_files", needed=False)
    require_model_path(config.model.path, "model.path")
    check_model_folder(config.model.path, trust_remote_code=config.model.trust_remote_code)
    answers = list(_answers(config))
    if config.output is not None:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](answers, path)
    return answers


def main_generation(config: GenerateConfig) -> list[Answer]:
    """Call `run_generation`; verl has this name for it."""
    return run_generation(config)


def _answers(config: GenerateConfig) -> Iterator[Answer]:
    from quadriga.data import PromptLoader
    from quadriga.models import load_tokenizer
    from quadriga.parallel.device import get_device_name
    from quadriga.rollout import build_rollout
    from quadriga.trainer.stages import expand_prompts
    from quadriga.workers.generation import generate_batch, generation_inputs, sampling_params

    device = get_device_name() if config.device == "auto" else config.device
    tokenizer = load_tokenizer(
        config.model.tokenizer_path or config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )
    dataset = _prompts(config, tokenizer)
    check_generation_data(config, tokenizer, dataset)
    loader = PromptLoader(dataset, config.batch_size, shuffle=False, drop_last=False)
    # One process and one model: the engine is called directly, without a worker group.
    engine = build_rollout("hf", config.model, device=device)
    for number, prompts in enumerate(loader):
        rows = expand_prompts(prompts, n=config.n, step=number, seed=config.seed).batch
        batch = generate_batch(
            engine,
            generation_inputs(rows),
            sampling_params(
                config.sampling, config.model, max_new_tokens=config.max_response_length
            ),
        ).batch
        pairs = zip(batch[fields.RESPONSES], batch[fields.RESPONSE_MASK], strict=True)
        texts = [
            str(tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)) for ids, mask in pairs
        ]
        for i, messages in enumerate(prompts.non_tensor_batch[fields.RAW_PROMPT]):
            yield Answer(messages, texts[i * config.n : (i + 1) * config.n])


def _prompts(config: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    from quadriga.data import PromptDataset

    key, length = config.prompt_key, config.max_prompt_length
    if config.prompt is None:
        return PromptDataset(config.data_files, tokenizer, prompt_key=key, max_prompt_length=length)
    row = {key: [{"role": "user", "content": config.prompt}]}
    return PromptDataset.from_rows([row], tokenizer, prompt_key=key, max_prompt_length=length)


def _write_jsonl(answers: Sequence[Answer], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            row = {"prompt": answer.prompt, "responses": answer.responses}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_parquet(answers: Sequence[Answer], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": a.prompt, "responses": a.responses} for a in answers]
    pq.write_table(pa.Table.from_pylist(rows), path)


_WRITERS = {".jsonl": _write_jsonl, ".parquet": _write_parquet}

"""`quadriga generate`: answers from a model folder, for one prompt or for files of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.config.schema import GenerateConfig
from quadriga.errors import ConfigError
from quadriga.trainer.preflight import check_files


@dataclass(frozen=True)
class Answer:
    """One prompt's answers."""

    prompt: Any
    responses: list[str]


def run_generation(config: GenerateConfig) -> list[Answer]:
    """Answer every prompt `n` times, in order; write them to `output` if one is given.

    Raises:
        ConfigError: neither or both of `prompt` and `data_files` are given, or `output` has an
            ending that is not known.
        ModelError: the folder is not a model.
    """
    from quadriga.models import check_model_folder

    if (config.prompt is None) == (not config.data_files):
        raise ConfigError("give either prompt=… or data_files=[…], and not both")
    if config.output is not None and Path(config.output).suffix not in _WRITERS:
        raise ConfigError(f"output must end in one of {sorted(_WRITERS)}, got {config.output!r}")
    check_files(config.data_files, "data_files", needed=False)
    check_model_folder(config.model.path)
    answers = list(_answers(config))
    if config.output is not None:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITERS[path.suffix](answers, path)
    return answers


def main_generation(config: GenerateConfig) -> list[Answer]:
    """The field's name for `run_generation`."""
    return run_generation(config)


def _answers(config: GenerateConfig) -> Iterator[Answer]:
    from quadriga.models import load_tokenizer
    from quadriga.parallel.device import get_device_name
    from quadriga.rollout import build_rollout
    from quadriga.trainer.stages import expand_prompts, generation_inputs
    from quadriga.workers.generation import generate_batch, sampling_params

    device = get_device_name() if config.device == "auto" else config.device
    tokenizer = load_tokenizer(
        config.model.tokenizer_path or config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )
    engine = build_rollout("hf", config.model, device=device)
    for number, prompts in enumerate(_prompt_batches(config, tokenizer)):
        rows = expand_prompts(prompts, n=config.n, step=number, seed=config.seed)
        batch = generate_batch(
            engine,
            generation_inputs(rows),
            sampling_params(
                config.sampling, config.model, max_new_tokens=config.max_response_length
            ),
        )
        texts = [
            tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
            for ids, mask in zip(
                batch.batch["responses"], batch.batch["response_mask"], strict=True
            )
        ]
        for i, raw in enumerate(prompts.non_tensor_batch["raw_prompt"]):
            yield Answer(raw, texts[i * config.n : (i + 1) * config.n])


def _prompt_batches(config: GenerateConfig, tokenizer: Any) -> Iterator[Any]:
    from quadriga.data import PromptDataset, PromptLoader

    options = {"prompt_key": config.prompt_key, "max_prompt_length": config.max_prompt_length}
    if config.prompt is not None:
        row = {config.prompt_key: [{"role": "user", "content": config.prompt}]}
        dataset = PromptDataset.from_rows([row], tokenizer, **options)
    else:
        dataset = PromptDataset(config.data_files, tokenizer, **options)
    yield from PromptLoader(dataset, config.batch_size, shuffle=False, drop_last=False)


def _write_jsonl(answers: list[Answer], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            row = {"prompt": answer.prompt, "responses": answer.responses}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_parquet(answers: list[Answer], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": a.prompt, "responses": a.responses} for a in answers]
    pq.write_table(pa.Table.from_pylist(rows), path)


_WRITERS = {".jsonl": _write_jsonl, ".parquet": _write_parquet}

"""Episodes of verl's agent loop and of Quadriga, with one engine that does nothing.

    python benchmarks/agent_loops.py [rows] [seconds]
    VERL_PYTHON=other/bin/python python benchmarks/agent_loops.py      # verl beside it

The engine answers each of four turns at once with the same call of a tool, which sleeps so many
seconds. So everything that is measured is the work for turns: templates, tokens, calls, batches.
CPU seconds are those of the process and its children; the first of four rounds is not counted.
VERL_PYTHON is a Python with verl 0.9.1, which needs no GPU, vLLM or SGLang for this.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

TURNS, WIDTH = 4, 512
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = '''
import asyncio
{imports}
async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one
        b: another one
    """
    await asyncio.sleep({seconds})
    return str(a + b)
'''
ENVIRONMENT = """
class Environment(ToolEnvironment):
    tools = [add]

    def reward(self, answer):
        return 0.0
"""


def measured(who: str, rows: int, play: Callable[[], dict[str, int]]) -> None:
    """Play four rounds of episodes, and print what three of them cost."""
    process = psutil.Process()

    def cpu() -> float:
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    for number in range(4):
        began, before, found = time.perf_counter(), cpu(), play()
        wall, own = time.perf_counter() - began, cpu() - before
        if number:
            each = round(1000 * own / rows / TURNS, 2)
            print(
                json.dumps({"who": who, "seconds": round(wall, 2), "cpu_ms_a_turn": each, **found})
            )


def chats(rows: int) -> list[list[dict[str, str]]]:
    """Return the prompts."""
    return [[{"role": "user", "content": f"add one and two {i}"}] for i in range(rows)]


def verl_loop(folder: Path, rows: int) -> None:
    """Measure the worker of verl's agent loop."""
    import logging

    import numpy as np
    import torch
    import verl
    import verl.experimental.agent_loop.tool_agent_loop
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.protocol import DataProto
    from verl.workers.rollout.replica import TokenOutput

    logging.disable(logging.WARNING)
    home = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    config: Any = OmegaConf.load(home)
    config.actor_rollout_ref.model.path = str(folder / "model")
    rollout = config.actor_rollout_ref.rollout
    rollout.name, rollout.calculate_log_probs = "vllm", True
    rollout.prompt_length = rollout.response_length = WIDTH
    rollout.agent.default_agent_loop, rollout.multi_turn.format = "tool_agent", "hermes"
    rollout.multi_turn.enable, rollout.multi_turn.max_assistant_turns = True, TURNS
    rollout.multi_turn.function_tool_path = str(folder / "verl_tool.py")

    class Engine:
        async def generate(self, *_: object, **__: object) -> TokenOutput:
            await asyncio.sleep(0)
            return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed")

    worker = AgentLoopWorker(config, Engine())
    ids = [*worker.tokenizer(CALL).input_ids, worker.tokenizer.eos_token_id]
    prompts = np.empty(rows, dtype=object)
    prompts[:] = chats(rows)

    def play() -> dict[str, int]:
        given = {"raw_prompt": prompts}
        batch = DataProto.from_dict({"row": torch.zeros(rows, 1)}, non_tensors=given)
        found = asyncio.run(worker.generate_sequences(batch)).batch
        known = found["attention_mask"][:, -WIDTH:]
        return {"sampled": int(found["response_mask"].sum()), "tokens": int(known.sum())}

    measured(f"verl {verl.__version__}", rows, play)


def own_engine(ids: Any) -> Any:
    """Return an engine of Quadriga that answers each turn with the same tokens."""
    import torch

    from quadriga.protocol import DataProto, fields
    from quadriga.workers.actor_rollout_ref import known_tokens

    class Answer:
        def __init__(self, rows: DataProto) -> None:
            self.rows = rows

        def done(self) -> bool:
            return True

        def get(self) -> DataProto:
            return self.rows

    class Engine:
        world_size = 1

        def __init__(self) -> None:
            self.generate_sequences = self

        def __call__(self, rows: DataProto) -> None: ...

        def submit(self, rows: DataProto) -> Answer:
            given, none = rows.batch, torch.zeros(len(rows), WIDTH, dtype=torch.int64)
            tokens, mask, versions, log_probs = (
                given[name].clone() if fields.RESPONSES in given.keys() else none.clone()  # noqa: SIM118
                for name in (
                    fields.RESPONSES, fields.RESPONSE_MASK, fields.TOKEN_VERSIONS,
                    fields.ROLLOUT_LOG_PROBS,
                )
            )  # fmt: skip
            finished, log_probs = none[:, 0].clone(), log_probs.float()
            for row, first in enumerate(known_tokens(mask, versions).sum(1).tolist()):
                place = slice(first, min(WIDTH, first + len(ids)))
                tokens[row, place] = ids[: place.stop - first]
                mask[row, place], log_probs[row, place] = 1, -1.0
                finished[row] = int(place.stop - first == len(ids))
            known = known_tokens(mask, versions)
            seen = given[fields.ATTENTION_MASK]
            return Answer(
                DataProto.from_dict(
                    {
                        fields.INPUT_IDS: torch.cat([given[fields.INPUT_IDS], tokens], 1),
                        fields.ATTENTION_MASK: torch.cat([seen, known], 1),
                        fields.RESPONSES: tokens, fields.RESPONSE_MASK: mask,
                        fields.TOKEN_VERSIONS: versions, fields.ROLLOUT_LOG_PROBS: log_probs,
                        fields.PAUSED: none[:, 0], fields.FINISHED: finished,
                        fields.WEIGHT_VERSION: none[:, 0],
                        fields.SEQUENCE_LENGTH: seen.sum(1) + known.sum(1),
                    }
                )
            )  # fmt: skip

    return Engine()


def own_loop(folder: Path, rows: int) -> None:
    """Measure the episodes of a validation."""
    import torch

    from quadriga.config.loading import load_config
    from quadriga.config.schema import TrainConfig
    from quadriga.data import PromptDataset
    from quadriga.data.loader import ordered_loader
    from quadriga.data.rows import Row
    from quadriga.models.loading import tokenizer_of
    from quadriga.protocol import fields
    from quadriga.streams.playing import EpisodeGenerator, make_episodes
    from quadriga.streams.replicas import Replicas
    from quadriga.trainer import stages
    from quadriga.trainer.ingredients import make_space, with_tool_prompts

    rollout = "actor_rollout_ref.rollout"
    config = load_config(
        TrainConfig,
        [f"actor_rollout_ref.model.path={folder / 'model'}", f"agent.path={folder / 'tool.py'}",
         f"agent.max_turns={TURNS}", f"agent.concurrency={rows}", "agent.processes=1",
         f"data.max_response_length={WIDTH}", f"{rollout}.slice_tokens={WIDTH}",
         f"{rollout}.micro_batch_size={rows}"],
    )  # fmt: skip
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    ids = torch.tensor([*tokenizer(CALL).input_ids, tokenizer.eos_token_id])
    settings = with_tool_prompts(config.data, config.agent)
    given = [Row({"prompt": chat}, "given", i) for i, chat in enumerate(chats(rows))]
    prompts = PromptDataset.from_settings(given, tokenizer, settings)
    make_space(prompts, config.agent)
    episodes = make_episodes(config, tokenizer)
    assert episodes is not None
    engine = own_engine(ids)
    generator = EpisodeGenerator(config, Replicas(lambda _: engine, 1), episodes, False)

    def play() -> dict[str, int]:
        (batch,) = ordered_loader(prompts, rows)
        batch = stages.expand_prompts(batch, n=1, seed=0, seed_by_index=True).batch
        found = generator.play(batch, partial(stages.generation_inputs, mode="train")).batch
        known = found[fields.ATTENTION_MASK][:, -WIDTH:]
        return {"sampled": int(found[fields.RESPONSE_MASK].sum()), "tokens": int(known.sum())}

    measured("quadriga", rows, play)
    episodes.close()


def main(rows: int = 256, seconds: float = 0.0, folder: str = "") -> None:
    """Measure Quadriga, and verl if `VERL_PYTHON` has it; with a folder: verl in this Python."""
    if folder:
        verl_loop(Path(folder), rows)
        return
    from transformers import AutoTokenizer

    from quadriga.models.tiny import TinyModel, write_tiny_model

    with tempfile.TemporaryDirectory() as made:
        model = Path(made) / "model"
        write_tiny_model(model, [CALL, "3", "add one and two"], TinyModel())
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
        own = "from quadriga.agents.tools import ToolEnvironment\n"
        text = TOOL.format(imports=own, seconds=seconds) + ENVIRONMENT
        (Path(made) / "tool.py").write_text(text)
        theirs = "from verl.tools.function_tool import function_tool\n\n@function_tool"
        text = TOOL.format(imports=theirs, seconds=seconds)
        (Path(made) / "verl_tool.py").write_text(text)
        if other := os.environ.get("VERL_PYTHON"):
            words = [other, __file__, str(rows), str(seconds), made]
            subprocess.run(words, check=True)
        own_loop(Path(made), rows)


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, float, str), sys.argv[1:], strict=False)))

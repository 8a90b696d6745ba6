"""A tool that a tiny model learns to call: multiply two numbers of three digits.

    python examples/agents/calculator.py [steps] [turns] [engine]

The model first learns the form of answers from conversations of which a third calls the tool; the
others answer at once, which so small a model cannot do. Then GRPO rewards right answers alone.
With one turn a call gets no answer: what the model can do without the tool. Prints the share of
right answers in the validations.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from quadriga.agents.tool_calls import Tool
from quadriga.agents.tools import ToolEnvironment

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": %d, "b": %d}}</tool_call>'
# The template of the tiny models, with the signatures of tools.
TEMPLATE = """
{%- if tools %}{{ '<|system|>' }}{% for t in tools %}{{ t.function.name + ' '
    + t.function.parameters.properties | join(' ') }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


class Environment(ToolEnvironment):
    """A problem."""

    tools = (multiply,)

    def reward(self, answer: str) -> float:
        return float(answer.strip() == str(self.row["answer"]))


def problem(rng: random.Random) -> dict[str, object]:
    """Return a row of the data."""
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return {"prompt": f"{a} * {b}", "a": a, "b": b, "answer": str(a * b)}


def conversation(row: dict[str, object], *, calls: bool) -> dict[str, list[dict[str, object]]]:
    """Return a conversation for the warm start."""
    messages = [{"role": "user", "content": row["prompt"]}]
    if calls:
        messages.append({"role": "assistant", "content": CALL % (row["a"], row["b"])})
        messages.append({"role": "tool", "content": row["answer"]})
    messages.append({"role": "assistant", "content": row["answer"]})
    return {"messages": messages}


def main(
    steps: int = 30, turns: int = 2, engine: str = "hf", warm_steps: int = 200, **agent: object
) -> list[dict[str, float]]:
    """Train, and return the metrics of the validations and of the steps. `agent`: settings."""
    from transformers import AutoTokenizer

    import quadriga
    from quadriga.models.tiny import TinyModel, write_tiny_model

    folder, rng = Path(tempfile.mkdtemp(prefix="calculator-")), random.Random(0)
    texts = [CALL % (123, 456), "789 * 10", "multiply a b"]
    shape = TinyModel(hidden_size=96, num_heads=3, num_kv_heads=3, intermediate_size=256)
    write_tiny_model(folder / "model", texts, shape)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    warm = [conversation(problem(rng), calls=i % 3 == 0) for i in range(32 * warm_steps)]
    sft = quadriga.SFT(
        str(folder / "model"), warm, lr=4e-3, steps=warm_steps, batch_size=32, test_freq=0,
        folder=str(folder / "sft"), messages_key="messages", loggers=["jsonl"],
        chat_template_kwargs={"tools": [Tool.of(multiply).schema]},
    ).train()  # fmt: skip
    rows = [problem(rng) for _ in range(448)]
    run = quadriga.GRPO(
        str(sft.model_path), data=rows[:384], val_data=rows[384:], steps=steps, lr=1e-3,
        batch_size=16, responses=8, mini_batch_size=16,
        agent={"path": __file__, "max_turns": turns, **agent}, max_response_length=96,
        slice_tokens=48, folder=str(folder / "run"), test_freq=5, loggers=["jsonl"],
        **{"actor_rollout_ref.rollout.name": engine},
        **{"actor_rollout_ref.rollout.val_sampling.temperature": 1.0},
    ).train()  # fmt: skip
    return run.history


if __name__ == "__main__":
    for row in main(*map(int, sys.argv[1:3]), *sys.argv[3:]):
        print({key: row[key] for key in ("step", "val/score", "agent/tool_calls") if key in row})

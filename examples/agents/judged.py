"""A judge as the only reward: no rule function scores a response.

    python examples/agents/judged.py [steps]

The judge is a tiny model that has learned to rate four digits: how many of them are 7. It has ranks
of its own or shares those of the policy (`placement.judge`); its file is
examples/trainer/local_judge.py. The policy, which writes random digits at first, never sees the
rule. Prints the judge's mean verdict in the validations, and how often the judge was right.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

PROMPT = "Write digits."
RATE = "Rate {response}"


def digits(rng: random.Random) -> str:
    """Return four digits, of which any number may be 7."""
    share = rng.random()
    return " ".join("7" if rng.random() < share else str(rng.randint(0, 9)) for _ in range(4))


def taught(folder: Path, name: str, pairs: list[tuple[str, str]], steps: int) -> str:
    """Return the folder of a tiny model that has learned to answer as in (prompt, answer)."""
    import quadriga
    from quadriga.models.tiny import TinyModel, write_tiny_model

    shape = TinyModel(hidden_size=96, num_heads=4, num_kv_heads=2, intermediate_size=256)
    write_tiny_model(folder / name, [PROMPT, RATE, "0 1 2 3 4 5 6 7 8 9"], shape)
    rows = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": a}]}
        for p, a in pairs
    ]
    run = quadriga.SFT(
        str(folder / name), rows, lr=3e-3, steps=steps, batch_size=32, test_freq=0,
        messages_key="messages", loggers=["jsonl"], folder=str(folder / f"{name}-sft"),
    ).train()  # fmt: skip
    return str(run.model_path)


def main(steps: int = 15) -> tuple[list[dict[str, float]], float]:
    """Train. Return the metrics of the validations, and the share of sampled responses on which
    the judge was right."""
    from quadriga.observability.jsonl import read_jsonl, read_samples
    from quadriga.trainer.main import run_training
    from quadriga.trainer.roles.registry import load_train_config

    folder, rng = Path(tempfile.mkdtemp(prefix="judged-")), random.Random(0)
    texts = [digits(rng) for _ in range(2048)]
    rated = [(RATE.replace("{response}", t), str(t.count("7"))) for t in texts]
    random_digits = [(PROMPT, " ".join(rng.choices("0123456789", k=4))) for _ in range(1024)]
    judge = taught(folder, "judge", rated, steps=120)
    policy = taught(folder, "policy", random_digits, steps=40)
    rows = [{"prompt": [{"role": "user", "content": PROMPT}]}] * 64
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rollout = "actor_rollout_ref.rollout"
    config = load_train_config([
        f"algorithm.user_files=[{Path(__file__).parents[1] / 'trainer' / 'local_judge.py'}]",
        f"judge.model_path={judge}", f"judge.policy_path={policy}", f"judge.prompt='{RATE}'",
        "judge.max_tokens=2", f"actor_rollout_ref.model.path={policy}",
        f"data.train_files=[{folder}/rows.jsonl]", f"data.val_files=[{folder}/rows.jsonl]",
        "data.train_batch_size=8", "data.max_response_length=12", f"{rollout}.n=8",
        f"{rollout}.val_sampling.temperature=1.0", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.total_training_steps={steps}", "trainer.test_freq=5", "trainer.backend=local",
        "trainer.samples_per_step=64", "trainer.loggers=[jsonl]",
        f"trainer.default_local_dir={folder}/run",
    ])  # fmt: skip
    run_training(config)
    samples = read_samples(folder / "run" / "samples.jsonl")
    right = [sample.reward == sample.response.count("7") for sample in samples]
    history = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if "val/score" in row]
    return history, sum(right) / len(right)


if __name__ == "__main__":
    history, right = main(*map(int, sys.argv[1:]))
    for row in history:
        print({key: row[key] for key in ("step", "val/score") if key in row})
    print(f"the judge was right on {right:.0%} of the responses")

"""Two policies are trained against each other: a judge says whose responses to a prompt are better.

    prompts ─┬─► A.generate_sequences ─┐          ┌─► advantages ─► A.update_actor, A.sync_weights
             └─► B.generate_sequences ─┴─► judge ─┴─► advantages ─► B.update_actor, B.sync_weights

Run: python examples/controller/two_policies.py [ray]
"""

from __future__ import annotations

import sys
import tempfile

import torch

from quadriga.algorithms.advantages import compute_advantages
from quadriga.backends import get_backend
from quadriga.config.convert import build
from quadriga.config.schema import ActorRolloutRefConfig
from quadriga.models import load_tokenizer, write_tiny_model
from quadriga.protocol import DataProto
from quadriga.single_controller import Backend, WorkerGroup
from quadriga.workers import ActorRolloutRefWorker, RankRuntime

PROMPTS, RESPONSES, TOKENS, STEPS = ["say a", "say aa", "a or b", "more a"], 8, 6, 6
ROWS = [prompt for prompt in PROMPTS for _ in range(RESPONSES)]  # a prompt group is 8 rows


def start_policy(backend: Backend, model: str) -> WorkerGroup:
    """Start a process that trains a policy and generates with it."""
    settings = {"model": {"path": model}, "actor": {"optim": {"lr": 5e-3}}}
    config = build(ActorRolloutRefConfig, {**settings, "rollout": {"n": RESPONSES}})
    runtime = RankRuntime(device="cpu", threads=1, max_response_length=TOKENS)
    worker = backend.class_with_args(ActorRolloutRefWorker, config, "actor_rollout", runtime)
    group = backend.worker_group(backend.resource_pool([1], use_gpu=False), worker)
    group.init_model()
    return group


def judge(ours: list[str], theirs: list[str]) -> torch.Tensor:
    """Return the share of their responses to the prompt that have fewer "a" than ours has, [B]."""
    mine, other = (torch.tensor([text.count("a") for text in side]) for side in (ours, theirs))
    wins = mine.view(-1, RESPONSES, 1) > other.view(-1, 1, RESPONSES)
    return wins.float().mean(-1).flatten()


def train(group: WorkerGroup, batch: DataProto, wins_B: torch.Tensor) -> None:
    """Update a policy on its responses, and give the weights to its rollout engine."""
    mask_BT = batch.batch["response_mask"]
    rewards_BT = mask_BT * (wins_B / mask_BT.sum(1))[:, None]
    batch.batch["advantages"], _ = compute_advantages(
        "grpo", token_level_rewards_BT=rewards_BT, response_mask_BT=mask_BT, group_ids=ROWS
    )
    group.update_actor(batch)
    group.sync_weights()


def main(backend_name: str = "local") -> list[list[float]]:
    """Return the mean number of "a" in a response of both policies, in each step."""
    backend, counts = get_backend(backend_name), []
    backend.start(num_cpus=2)
    with tempfile.TemporaryDirectory() as model:
        write_tiny_model(model, [*PROMPTS, "a b c d e f"])
        tokenizer, policies = load_tokenizer(model), [start_policy(backend, model) for _ in "AB"]
        prompts = tokenizer(ROWS, padding=True, return_tensors="pt")
        for step in range(STEPS):
            batches = []
            for number, group in enumerate(policies):
                seeds = {"sample_seed": torch.arange(len(ROWS)) + 1000 * (2 * step + number)}
                batches.append(group.generate_sequences(DataProto.from_dict({**prompts, **seeds})))
            texts = [tokenizer.batch_decode(batch.batch["responses"]) for batch in batches]
            counts.append([sum(text.count("a") for text in side) / len(side) for side in texts])
            train(policies[0], batches[0], judge(*texts))
            train(policies[1], batches[1], judge(*reversed(texts)))
        backend.shutdown()
    return counts


if __name__ == "__main__":
    print(main(*sys.argv[1:]))

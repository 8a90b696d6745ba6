"""A tree search over one policy: a value model chooses which partial responses go on.

    prompt ─► policy: BRANCHES continuations of each node ─► value model ─► the BEAM best nodes ─┐
                ▲───────────────────────────────────────────────────────── DEPTH times ──────────┘

Before that, the value model learns from sampled responses how many letters a response will have.

Run: python examples/controller/tree_search.py [ray]
"""

from __future__ import annotations

import sys
import tempfile

import torch

from quadriga.backends import get_backend
from quadriga.config.convert import build
from quadriga.config.schema import ActorRolloutRefConfig, CriticConfig
from quadriga.models import load_tokenizer, write_tiny_model
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerGroup
from quadriga.workers import ActorRolloutRefWorker, CriticWorker, RankRuntime

TOKENS, DEPTH, BRANCHES, BEAM, SAMPLED, UPDATES = 2, 4, 4, 4, 32, 20
Nodes = list[list[int]]  # token ids: the prompt, and the same number of sampled tokens in each


def rows_of(nodes: Nodes, **fields: torch.Tensor) -> DataProto:
    """Return nodes as a batch."""
    ids = torch.tensor(nodes)
    return DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids), **fields})


def grown(policy: WorkerGroup, nodes: Nodes, seed: int) -> Nodes:
    """Return each node with TOKENS sampled tokens."""
    rows = rows_of(nodes, sample_seed=torch.arange(len(nodes)) + 1000 * seed)
    sampled = policy.generate_sequences(rows).batch["responses"].tolist()
    return [node + tokens for node, tokens in zip(nodes, sampled, strict=True)]


def values_of(critic: WorkerGroup, nodes: Nodes) -> torch.Tensor:
    """Return the value of each node [B]. A value is that before a token, so one more is added."""
    rows = rows_of([[*node, 0] for node in nodes], response_mask=torch.ones(len(nodes), 1).long())
    return critic.compute_values(rows).batch["values"][:, -1]


def main(backend_name: str = "local") -> tuple[float, float]:
    """Return the mean number of letters in sampled responses, and in those of the search."""
    backend = get_backend(backend_name)
    backend.start(num_cpus=2)
    with tempfile.TemporaryDirectory() as model:
        write_tiny_model(model, ["say a", "a b c d e f"])
        tokenizer, settings = load_tokenizer(model), {"model": {"path": model}}
        runtime = RankRuntime(device="cpu", threads=1, max_response_length=TOKENS)
        generation = {"rollout": {"sampling": {"min_new_tokens": TOKENS}}}  # no end tokens
        policy_config = build(ActorRolloutRefConfig, {**settings, **generation})
        critic_config = build(CriticConfig, {**settings, "optim": {"lr": 3e-3}})
        policy, critic = (
            backend.worker_group(backend.resource_pool([1], use_gpu=False), worker)
            for worker in (
                backend.class_with_args(ActorRolloutRefWorker, policy_config, "rollout", runtime),
                backend.class_with_args(CriticWorker, critic_config, runtime=runtime),
            )
        )
        policy.init_model()
        critic.init_model()

        prompt = tokenizer("say a").input_ids

        def score(nodes: Nodes) -> torch.Tensor:
            texts = tokenizer.batch_decode([node[len(prompt) :] for node in nodes])
            return torch.tensor([float(sum(map(str.isalpha, text))) for text in texts])

        for update in range(UPDATES):
            nodes = [prompt] * SAMPLED
            for depth in range(DEPTH):
                nodes = grown(policy, nodes, update * DEPTH + depth)
            mask = torch.ones(SAMPLED, TOKENS * DEPTH).long()
            rows = rows_of(nodes, response_mask=mask)
            rows = rows.union(critic.compute_values(rows))
            rows.batch["returns"] = score(nodes)[:, None] * mask
            critic.update_critic(rows)
        sampled = float(score(nodes).mean())
        nodes = [prompt]
        for depth in range(DEPTH):
            nodes = grown(policy, [node for node in nodes for _ in range(BRANCHES)], 9000 + depth)
            best = values_of(critic, nodes).topk(min(BEAM, len(nodes))).indices
            nodes = [nodes[number] for number in best]
        backend.shutdown()
        return sampled, float(score(nodes).mean())


if __name__ == "__main__":
    print(main(*sys.argv[1:]))

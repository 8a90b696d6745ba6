"""A subclass of the actor's worker with a method for the KL divergence from the reference policy.

Run: python examples/controller/kl_divergence.py [ray]
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile

import torch

from quadriga.algorithms.kl import kl_estimate
from quadriga.backends import get_backend
from quadriga.config.schema import ActorRolloutRefConfig, ModelConfig
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.protocol import DataProto
from quadriga.single_controller import make_nd_compute_dataproto_dispatch_fn, register
from quadriga.workers import ActorRolloutRefWorker


class ActorWithKL(ActorRolloutRefWorker):
    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def compute_kl(self, data: DataProto) -> DataProto:
        """Return `kl` [B, R]: the k3 estimate of KL(actor ‖ reference) of each response token."""
        mine = self.compute_log_prob(data).batch["old_log_probs"]
        reference = self.compute_ref_log_prob(data).batch["ref_log_prob"]
        kl = kl_estimate(mine, reference, "k3") * data.batch["response_mask"]
        return DataProto.from_dict(tensors={"kl": kl})


def sample_batch(rows: int = 4, prompt: int = 3, response: int = 2) -> DataProto:
    """Return a batch with the fields of a rollout and random token ids."""
    torch.manual_seed(0)
    ids = torch.randint(5, 20, (rows, prompt + response))
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": ones,
            "position_ids": ones.cumsum(-1) - 1,
            "responses": ids[:, prompt:],
            "response_mask": ones[:, prompt:],
        }
    )


def main(backend_name: str = "local") -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        shape = TinyModel(
            hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64
        )
        write_tiny_model(f"{folder}/model", ["one two three four five six seven eight"], shape)
        config = ActorRolloutRefConfig()
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model or ModelConfig(), path=f"{folder}/model")
        )
        backend = get_backend(backend_name)
        backend.start(num_cpus=1)
        pool = backend.resource_pool([1], use_gpu=False)
        actor = backend.worker_group(
            pool,
            backend.class_with_args(ActorWithKL, config=config, role="actor_rollout_ref"),
            role="actor",
        )
        actor.init_model()
        kl: torch.Tensor = actor.compute_kl(sample_batch()).batch["kl"]
        print("largest KL of an untrained actor from its reference:", kl.abs().max().item())
        actor.shutdown()
        backend.shutdown()
    return kl


if __name__ == "__main__":
    main(*sys.argv[1:])

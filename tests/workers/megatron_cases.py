"""Steps of actor, reference, rollout, critic and reward model, for `test_megatron_workers.py`."""

from pathlib import Path

import torch

from quadriga.config.loading import load_config
from quadriga.config.schema import RewardModelConfig, TrainConfig
from quadriga.parallel.distributed import gather_over_ranks
from quadriga.protocol import DataProto, fields
from quadriga.trainer.stages import generation_inputs
from quadriga.workers import ActorRolloutRefWorker, CriticWorker, RankRuntime, RewardModelWorker

ENGINES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
SETTINGS = (
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.1", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    # Adam divides gradients by their size, and 1e-8 / 1e-8 has no digits.
    "actor_rollout_ref.actor.optim.eps=1e-3", "actor_rollout_ref.actor.optim.lr=1e-2",
    "critic.optim.eps=1e-3", "critic.optim.lr=1e-2", "critic.ppo_mini_batch_size=2",
)  # fmt: skip
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
"""The degrees that are 2, one after another."""
RUNTIME = RankRuntime(device="cpu", max_response_length=5)
WIDTH = 6


def settings(policy: Path, judge: Path, **sizes: int) -> TrainConfig:
    """Return settings in which every role has the engine with these sizes. None: FSDP."""
    chosen = [f"{role}.engine.{name}={size}" for role in ENGINES for name, size in sizes.items()]
    names = [f"{role}.engine.name=megatron" for role in ENGINES] if sizes else []
    paths = [
        f"actor_rollout_ref.model.path={policy}", f"critic.model.path={policy}",
        f"reward_model.model.path={judge}",
    ]  # fmt: skip
    return load_config(TrainConfig, [*SETTINGS, *paths, *names, *chosen])


def prompts() -> DataProto:
    """Four prompts, each twice."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 60, (4, WIDTH), generator=random).repeat_interleave(2, 0)
    mask = torch.ones_like(ids)
    mask[2:4, :3] = 0
    rows = {fields.INPUT_IDS: ids * mask, fields.ATTENTION_MASK: mask}
    return DataProto.from_dict({**rows, fields.SAMPLE_SEED: torch.arange(8)})


class Roles:
    """All workers of one rank."""

    def __init__(self, config: TrainConfig) -> None:
        judge: RewardModelConfig = config.reward_model
        self.policy = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout_ref", RUNTIME)
        self.critic = CriticWorker(config.critic, 2, RUNTIME)
        self.judge = RewardModelWorker(judge, runtime=RUNTIME)
        for worker in (self.policy, self.critic, self.judge):
            worker.init_model()

    def generate(self) -> DataProto:
        """Return the responses of all ranks; each generates those of its own prompts."""
        part, _ = self.policy._query_mesh("rollout")
        rows = generation_inputs(prompts(), "greedy")
        parts = rows.chunk(self.policy.world_size)
        return DataProto.concat(gather_over_ranks(self.policy.generate_sequences(parts[part])))

    def step(self) -> dict[str, object]:
        """Make one step of PPO. Returns what the ranks that are collected have returned."""
        rows = self.generate()
        rows.non_tensor_batch[fields.RAW_PROMPT] = prompts().batch[fields.INPUT_IDS].numpy()
        calls = {
            "log_probs": (self.policy, "actor", self.policy.compute_log_prob),
            "ref": (self.policy, "ref", self.policy.compute_ref_log_prob),
            "values": (self.critic, "critic", self.critic.compute_values),
            "scores": (self.judge, "reward_model", self.judge.compute_rm_score),
        }
        found: dict[str, object] = {"responses": rows.batch[fields.RESPONSES]}
        for name, (worker, mesh, method) in calls.items():
            result = _of_collected(worker, mesh, method(rows))
            found |= {f"{name}/{key}": tensor for key, tensor in result.batch.items()}
            rows = rows.union(result)
        mask = rows.batch[fields.RESPONSE_MASK]
        noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2)) - 0.5
        rows.batch[fields.ADVANTAGES] = noise * mask
        rows.batch[fields.RETURNS] = (noise + rows.batch[fields.VALUES]) * mask
        updates = {
            "critic": (self.critic, "critic", self.critic.update_critic),
            "actor": (self.policy, "actor", self.policy.update_actor),
        }
        for name, (worker, mesh, method) in updates.items():
            result = _of_collected(worker, mesh, method(rows))
            found[f"{name}/metrics"] = result.meta_info["metrics"]
            found[f"{name}/partials"] = len(result.non_tensor_batch[fields.PARTIALS][0])
        found["version"] = self.policy.sync_weights()
        found["after"] = self.generate().batch[fields.RESPONSES]
        weights = self.policy._engine("actor").state_stream()
        found["weights"] = {name: tensor.clone() for name, tensor in weights}
        held = self.policy._rollout().engine.module.state_dict()
        found["held"] = {name: held[name].clone() for name in found["weights"]}
        return found


def _of_collected(worker, mesh: str, result: DataProto) -> DataProto:
    """Return the result of the one rank that the mesh collects for the only data-parallel rank."""
    gathered = gather_over_ranks((worker._query_mesh(mesh), result))
    assert {part for (part, _), _ in gathered} == {0}
    (chosen,) = [found for (_, collected), found in gathered if collected]
    return chosen


def rank_main(rank: int, ranks: int, policy: str, judge: str, file: str) -> None:
    """Make the steps with each of `SIZES`."""
    from megatron.core import parallel_state

    import megatron_on_cpu

    megatron_on_cpu.install()
    found = {}
    for name in SIZES:
        roles = Roles(settings(Path(policy), Path(judge), **{name: ranks}))
        at = roles.policy._query_rank_layout()
        found[name] = roles.step() | {"layouts": gather_over_ranks(at)}
        parallel_state.destroy_model_parallel()
    if rank == 0:
        torch.save(found, file)

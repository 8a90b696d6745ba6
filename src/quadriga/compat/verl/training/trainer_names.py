"""Names of verl's trainer, for subclasses of it: attributes, and methods that Quadriga has not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quadriga.compat.verl.training.hooks import check_plain
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.trainer.ppo import RayPPOTrainer as QuadrigaTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.algorithms.kl import KLController
    from quadriga.workers.roles import ActorGroup, CriticGroup, RefGroup

_ROLE = "register a role with a stage beside it (docs/concepts/roles.md)"
_CALLS = f"override the method of the worker class, which role_worker_mapping gives, or {_ROLE}"
_VALIDATION = "override make_validator, or give the stage of a role in_validation=True"
_SAMPLES = "override open_record, which keeps samples and metrics"
_PROFILING = "read the times of each span in metrics.jsonl"

REPLACED: dict[str, str] = {
    "_balance_batch": f"set trainer.balance_batch, or {_ROLE}",
    "_compute_old_log_prob": _CALLS,
    "_compute_ref_log_prob": _CALLS,
    "_compute_reward_colocate": f"pass reward_fn, or {_ROLE}",
    "_compute_values": _CALLS,
    "_create_dataloader": "set data.train_files and data.val_files",
    "_dump_generations": _SAMPLES,
    "_get_gen_batch": _ROLE,
    "_load_checkpoint": "override resume",
    "_log_rollout_data": _SAMPLES,
    "_maybe_log_val_generations": _SAMPLES,
    "_merge_validation_results": _VALIDATION,
    "_save_checkpoint": "override save",
    "_start_profiling": _PROFILING,
    "_stop_profiling": _PROFILING,
    "_update_actor": _CALLS,
    "_update_critic": _CALLS,
    "_val_metrics_update": _VALIDATION,
    "_validate": _VALIDATION,
}
"""Method of verl's trainer that Quadriga's `fit` does not call → what to write instead."""


class VerlTrainerNames(QuadrigaTrainer):
    """Quadriga's trainer with verl's names of its parts, for a `fit` of one's own.

    The groups are started when they are first read.
    """

    @property
    def actor_rollout_wg(self) -> ActorGroup:
        """The worker group of the policy."""
        return self.init_workers().actor

    @property
    def critic_wg(self) -> CriticGroup | None:
        """The worker group of the critic; None if the estimator reads no values."""
        return self.init_workers().critic

    @property
    def ref_policy_wg(self) -> RefGroup | None:
        """The worker group of the reference; None if no stage reads its log-probabilities."""
        return self.init_workers().ref

    @property
    def use_critic(self) -> bool:
        """Whether the run has a critic."""
        return self.critic_wg is not None

    @property
    def use_reference_policy(self) -> bool:
        """Whether the run has a reference."""
        return self.ref_policy_wg is not None

    @property
    def train_dataloader(self) -> Iterable[DataProto]:
        """The loader of the prompts; its batches are `DataProto`s."""
        return self.ingredients.train_loader

    @property
    def val_dataloader(self) -> Iterable[DataProto] | None:
        """The loader of the prompts of the validation; None without such data."""
        return self.ingredients.val_loader

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the policy."""
        return self.ingredients.tokenizer

    @property
    def kl_ctrl_in_reward(self) -> KLController:
        """The controller of the KL coefficient in the rewards."""
        return self.kl_controller

    @property
    def total_training_steps(self) -> int:
        """The number of training steps of the whole run."""
        return self.total_steps

    @property
    def global_steps(self) -> int:
        """The number of the step, from 1; 0 before the first one."""
        return self.step

    @global_steps.setter
    def global_steps(self, step: int) -> None:
        self.step = step


def check_methods_of_subclass(cls: type[QuadrigaTrainer], fit: object) -> None:
    """Check that the methods of a subclass are called, and that their bodies run.

    A subclass with a `fit` of its own may call methods of verl's trainer, and may await its own.
    `fit`: the one that calls none of them.

    Raises:
        ConfigError: names the method, and what to write instead.
    """
    check_plain(cls, "fit", cls.fit)
    if cls.fit is not fit:
        return
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        replaced = getattr(VerlTrainerNames, name, None)
        if inspect.isfunction(replaced) and not inspect.isgeneratorfunction(replaced):
            check_plain(cls, name, method)
    for name, use in REPLACED.items():
        if hasattr(cls, name):
            raise ConfigError(
                f"{cls.__name__} defines {name}, which Quadriga's fit does not call; {use}, or "
                "override fit too"
            )

"""The workers: one class per role. A worker runs in every rank of a worker group.

    actor_rollout_ref.py   the policy: actor, rollout and reference
    critic.py              the value model
    pair_training.py       the reward model, trained on pairs of responses
    reward_model.py        the reward model; scored_rows.py: the rows that it reads
    sft.py                 the policy, trained on given responses
    roles.py               typed protocols: what the worker group of each role offers
    method_fields.py       the fields that each method reads and writes
    updates.py             one update: epochs, mini-batches, optimizer steps
    objectives.py          the losses of an update, combined from `algorithms`
    generation.py          from prompts to a batch with responses
    runtime.py             settings of a run that every rank needs, and the setup of a rank

This package may import every package below it in the import order: `engines`, `rollout`,
`weight_sync`, `checkpoint`, `models`, `algorithms`, `protocol`, `single_controller`, `config`. It
must not import `trainer`. Names load on first use, so importing this package loads no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker as ActorRolloutRefWorker
    from quadriga.workers.critic import CriticWorker as CriticWorker
    from quadriga.workers.pair_training import PairTrainingWorker as PairTrainingWorker
    from quadriga.workers.reward_model import RewardModelWorker as RewardModelWorker
    from quadriga.workers.runtime import RankRuntime as RankRuntime
    from quadriga.workers.sft import SFTWorker as SFTWorker
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

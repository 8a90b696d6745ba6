"""The workers: one class per role. A worker runs in every rank of a worker group.

    actor_rollout_ref.py   the policy: actor, rollout and reference; trained on given responses
    reward_model.py        the reward model: scores, and training on pairs of responses
    roles.py               typed protocols: what the worker group of each role offers
    method_fields.py       the fields that each method reads and writes
    updates.py             one update: epochs, mini-batches, optimizer steps, and its losses
    runtime.py             settings of a run that every rank needs, the setup of a rank, and the
                           workers with one engine: the base class, and the value model

This package may import every package below it in the import order: `engines`, `rollout`,
`weight_sync`, `checkpoint`, `models`, `algorithms`, `protocol`, `single_controller`, `config`. It
must not import `trainer`. Names load on first use, so importing this package loads no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.workers.actor_rollout_ref import (
        ActorRolloutRefWorker as ActorRolloutRefWorker,
        SFTWorker as SFTWorker,
    )
    from quadriga.workers.reward_model import (
        PairTrainingWorker as PairTrainingWorker,
        RewardModelWorker as RewardModelWorker,
    )
    from quadriga.workers.runtime import CriticWorker as CriticWorker, RankRuntime as RankRuntime
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

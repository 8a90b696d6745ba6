"""Advantages, KL, group filtering, over-long penalty and importance correction."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.paths import PathSettings
from quadriga.config.schema.choices import (
    CorrectionLevel,
    CorrectionMode,
    FilterMode,
    KLControlType,
    Options,
    SampledKLName,
    UnderFilled,
)


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: KLControlType = "fixed"  # adaptive: kl_coef follows target_kl
    kl_coef: float = 0.001  # coefficient, or its first value
    horizon: float = 10000.0  # adaptive: sequences over which kl_coef adapts
    target_kl: float = 0.1  # adaptive: nats per token


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476).

    A prompt group whose rewards are all equal has zero advantage and gives no gradient.
    """

    enable: bool = False  # mask or refill zero-variance prompt groups
    mode: FilterMode = "mask"  # mask: zero-variance groups get weight 0; refill: generate others
    max_num_gen_batches: int = 3  # refill: limit of the batches generated for one step
    under_filled: UnderFilled = "proceed"  # refill: what to do if groups are missing at this limit


@dataclass(frozen=True)
class OverlongConfig:
    """Soft over-long penalty (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = False  # penalise responses near max_response_length
    buffer_length: int = 64  # tokens before max_response_length in which the penalty grows
    penalty_factor: float = 1.0  # size of the full penalty
    drop_truncated: bool = False  # exclude truncated responses from the update and the groups


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance correction for the difference of rollout and training log-probabilities."""

    level: CorrectionLevel = "none"  # what one weight covers; none: no correction
    mode: CorrectionMode = "truncate"  # outside [lower, upper]: clamp the weight, or set it to 0
    upper: float = 2.0  # largest weight
    lower: float | None = None  # smallest weight; None: 1 / upper in mode mask, else 0
    normalise: bool = False  # divide weights by their mean over the batch


@dataclass(frozen=True)
class AlgorithmConfig(PathSettings):
    """Advantages, rewards and KL."""

    PATHS = ("user_files",)

    adv_estimator: str = "gae"  # a name of `quadriga algorithms`
    gamma: float = 1.0  # discount factor
    lam: float = 1.0  # λ of GAE
    norm_adv_by_std: bool = True  # divide group advantages by the standard deviation
    whiten_advantages: bool | None = None  # None: as in the paper of the estimator
    use_kl_in_reward: bool = False  # subtract a KL penalty from the rewards
    kl_penalty: SampledKLName = "k1"  # its estimator; "full" is only in kl_loss_type
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    reward_clip: float | None = None  # clamp rewards to ± this; None: no clamping
    whiten_rewards: bool = False  # scale rewards to unit variance
    reward_components: list[str] = field(default_factory=list)  # keys that reward functions return
    options: Options = field(default_factory=dict)  # keyword arguments of the estimator
    # files that register estimators, losses or roles with sections of their own
    user_files: list[str] = field(default_factory=list)

"""verl's estimators that compare the responses of one prompt, computed by `quadriga.algorithms`.

Two results differ from verl, as everywhere in `quadriga.algorithms`: a sample without response
tokens is not a member of its prompt group, and a prompt group with equal rewards gets advantages of
exactly 0.

Shapes: B samples, T response tokens. Rewards and masks are [B, T]. `index` holds for each sample
the id of its prompt. `epsilon` is added to a standard deviation. Estimators that divide by none
take it and do not use it, as in verl. `_`: what `compute_advantage` passes to every estimator and
this one does not read, such as `reward_baselines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from quadriga.algorithms.advantages import compute_advantages
from quadriga.algorithms.checks import to_bool_mask
from quadriga.algorithms.group_advantages import STD_EPSILON, sequence_scores
from quadriga.algorithms.groups import has_tokens, make_groups
from quadriga.compat.verl.config import VerlConfig, setting
from quadriga.errors import FieldError, InputError

Advantages: TypeAlias = tuple[Tensor, Tensor]
"""(advantages, returns), each [B, T]."""
PromptIds: TypeAlias = Sequence[object] | NDArray[np.generic] | Tensor


class _Settings(TypedDict, total=False):
    norm_adv_by_std: bool
    f_norm: float


def _from_prompt_groups(
    name: str, rewards: Tensor, mask: Tensor, index: PromptIds, **settings: Unpack[_Settings]
) -> Advantages:
    return compute_advantages(
        name,
        token_level_rewards_BT=rewards,
        response_mask_BT=mask,
        group_ids=np.asarray(index),
        **settings,
    )


def _over_std(
    name: str, rewards: Tensor, mask: Tensor, index: PromptIds, epsilon: float, by_std: bool
) -> Advantages:
    """Compute an estimator whose advantages are divided by the std of the prompt group + epsilon.

    A prompt group of equal rewards has std 0 and advantages of exactly 0, also with `epsilon=0`.
    """
    if not by_std or epsilon == STD_EPSILON:  # what Quadriga's estimators use
        return _from_prompt_groups(name, rewards, mask, index, norm_adv_by_std=by_std)
    undivided_BT, _ = _from_prompt_groups(name, rewards, mask, index, norm_adv_by_std=False)
    groups = make_groups(np.asarray(index), has_tokens(to_bool_mask(mask)))
    std_B = groups.std_G(sequence_scores(rewards, mask))[groups.index_B]
    divisor_B = torch.where(std_B == 0, 1.0, std_B + epsilon)
    advantages = (undivided_BT / divisor_B[:, None]).to(undivided_BT.dtype)
    return advantages, advantages


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute GRPO advantages."""
    by_std = norm_adv_by_std_in_grpo
    return _over_std("grpo", token_level_rewards, response_mask, index, epsilon, by_std)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute pass@k advantages: only the best sample of a prompt group gets one.

    `config.norm_adv_by_std_in_grpo` takes precedence over the argument, as in verl.
    """
    by_std: bool = setting(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo)
    return _over_std("grpo_passk", token_level_rewards, response_mask, index, epsilon, by_std)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute RLOO advantages."""
    return _from_prompt_groups("rloo", token_level_rewards, response_mask, index)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute OPO advantages."""
    return _from_prompt_groups("opo", token_level_rewards, response_mask, index)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute GPG advantages. `alpha` is ignored and computed from the batch, as in verl."""
    return _from_prompt_groups("gpg", token_level_rewards, response_mask, index, f_norm=f_norm)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute REINFORCE++ advantages with the mean of the prompt group as baseline."""
    return _from_prompt_groups(
        "reinforce_plus_plus_baseline", token_level_rewards, response_mask, index
    )


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: VerlConfig = None,
    non_tensor_batch: Mapping[str, ArrayLike] | None = None,
    batch: object = None,
    **_: object,
) -> Advantages:
    """Compute GDPO advantages.

    The reward components are the columns of `non_tensor_batch` that `config.gdpo_reward_keys`
    lists, weighted by `config.gdpo_reward_weights`.

    Raises:
        InputError: the keys are missing, or `epsilon` is not the one of Quadriga.
        FieldError: a column is missing.
    """
    keys: Sequence[str] | None = setting(config, "gdpo_reward_keys")
    if not keys or non_tensor_batch is None:
        raise InputError(
            "GDPO reads its reward components from the columns of non_tensor_batch that "
            f"config.gdpo_reward_keys lists; got keys={keys!r} and "
            f"non_tensor_batch={'None' if non_tensor_batch is None else 'given'}. Pass both."
        )
    if norm_adv_by_std_in_grpo and epsilon != STD_EPSILON:
        raise InputError(
            f"compute_gdpo_outcome_advantage: got epsilon={epsilon}, but GDPO always adds "
            f"{STD_EPSILON} to the standard deviations. Leave epsilon out."
        )
    if missing := [key for key in keys if key not in non_tensor_batch]:
        raise FieldError(
            f"compute_gdpo_outcome_advantage: config.gdpo_reward_keys names {missing[0]!r}, but "
            f"non_tensor_batch has {', '.join(non_tensor_batch) or 'no column'}. Return this "
            "component from the reward function, or remove the key.",
            field=missing[0],
        )
    columns = [np.asarray(non_tensor_batch[key], dtype=np.float64) for key in keys]
    return compute_advantages(
        "gdpo",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        group_ids=np.asarray(index),
        reward_components_BK=torch.from_numpy(np.stack(columns, axis=1)),
        norm_adv_by_std=norm_adv_by_std_in_grpo,
        reward_weights=setting(config, "gdpo_reward_weights"),
    )

"""Advantage estimators, the table of them, and the function that calls them.

Shapes: B samples (responses), T response tokens, K reward components.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.algorithms import registry
from quadriga.algorithms.tensors import (
    GroupIds,
    Groups,
    as_float,
    checked_mask,
    has_tokens,
    is_left_aligned,
    make_groups,
    masked_copy,
    pack_left,
    require_finite,
    require_group_size,
    require_same_shape,
    reverse_discounted_sum,
    to_bool_mask,
    unpack_left,
    whiten_selected,
)
from quadriga.errors import AlgorithmError, GroupError, ShapeError

# Advantages from comparing the samples of one prompt. Shapes: B samples, T tokens, K rewards.
#
# The reward of a sample is the sum of its token-level rewards under the mask. Its advantage is one
# number, which all its generated tokens receive. A prompt group whose rewards are all equal gets
# exactly 0, because there is nothing to compare; a prompt group of one sample is such a group. Each
# function returns the same tensor twice, as (advantages_BT, returns_BT), 0 outside the mask.

STD_EPSILON = 1e-6

# One prompt with three responses, rewards 0, 3, 6 and lengths 1, 1, 2:
#
#     mean r = 3, std r (n − 1) = √((9 + 0 + 9) / 2) = 3
#
#     dr_grpo      r − mean r                            −3     0      3
#     grpo         (r − mean r) / (std r + 1e-6)         −1     0      1
#     rloo         r − mean of the other two             −4.5   0      4.5
#     grpo_passk   best − second, over std               0      0      1
#     opo          r − (1·0 + 1·3 + 2·6) / (1 + 1 + 2)   −3.75  −0.75  2.25


def sequence_scores(token_level_rewards_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Return Σ_t r_t over each sample's generated tokens, float64 [B].

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    mask = to_bool_mask(response_mask_BT)
    require_same_shape("response_mask", mask, token_level_rewards=token_level_rewards_BT)
    rewards = as_float(token_level_rewards_BT.detach())
    scores_B = torch.where(mask, rewards, 0).sum(-1).double()
    # NaN and infinity survive the sum, so B sums are checked instead of B·T rewards.
    if not bool(torch.isfinite(scores_B).all()):
        require_finite(token_level_rewards=masked_copy(rewards, mask))
    return scores_B


def _to_tokens(scores_B: Tensor, like_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Copy each sample's number to its generated tokens.

    The result is float64 if `like_BT` is, else float32, and is returned twice.
    """
    dtype = torch.float64 if like_BT.dtype == torch.float64 else torch.float32
    advantages = masked_copy(scores_B.to(dtype)[:, None], to_bool_mask(mask_BT))
    return advantages, advantages


def grpo(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute GRPO advantages (arXiv 2402.03300, section 4.1.2).

    A_i = (r_i − mean r) / (std r + 1e-6), with the sample standard deviation (n − 1).

    Args:
        norm_adv_by_std: False omits the division, which gives Dr.GRPO.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    normalised = _normalised_B(scores, groups, norm_adv_by_std)
    return _to_tokens(normalised, token_level_rewards_BT, response_mask_BT)


def _normalised_B(scores_B: Tensor, groups: Groups, by_std: bool) -> Tensor:
    """Return scores minus the mean of their prompt group, divided by its std + 1e-6 if `by_std`."""
    centred = groups.centre_B(scores_B)
    return centred / (groups.std_G(scores_B)[groups.index_B] + STD_EPSILON) if by_std else centred


def dr_grpo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Compute Dr.GRPO advantages (arXiv 2503.20783): A_i = r_i − mean r.

    The paper combines them with the aggregation `seq-mean-token-sum-norm`, which does not divide
    by the length of the response.
    """
    return grpo(token_level_rewards_BT, response_mask_BT, groups, norm_adv_by_std=False)


def grpo_passk(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute pass@k advantages (arXiv 2503.19595): only the best sample of a prompt group has one.

    A_best = (r_best − r_second) / (std r + 1e-6), and 0 for all others. If two samples share the
    best reward, all advantages of the prompt group are 0.

    Args:
        norm_adv_by_std: False omits the division.

    Raises:
        GroupError: a prompt group has a single member.
    """
    require_group_size(groups, 2, "grpo_passk")
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    best = groups.extreme_G(scores, largest=True)
    is_best = (scores == best[groups.index_B]) & groups.member_B
    # The second-best reward is the largest one among the members that are not the best.
    others = Groups(groups.index_B, groups.member_B & ~is_best, groups.num_groups)
    second = others.extreme_G(scores, largest=True)
    unique = (groups.sum_G(is_best) == 1)[groups.index_B] & is_best
    lead = (best - second)[groups.index_B].masked_fill(~unique, 0.0)
    if norm_adv_by_std:
        lead = lead / (groups.std_G(scores)[groups.index_B] + STD_EPSILON)
    return _to_tokens(lead, token_level_rewards_BT, response_mask_BT)


def rloo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Compute leave-one-out advantages (RLOO, arXiv 2402.14740).

    A_i = r_i − mean of the other r = n/(n−1)·(r_i − mean r).
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    count = groups.count_G()
    # Groups of one have centred reward 0, so the clamp only avoids a division by 0.
    factor = count / (count - 1).clamp(min=1)
    return _to_tokens(
        groups.centre_B(scores) * factor[groups.index_B], token_level_rewards_BT, response_mask_BT
    )


def opo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Compute OPO advantages (arXiv 2505.23585), whose baseline weights samples by length.

    A_i = r_i − Σ_j l_j·r_j / Σ_j l_j, with l the number of generated tokens.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    lengths = to_bool_mask(response_mask_BT).sum(-1).double()
    # Subtracting the mean first does not change A. It makes A exactly 0 for equal rewards, where
    # Σ l·r / Σ l differs from r by rounding.
    centred = groups.centre_B(scores)
    shift = groups.sum_G(lengths * centred) / groups.sum_G(lengths).clamp(min=1)
    return _to_tokens(centred - shift[groups.index_B], token_level_rewards_BT, response_mask_BT)


def gpg(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups, *, f_norm: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute GPG advantages (arXiv 2504.02546): A_i = α·(r_i − mean r) / F_norm, α = B / (B − M).

    M counts the samples of zero-variance groups, which have gradient 0. α keeps the size of the
    step independent of their number: with 4 samples of which 2 are in such a group, α = 2.

    Raises:
        AlgorithmError: an F_norm that is not above 0, or not finite.
    """
    if not 0 < f_norm < math.inf:
        raise AlgorithmError(f"`f_norm` must be above 0 and finite, but received {f_norm}.")
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    nonzero = (groups.nonzero_variance_G(scores)[groups.index_B] & groups.member_B).sum()
    alpha = groups.member_B.sum() / nonzero.clamp(min=1)
    return _to_tokens(
        groups.centre_B(scores) * (alpha / f_norm), token_level_rewards_BT, response_mask_BT
    )


def reinforce_plus_plus_baseline(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++-baseline advantages (arXiv 2501.03262).

    A = whiten(r_i − mean r), whitened over the generated tokens of the batch.

    Args:
        whiten_advantages: False omits the whitening; None whitens.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    advantages, _ = _to_tokens(groups.centre_B(scores), token_level_rewards_BT, response_mask_BT)
    if whiten_advantages is not False:
        advantages = whiten_selected(advantages, to_bool_mask(response_mask_BT))
    return advantages, advantages


def gdpo(
    reward_components_BK: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
    whiten_advantages: bool | None = None,
    reward_weights: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute GDPO advantages (arXiv 2601.05242): normalise each reward component separately.

    A_i = Σ_k w_k·(r_ik − mean r_k) / (std r_k + 1e-6), then whitened over the samples of the batch.
    Whitening over samples instead of tokens keeps long responses from weighing more.

    Args:
        reward_components_BK: one column per component.
        norm_adv_by_std: False omits the division.
        whiten_advantages: False omits the whitening; None whitens.
        reward_weights: w, K numbers; None: all 1.

    Raises:
        ShapeError: the components do not have B rows, or `reward_weights` not K numbers.
        NonFiniteError.
    """
    mask = to_bool_mask(response_mask_BT)
    weights = _component_weights(reward_components_BK, mask, reward_weights)
    components = reward_components_BK.detach().double()
    components = components.masked_fill(~groups.member_B[:, None], 0.0)
    require_finite(reward_components=components)
    total = torch.zeros_like(components[:, 0])
    for column, weight in enumerate(weights):
        total += weight * _normalised_B(components[:, column], groups, norm_adv_by_std)
    if whiten_advantages is not False:
        total = whiten_selected(total, groups.member_B)
    return _to_tokens(total, reward_components_BK, mask)


def _component_weights(
    reward_components_BK: Tensor, mask_BT: Tensor, reward_weights: list[float] | None
) -> list[float]:
    """Return one weight per component. Raises `ShapeError` if the shapes do not agree."""
    if reward_components_BK.dim() != 2 or reward_components_BK.shape[0] != mask_BT.shape[0]:
        raise ShapeError(
            f"`reward_components` must have shape [{mask_BT.shape[0]}, K], but has shape "
            f"{list(reward_components_BK.shape)}.",
            tensor="reward_components",
            got=tuple(reward_components_BK.shape),
        )
    number = reward_components_BK.shape[1]
    weights = [1.0] * number if reward_weights is None else reward_weights
    if len(weights) != number:
        raise ShapeError(
            f"`reward_weights` has {len(weights)} numbers, but there are {number} reward "
            f"components; give one weight per component.",
            tensor="reward_weights",
            expected=number,
            got=len(weights),
        )
    return weights


# Advantages from returns over time: GAE, REINFORCE++, ReMax. Shapes: B samples, T tokens.
#
# `response_mask_BT` is 1 on the tokens that the policy generated and 0 on padding and observations
# (tool output between turns). Only generated tokens are time steps, and values outside the mask are
# ignored. Every function returns (advantages_BT, returns_BT), 0 outside the mask.


def _generated_tokens(mask_BT: Tensor, name: str, tensor_BT: Tensor) -> Tensor:
    """Return a float copy with 0 outside the mask, after checking shape and finiteness.

    The callers compute in place in this copy, because allocating memory takes longer here than
    the arithmetic.
    """
    require_same_shape("response_mask", mask_BT, **{name: tensor_BT})
    kept = masked_copy(as_float(tensor_BT.detach()), mask_BT)
    require_finite(**{name: kept})
    return kept


# γ = 0.5, λ = 0.5, one response with an observation (o) between its two turns:
#
#     token             a      b      o      c
#     mask              1      1      0      1
#     reward r          0      0      8      4
#     value V           1      2      5      2
#
# 1. Pack the generated tokens to the left, because b and c are adjacent in time:
#                       a      b      c
#     r                 0      0      4
#     V                 1      2      2
# 2. δ = r + γ·V_next − V; the value after the last token is 0:
#     δ                 0+1−1  0+1−2  4+0−2   =   0      −1     2
# 3. A = δ + γλ·A_next, from the right, γλ = 0.25:
#     A                 −0.125 −0.5   2
# 4. return = A + V:    0.875  1.5    4
# 5. Unpack:       A    −0.125 −0.5   0      2
#
# The reward 8 and the value 5 of the observation have no effect.
def gae(
    token_level_rewards_BT: Tensor,
    values_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimation (arXiv 1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t,
    where t+1 is the next generated token (V and A are 0 after the last one).

    Deviation from the paper: A is then whitened over the batch, as PPO implementations for
    language models do. The returns are not whitened.

    Args:
        whiten_advantages: False omits the whitening; None whitens.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    values = _generated_tokens(mask, "values", values_BT)
    front = mask
    if has_gaps := not is_left_aligned(mask):
        front, rewards, values = pack_left(mask, rewards, values)
    # In place: `rewards` becomes δ, later `values` becomes the returns.
    deltas = rewards.sub_(values)
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    advantages = reverse_discounted_sum(deltas, gamma * lam)
    returns = values.add_(advantages)
    if has_gaps:
        advantages = unpack_left(advantages, front, mask)
        returns = unpack_left(returns, front, mask)
    if whiten_advantages is not False:
        whiten_selected(advantages, mask, out=advantages)
    return advantages, returns


def reinforce_plus_plus(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++ advantages (arXiv 2501.03262): returns, whitened over the batch.

    return_t = r_t + γ·return_{t+1} over the generated tokens;  A = (return − mean) / std.

    Args:
        whiten_advantages: False omits the whitening; None whitens.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    if is_left_aligned(mask):
        returns = reverse_discounted_sum(rewards, gamma)
    else:
        front, rewards = pack_left(mask, rewards)
        returns = unpack_left(reverse_discounted_sum(rewards, gamma), front, mask)
    if whiten_advantages is False:
        return returns.clone(), returns
    # The rewards are not needed any more, so their memory receives the advantages.
    out = rewards if rewards.shape == returns.shape else None
    return whiten_selected(returns, mask, out=out), returns


def remax(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, reward_baselines_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ReMax advantages (arXiv 2310.10505), whose baseline is the greedy response's reward.

    A_t = Σ_{s≥t} r_s − b, where b [B] is the reward of the greedy response to the same prompt.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    require_same_shape("samples", mask.new_empty(len(mask)), reward_baselines=reward_baselines_B)
    require_finite(reward_baselines=reward_baselines_B)
    # γ = 1 and rewards of 0 at gaps: the sum over all positions equals the sum over generated
    # tokens, so the rows need not be packed.
    returns = masked_copy(reverse_discounted_sum(rewards, 1.0), mask)
    baselines = reward_baselines_B.detach().to(returns.dtype)
    return masked_copy(returns - baselines[:, None], mask), returns


# Episodes of several turns. Shapes: K turns of the longest episode. Two turns of one row:
#
#     token             a   b   x   c        x: an observation
#     response_mask     1   1   0   1
#     turn              0   0   0   1
#     reward            0   2   9   4        r_K = 2 4
#     value             1   7   5   3        V_K = 1 3, those of the first tokens a and c
#
#     γ = λ = 1/2:  δ = 2 + 3/2 − 1, 4 − 3 = 2.5, 1;  A_K = 2.5 + 1/4, 1 = 2.75, 1


def _turns(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the turn of each generated token from 0, int64 [B, T]; other tokens have the number of
    the turn before them, or 0. And where turns begin, bool [B, T]."""
    starts = mask_BT & ~torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]
    return (starts.cumsum(1) - 1).clamp(min=0), starts


def _by_turn(values_BT: Tensor, turn_BT: Tensor) -> Tensor:
    """Return the sum over each turn, [B, K]."""
    turns = int(turn_BT.max()) + 1 if turn_BT.numel() else 1
    return values_BT.new_zeros(len(values_BT), turns).scatter_add_(1, turn_BT, values_BT)


def turn_gae(
    token_level_rewards_BT: Tensor,
    values_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `gae` with the turns of an episode as time steps.

    The reward of turn k is the sum of its rewards, its value V_k that of its first token. All
    tokens of a turn have its advantage, and its return as target of the critic, so γ and λ do not
    depend on the lengths of turns.

    Args:
        whiten_advantages: False omits the whitening; None whitens.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    values = _generated_tokens(mask, "values", values_BT)
    turn_BT, starts_BT = _turns(mask)
    advantages_BK, returns_BK = gae(
        _by_turn(rewards, turn_BT), _by_turn(values * starts_BT, turn_BT),
        _by_turn(starts_BT.to(rewards.dtype), turn_BT),
        gamma=gamma, lam=lam, whiten_advantages=False,
    )  # fmt: skip
    advantages, returns = (
        masked_copy(own.gather(1, turn_BT), mask) for own in (advantages_BK, returns_BK)
    )
    if whiten_advantages is not False:
        whiten_selected(advantages, mask, out=advantages)
    return advantages, returns


def gigpo(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    responses_BT: Tensor,
    groups: Groups,
    *,
    gamma: float = 1.0,
    norm_adv_by_std: bool = True,
    turn_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute GiGPO advantages (arXiv 2505.10978): of the episode, and of each turn.

    A = A_episode + ω·A_turn. A_episode is that of `grpo`. A_turn compares the discounted returns of
    the turns that follow the same state in the episodes of one prompt, in the same way; a state
    that one turn alone has followed gives 0.

    The state is what the policy has just seen: the tokens between the turn before and this one. So
    an observation behind a turn that was cut, which ends with a token of the template, is another
    state. All first turns of a prompt follow the same state.

    Args:
        responses_BT: token ids, int64.
        turn_weight: ω.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    require_same_shape("response_mask", mask, responses=responses_BT)
    turn_BT, starts_BT = _turns(mask)
    returns_BK = reverse_discounted_sum(_by_turn(rewards, turn_BT).double(), gamma)
    rows, firsts = starts_BT.nonzero(as_tuple=True)
    turns = turn_BT[rows, firsts]
    ends = (mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]).nonzero()[:, 1].tolist()
    prompts, ids = groups.index_B[rows].tolist(), responses_BT.tolist()
    states: dict[tuple[int, ...], int] = {}
    numbers = []
    for i, (row, first) in enumerate(zip(rows.tolist(), firsts.tolist(), strict=True)):
        seen = ids[row][ends[i - 1] + 1 : first] if turns[i] else []
        numbers.append(states.setdefault((prompts[i], *seen), len(states)))
    found = torch.tensor(numbers, dtype=torch.int64)
    of_turns = Groups(found, torch.ones_like(found, dtype=torch.bool), len(states))
    own_BK = torch.zeros_like(returns_BK)
    if numbers:
        own_BK[rows, turns] = _normalised_B(returns_BK[rows, turns], of_turns, norm_adv_by_std)
    episode_B = _normalised_B(
        sequence_scores(token_level_rewards_BT, mask), groups, norm_adv_by_std
    )
    whole_BT = (episode_B[:, None] + turn_weight * own_BK).gather(1, turn_BT)
    advantages = masked_copy(whole_BT.to(rewards.dtype), mask)
    return advantages, advantages


AdvantagesAndReturns = tuple[Tensor, Tensor]
AdvantageFn = Callable[..., AdvantagesAndReturns]
EstimatorInput = Tensor | Groups

# Parameter names by which an estimator receives tensors. Every other parameter is a setting.
INPUTS = (
    "token_level_rewards_BT", "response_mask_BT", "groups", "values_BT", "reward_baselines_B",
    "reward_components_BK", "old_log_prob_BT", "responses_BT",
)  # fmt: skip
# Settings of the run that may be passed to any estimator. An estimator that does not read one of
# them ignores it, so that the trainer can pass the same settings whichever estimator is chosen.
SHARED_SETTINGS = ("gamma", "lam", "norm_adv_by_std", "whiten_advantages")


@dataclass(frozen=True)
class AdvantageEntry(registry.Entry[AdvantageFn]):
    """One advantage estimator. `fn` returns (advantages_BT, returns_BT)."""

    @property
    def needs_values(self) -> bool:
        """Whether the estimator reads the critic's values."""
        return "values_BT" in self.needs

    @property
    def needs_groups(self) -> bool:
        """Whether the estimator compares the responses of one prompt."""
        return "groups" in self.needs

    @property
    def needs_baseline_scores(self) -> bool:
        """Whether the estimator reads the reward of each prompt's greedy response."""
        return "reward_baselines_B" in self.needs


def _entry(fn: AdvantageFn, formula: str, paper: str) -> AdvantageEntry:
    needs, settings = registry.split_parameters(fn, INPUTS)
    return AdvantageEntry(fn, formula, paper, needs, settings, registry.origin_of(fn))


ADVANTAGES: dict[str, AdvantageEntry] = {
    "gae": _entry(
        gae, "δ_t = r_t + γV_{t+1} − V_t;  A_t = δ_t + γλA_{t+1};  whitened", "1506.02438"
    ),
    "grpo": _entry(grpo, "A_i = (r_i − mean r) / (std r + 1e-6)", "2402.03300"),
    "dr_grpo": _entry(dr_grpo, "A_i = r_i − mean r", "2503.20783"),
    "grpo_passk": _entry(
        grpo_passk, "A_best = (r_best − r_second) / (std r + 1e-6), others 0", "2503.19595"
    ),
    "rloo": _entry(rloo, "A_i = r_i − mean of the other r", "2402.14740"),
    "remax": _entry(remax, "A_t = Σ_{s≥t} r_s − r(greedy)", "2310.10505"),
    "opo": _entry(opo, "A_i = r_i − Σ l_j r_j / Σ l_j", "2505.23585"),
    "gpg": _entry(gpg, "A_i = α (r_i − mean r) / F_norm;  α = B / (B − M)", "2504.02546"),
    "reinforce_plus_plus": _entry(
        reinforce_plus_plus, "R_t = r_t + γR_{t+1};  A = whiten(R)", "2501.03262"
    ),
    "reinforce_plus_plus_baseline": _entry(
        reinforce_plus_plus_baseline, "A = whiten(r_i − mean r)", "2501.03262"
    ),
    "gdpo": _entry(
        gdpo, "A_i = whiten(Σ_k w_k (r_ik − mean r_k) / (std r_k + 1e-6))", "2601.05242"
    ),
    "turn_gae": _entry(
        turn_gae, "δ_k = r_k + γV_{k+1} − V_k;  A_k = δ_k + γλA_{k+1};  whitened", "own"
    ),
    "gigpo": _entry(gigpo, "A_ik = A_i of grpo + ω A_k over turns behind one state", "2505.10978"),
}


def get_advantage(name: str) -> AdvantageEntry:
    """Return the estimator `name`. Raises `UnknownNameError`, with the nearest name, if none."""
    return registry.look_up(ADVANTAGES, name, "advantage estimator")


def register_advantage(
    name: str, *, formula: str = "", paper: str = ""
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Return a decorator that adds an estimator to the table.

    The parameters of the decorated function state what it takes: any name of `INPUTS`, and
    settings with defaults (read from `algorithm.options` and from the shared settings).

    Raises:
        InputError: the name is taken, or a parameter is neither an input nor has a default.
    """

    def add(fn: AdvantageFn) -> AdvantageFn:
        entry = _entry(fn, formula, paper)
        registry.refuse_second(ADVANTAGES, name, entry.origin, "advantage estimator")
        ADVANTAGES[name] = entry
        return fn

    return add


def compute_advantages(
    name: str,
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    group_ids: GroupIds | None = None,
    values_BT: Tensor | None = None,
    reward_baselines_B: Tensor | None = None,
    reward_components_BK: Tensor | None = None,
    old_log_prob_BT: Tensor | None = None,
    responses_BT: Tensor | None = None,
    **settings: object,
) -> AdvantagesAndReturns:
    """Compute advantages and returns of a whole batch with the estimator `name`.

    The batch must contain complete prompt groups: means and standard deviations are over the
    given rows.

    Args:
        token_level_rewards_BT: reward of each token, any float dtype; ignored outside the mask.
        response_mask_BT: bool, int or float 0/1; 1 on the tokens that the policy generated.
        group_ids: B ids; samples of one prompt have equal ids.
        values_BT: the critic's values.
        reward_baselines_B: reward of the greedy response to each sample's prompt.
        reward_components_BK: the components of the reward.
        old_log_prob_BT: log π_old; no built-in estimator reads it.
        responses_BT: token ids of turns and observations, int64.
        settings: settings of the estimator; `SHARED_SETTINGS` may be passed to any estimator.

    Returns:
        (advantages_BT, returns_BT): float32 (float64 for float64 rewards), 0 outside the mask,
        detached.

    Raises:
        UnknownNameError, UnknownSettingError, ShapeError, MaskError, NonFiniteError, GroupError.
        AlgorithmError: an input that the estimator needs is missing.
    """
    entry = get_advantage(name)
    chosen = registry.choose_settings(settings, entry.settings, SHARED_SETTINGS, name)
    mask_BT = checked_mask(response_mask_BT, False, token_level_rewards=token_level_rewards_BT)
    if mask_BT.shape[0] == 0:
        raise GroupError(
            f"The advantage estimator `{name}` received a batch with no samples; "
            f"`response_mask` must have at least one row.",
            tensor="response_mask",
            estimator=name,
        )
    groups: Groups | None = None
    if entry.needs_groups and group_ids is not None:
        groups = make_groups(group_ids, has_tokens(mask_BT))
    given: dict[str, EstimatorInput | None] = {
        "token_level_rewards_BT": token_level_rewards_BT,
        "response_mask_BT": mask_BT,
        "groups": groups,
        "values_BT": values_BT,
        "reward_baselines_B": reward_baselines_B,
        "reward_components_BK": reward_components_BK,
        "old_log_prob_BT": old_log_prob_BT,
        "responses_BT": responses_BT,
    }
    what = f"The advantage estimator `{name}`"
    inputs: dict[str, EstimatorInput] = registry.needed_inputs(what, entry.needs, given)
    if entry.origin == "built-in":
        return entry.fn(**inputs, **chosen)
    return _call_user_estimator(name, entry, inputs, chosen, mask_BT)


def _call_user_estimator(
    name: str,
    entry: AdvantageEntry,
    inputs: dict[str, EstimatorInput],
    settings: Mapping[str, object],
    mask_BT: Tensor,
) -> AdvantagesAndReturns:
    """Call a user's estimator with masked inputs, and check and mask its results.

    Built-in estimators mask and check by themselves. A user's function may multiply by the mask,
    which would turn NaN padding into NaN sums, so it receives 0 outside the mask.
    """
    for need, value in inputs.items():
        if isinstance(value, Tensor) and need.endswith("_BT") and need != "response_mask_BT":
            tensor = need.removesuffix("_BT")
            require_same_shape("response_mask", mask_BT, **{tensor: value})
            if need == "responses_BT":  # token ids, of observations too
                continue
            kept = masked_copy(as_float(value.detach()), mask_BT)
            require_finite(**{tensor: kept})
            inputs[need] = kept
    advantages_BT, returns_BT = entry.fn(**inputs, **settings)
    results = {f"advantages of {name}": advantages_BT, f"returns of {name}": returns_BT}
    require_same_shape("response_mask", mask_BT, **results)
    require_finite(mask_BT, **results)
    return masked_copy(advantages_BT.detach(), mask_BT), masked_copy(returns_BT.detach(), mask_BT)

"""Reference implementations: loops over samples and tokens in float64, written as in the papers.

This file does not import the package. Token losses are computed from 0-d tensors, so that autograd
provides their gradients.
"""

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

Rows = list[list[float]]


def token_positions(mask: Tensor) -> list[list[int]]:
    """Return the positions of each sample's generated tokens."""
    return [[t for t, m in enumerate(row) if m == 1] for row in mask.tolist()]


def to_tokens(scalars: list[float], mask: Tensor) -> Rows:
    """Copy each sample's number to its generated tokens."""
    return [[a if m else 0.0 for m in row] for a, row in zip(scalars, mask.tolist(), strict=True)]


def scores_of(rewards: Tensor, mask: Tensor) -> list[float]:
    return [
        sum(row[t] for t in positions)
        for row, positions in zip(rewards.tolist(), token_positions(mask), strict=True)
    ]


def members_of(groups: list[str], mask: Tensor) -> dict[str, list[int]]:
    """Return the samples with at least one generated token, by group."""
    found = defaultdict(list)
    for i, (name, positions) in enumerate(zip(groups, token_positions(mask), strict=True)):
        if positions:
            found[name].append(i)
    return found


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def std(numbers: list[float]) -> float:
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def per_group(
    scores: list[float],
    groups: list[str],
    mask: Tensor,
    rule: Callable[[list[float], list[int]], list[float]],
) -> list[float]:
    """Apply `rule` to the scores of each group; zero-variance groups get 0."""
    result = [0.0] * len(scores)
    for members in members_of(groups, mask).values():
        rewards = [scores[i] for i in members]
        if len(set(rewards)) > 1:
            for i, value in zip(members, rule(rewards, members), strict=True):
                result[i] = value
    return result


def grpo_rule(rewards: list[float], members: list[int]) -> list[float]:
    return [(r - mean(rewards)) / (std(rewards) + 1e-6) for r in rewards]


def dr_grpo_rule(rewards: list[float], members: list[int]) -> list[float]:
    return [r - mean(rewards) for r in rewards]


def rloo_rule(rewards: list[float], members: list[int]) -> list[float]:
    return [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def passk_rule(rewards: list[float], members: list[int]) -> list[float]:
    first, second = sorted(rewards, reverse=True)[:2]
    return [(first - second) / (std(rewards) + 1e-6) if r == first else 0.0 for r in rewards]


def opo_rule(lengths: list[int]) -> Callable[[list[float], list[int]], list[float]]:
    def rule(rewards: list[float], members: list[int]) -> list[float]:
        total = sum(lengths[i] for i in members)
        base = sum(lengths[i] * r for i, r in zip(members, rewards, strict=True)) / total
        return [r - base for r in rewards]

    return rule


def gpg(scores: list[float], groups: list[str], mask: Tensor) -> list[float]:
    centred = per_group(scores, groups, mask, dr_grpo_rule)
    members_in_all = with_signal = 0
    for members in members_of(groups, mask).values():
        members_in_all += len(members)
        if len({scores[i] for i in members}) > 1:
            with_signal += len(members)
    return [members_in_all / max(with_signal, 1) * x for x in centred]


def whiten(rows: Rows, mask: Tensor) -> Rows:
    chosen = [
        row[t]
        for row, positions in zip(rows, token_positions(mask), strict=True)
        for t in positions
    ]
    if not chosen:
        return [[0.0] * len(row) for row in rows]
    centre = mean(chosen)
    variance = math.fsum((x - centre) ** 2 for x in chosen) / max(len(chosen) - 1, 1)
    scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(x - centre) * scale if m else 0.0 for x, m in zip(row, ms, strict=True)]
        for row, ms in zip(rows, mask.tolist(), strict=True)
    ]


def gdpo(components: Tensor, groups: list[str], mask: Tensor, weights: list[float]) -> Rows:
    total = [0.0] * len(groups)
    for k, weight in enumerate(weights):
        column = per_group(components[:, k].tolist(), groups, mask, grpo_rule)
        total = [a + weight * b for a, b in zip(total, column, strict=True)]
    has_tokens = torch.tensor([[1 if positions else 0] for positions in token_positions(mask)])
    whitened = whiten([[a] for a in total], has_tokens)
    return to_tokens([row[0] for row in whitened], mask)


def tokens_of(mask: Tensor) -> list[list[list[int]]]:
    """Return each row's tokens as turns of one token."""
    return [[[t] for t in positions] for positions in token_positions(mask)]


def turns_of(mask: Tensor) -> list[list[list[int]]]:
    """Return the positions of the tokens of each turn, by row."""
    rows = []
    for positions in token_positions(mask):
        turns: list[list[int]] = []
        for t in positions:
            if turns and turns[-1][-1] == t - 1:
                turns[-1].append(t)
            else:
                turns.append([t])
        rows.append(turns)
    return rows


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    time_steps: Callable[[Tensor], list[list[list[int]]]] = tokens_of,
) -> tuple[Rows, Rows]:
    advantages = [[0.0] * mask.shape[1] for _ in mask]
    returns = [[0.0] * mask.shape[1] for _ in mask]
    for i, turns in enumerate(time_steps(mask)):
        next_value = next_advantage = 0.0
        for turn in reversed(turns):
            value = float(values[i, turn[0]])
            reward = sum(float(rewards[i, t]) for t in turn)
            next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
            next_value = value
            for t in turn:
                advantages[i][t], returns[i][t] = next_advantage, next_advantage + value
    return advantages, returns


def gigpo(
    rewards: Tensor, ids: Tensor, groups: list[str], mask: Tensor, gamma: float, weight: float
) -> Rows:
    whole = per_group(scores_of(rewards, mask), groups, mask, grpo_rule)
    followed: dict[object, list[tuple[int, list[int], float]]] = {}
    for i, turns in enumerate(turns_of(mask)):
        for k, turn in enumerate(turns):
            seen = ids[i, turns[k - 1][-1] + 1 : turn[0]].tolist() if k else []
            gain = sum(
                gamma ** (later - k) * float(rewards[i, t])
                for later in range(k, len(turns))
                for t in turns[later]
            )
            followed.setdefault((groups[i], *seen), []).append((i, turn, gain))
    advantages = [[0.0] * mask.shape[1] for _ in mask]
    for steps in followed.values():
        gains = [gain for *_, gain in steps]
        own = grpo_rule(gains, []) if len(set(gains)) > 1 else [0.0] * len(gains)
        for (i, turn, _), advantage in zip(steps, own, strict=True):
            for t in turn:
                advantages[i][t] = whole[i] + weight * advantage
    return advantages


def discounted(rewards: Tensor, mask: Tensor, gamma: float) -> Rows:
    returns = [[0.0] * mask.shape[1] for _ in mask]
    for i, positions in enumerate(token_positions(mask)):
        following = 0.0
        for t in reversed(positions):
            following = float(rewards[i, t]) + gamma * following
            returns[i][t] = following
    return returns


# Policy losses. `*_token` computes the loss of one token, `*_sequence` the losses of one response.


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(x, low, high)


def ppo_token(lp: Tensor, old: Tensor, a: Tensor, low: float, high: float, c: float) -> Tensor:
    r = torch.exp(lp - old)
    loss = torch.max(-a * r, -a * clip(r, 1 - low, 1 + high))
    return torch.min(loss, -a * c) if a < 0 else loss


def cispo_token(lp: Tensor, old: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -clip(torch.exp(lp - old), 1 - low, 1 + high).detach() * a * lp


def sapo_token(lp: Tensor, old: Tensor, a: Tensor, pos: float, neg: float) -> Tensor:
    tau = pos if a > 0 else neg
    return -a * 4 / tau / (1 + torch.exp(-tau * (torch.exp(lp - old) - 1)))


def gspo_sequence(lps: list[Tensor], olds: list[Tensor], advs: list[Tensor], low: float,
                  high: float, token: bool) -> list[Tensor]:  # fmt: skip
    s = torch.exp(sum(lp - old for lp, old in zip(lps, olds, strict=True)) / len(lps))
    losses = []
    for lp, a in zip(lps, advs, strict=True):
        ratio = s.detach() * torch.exp(lp) / torch.exp(lp).detach() if token else s
        losses.append(torch.max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high)))
    return losses


def geo_mean_sequence(lps: list[Tensor], olds: list[Tensor], advs: list[Tensor], low: float,
                      high: float) -> list[Tensor]:  # fmt: skip
    exponents = []
    for lp, old, a in zip(lps, olds, advs, strict=True):
        d = lp - old
        if a > 0:
            exponents.append(torch.min(d, clip(d, -low, high)))
        elif a < 0:
            exponents.append(torch.max(d, clip(d, -low, high)))
        else:
            exponents.append(0 * d)
    ratio = torch.exp(sum(exponents) / len(exponents))
    loss = -sum(advs) / len(advs) * ratio
    return [loss] * len(lps)


def covariances(lp: Tensor, advantages: Tensor, mask: Tensor) -> dict[tuple[int, int], float]:
    where = [(i, t) for i, positions in enumerate(token_positions(mask)) for t in positions]
    lps, advs = ([float(x[i, t]) for i, t in where] for x in (lp, advantages))
    return {
        position: (p - mean(lps)) * (a - mean(advs))
        for position, p, a in zip(where, lps, advs, strict=True)
    }


def aggregate(losses: list[list[Tensor]], mode: str, constant: float) -> Tensor:
    """Aggregate `losses`, the losses of each sample's generated tokens, over the whole batch."""
    rows = [row for row in losses if row]
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    tokens = sum(len(row) for row in rows)
    match mode:
        case "token-mean":
            return sum(sum(row) for row in rows) / tokens
        case "token-sum":
            return sum(sum(row) for row in rows)
        case "seq-mean-token-sum":
            return sum(sum(row) for row in rows) / len(rows)
        case "seq-mean-token-mean":
            return sum(sum(row) / len(row) for row in rows) / len(rows)
        case "seq-mean-token-sum-norm":
            return sum(sum(row) for row in rows) / len(rows) / constant
    raise AssertionError(mode)

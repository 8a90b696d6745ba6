"""A file of a user: a sampler that prefers prompts which the policy solves sometimes.

Groups of responses that are all right or all wrong give no gradient. The sampler keeps the mean
score of each prompt and chooses mostly prompts whose score is near `target`; some are random, so
that old scores are renewed.

    quadriga train … data.sampler.path=curriculum.py data.sampler.name=NearTarget
"""

from __future__ import annotations

from collections.abc import Mapping, Sized

import numpy as np

from quadriga.protocol import DataProto, fields


class NearTarget:
    """See `quadriga.data.user_classes.RowSampler`.

    Args:
        target: the score that is preferred. A prompt without a score counts as one with it.
        explore: share of each batch that is random.
    """

    def __init__(
        self, dataset: Sized, seed: int, target: float = 0.5, explore: float = 0.25
    ) -> None:
        self.seed, self.target, self.explore = seed, target, explore
        self.scores = np.full(len(dataset), np.nan)
        # A prompt of the data files is known by its `index`; the sampler counts items.
        self.item_of = {item["index"]: number for number, item in enumerate(dataset)}

    def rows(self, batch: int, batch_size: int) -> list[int]:
        random = np.random.default_rng([self.seed, batch])
        distance = np.abs(np.nan_to_num(self.scores, nan=self.target) - self.target)
        order = np.lexsort((random.random(len(distance)), distance))
        chosen = order[: batch_size - round(batch_size * self.explore)]
        others = np.setdiff1d(np.arange(len(distance)), chosen)
        more = random.choice(others, batch_size - len(chosen), replace=False)
        return [*chosen.tolist(), *more.tolist()]

    def update(self, data: DataProto) -> None:
        scores = data.batch[fields.TOKEN_LEVEL_SCORES].sum(-1).numpy()
        index = data.non_tensor_batch[fields.INDEX]
        for prompt in np.unique(index):
            self.scores[self.item_of[prompt]] = scores[index == prompt].mean()

    def state_dict(self) -> dict[str, object]:
        known = np.flatnonzero(~np.isnan(self.scores))
        return {str(item): float(self.scores[item]) for item in known}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for item, score in state.items():
            self.scores[int(item)] = float(str(score))

"""Rows with images that a call adds so that a batch divides have weight zero in an update."""

from __future__ import annotations

import torch
import vision_cases as cases

from quadriga.config.schema import ActorConfig
from quadriga.protocol import DataProto, fields
from quadriga.single_controller.padding import add_padding
from quadriga.workers.updates import update_policy


def weights_after(folder, data: DataProto) -> dict[str, torch.Tensor]:
    engine = cases.trainer(folder)
    update_policy(
        engine, data, ActorConfig(), responses_per_prompt=1, temperature=1.0, length_scale=6,
        data_ranks=1, seed=0,
    )  # fmt: skip
    return {name: tensor.clone() for name, tensor in engine.state_stream()}


def test_a_padded_update_with_images_equals_that_of_its_rows(folder):
    data = cases.responses(folder, cases.prompts(folder, n=1))[:3]
    data.batch[fields.ADVANTAGES] = data.batch[fields.RESPONSE_MASK].double() * torch.tensor(
        [[3.0], [-1.0], [0.5]]
    )
    padded = add_padding({}, "argument 0", data, 5)
    assert len(padded) == 5
    found, expected = weights_after(folder, padded), weights_after(folder, data)
    assert max(float((found[k] - expected[k]).abs().max()) for k in expected) <= 1e-10

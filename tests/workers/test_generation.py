"""The fields of generated sequences, on the example of `generate_batch`."""

from __future__ import annotations

import torch

from fake_rollout import full_abilities
from quadriga.protocol import DataProto, fields
from quadriga.rollout.base import RolloutEngine, RolloutOutput, SamplingParams
from quadriga.trainer.stages import generation_inputs
from quadriga.workers.actor_rollout_ref import generate_batch
from quadriga.workers.method_fields import GENERATE_SEQUENCES

PAD, END = 0, 9
PROMPTS = torch.tensor([[PAD, 3, 4], [5, 6, 7]])
RESPONSES = torch.tensor([[1, 2, END, PAD], [1, 2, 3, 4]])
SAMPLING = SamplingParams(max_new_tokens=4, eos_token_ids=(END,), pad_token_id=PAD)


class Engine:
    """A rollout engine that returns `RESPONSES`."""

    name = "fixed"
    abilities = full_abilities(vocabulary=10)
    shares_weights = holds_adapters = False
    version = 5

    def generate(self, prompt_ids, attention_mask, sampling, sample_seeds) -> RolloutOutput:
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
        versions = torch.tensor([5, 5])
        return RolloutOutput(RESPONSES, mask, -0.5 * mask, ("stop", "length"), versions)


def generated(engine: RolloutEngine | None = None) -> DataProto:
    rows = DataProto.from_dict(
        {
            fields.INPUT_IDS: PROMPTS,
            fields.ATTENTION_MASK: (PROMPTS != PAD).long(),
            fields.POSITION_IDS: torch.zeros_like(PROMPTS),
            fields.SAMPLE_SEED: torch.tensor([1, 2]),
        },
        {fields.UID: ["a", "b"]},
    )
    return generate_batch(engine or Engine(), generation_inputs(rows, "greedy"), SAMPLING)


def test_sequences_are_laid_out_as_in_the_drawn_example() -> None:
    batch = generated().batch
    assert batch[fields.INPUT_IDS].tolist() == [[0, 3, 4, 1, 2, 9, 0], [5, 6, 7, 1, 2, 3, 4]]
    assert batch[fields.ATTENTION_MASK].tolist() == [[0, 1, 1, 1, 1, 1, 0], [1] * 7]
    assert batch[fields.POSITION_IDS].tolist() == [[0, 0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5, 6]]
    assert batch[fields.SEQUENCE_LENGTH].tolist() == [5, 7]
    assert batch[fields.FINISHED].tolist() == [1, 0]
    assert batch[fields.WEIGHT_VERSION].tolist() == [5, 5]


def test_the_declared_fields_are_sent_and_written() -> None:
    rows = DataProto.from_dict(
        {key: torch.zeros(2, 1) for key in (*GENERATE_SEQUENCES.reads, fields.POSITION_IDS)},
        {fields.UID: ["a", "b"]},
    )
    inputs = generation_inputs(rows, "val")
    assert set(inputs.batch.keys()) == set(GENERATE_SEQUENCES.reads)
    assert inputs.non_tensor_batch == {} and inputs.meta_info == {"sampling": "val"}
    assert set(generated().batch.keys()) == set(GENERATE_SEQUENCES.writes)

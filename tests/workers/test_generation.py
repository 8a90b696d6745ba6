"""The fields of generated sequences, on the example of `generate_batch`."""

from dataclasses import replace

import pytest
import torch

from fake_rollout import full_abilities
from quadriga.errors import FieldError, RolloutAbilityError, RolloutInputError
from quadriga.protocol import DataProto, fields
from quadriga.rollout.base import RolloutEngine, RolloutOutput, SamplingParams
from quadriga.trainer.stages import generation_inputs
from quadriga.workers.actor_rollout_ref import generate_batch
from quadriga.workers.method_fields import BEGUN_RESPONSES, CONTINUE_SEQUENCES, GENERATE_SEQUENCES

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


class Continuing(Engine):
    """An engine that adds two tokens to the first row, and the end token to the second one."""

    abilities = replace(full_abilities(vocabulary=10), continues=True)
    version = 6

    def generate(self, ids, mask, sampling, seeds, images=None, continued=None) -> RolloutOutput:
        self.request = ids.tolist(), mask.tolist(), continued.sampled.tolist(), continued.at_most
        self.began = continued.began.tolist()
        new = torch.tensor([[3, 4], [END, PAD]])
        mask = torch.tensor([[1, 1], [1, 0]])
        return RolloutOutput(new, mask, -0.5 * mask, ("paused", "stop"), torch.tensor([6, 6]))


def begun(**changes: torch.Tensor | None) -> DataProto:
    """Prompts with responses so far: two tokens of the weights 5, and none."""
    mask = torch.tensor([[1, 1, 0, 0, 0], [0] * 5])
    tensors = {
        fields.INPUT_IDS: PROMPTS,
        fields.ATTENTION_MASK: (PROMPTS != PAD).long(),
        fields.SAMPLE_SEED: torch.tensor([1, 2]),
        fields.RESPONSES: torch.tensor([[1, 2, 7, 7, 7], [7] * 5]),
        fields.RESPONSE_MASK: mask,
        fields.ROLLOUT_LOG_PROBS: torch.full((2, 5), -0.25),
        fields.TOKEN_VERSIONS: torch.full((2, 5), 5),
    }
    given = {**tensors, **changes}
    return DataProto.from_dict({key: t for key, t in given.items() if t is not None})


FIVE = replace(SAMPLING, max_new_tokens=5)


def test_responses_go_on_as_in_the_drawn_example() -> None:
    engine = Continuing()
    batch = generate_batch(engine, begun(), FIVE, at_most=2).batch
    ids = [[0, 0, 0, 0, 3, 4, 1, 2], [0, 0, 0, 0, 0, 5, 6, 7]]
    assert engine.request == (ids, [[int(i > 0) for i in row] for row in ids], [2, 0], 2)
    assert engine.began == [5, 6], "the second row is new, so it finds caches of the weights 6"
    expected = {
        fields.RESPONSES: [[1, 2, 3, 4, 0], [END, 0, 0, 0, 0]],
        fields.RESPONSE_MASK: [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]],
        fields.ROLLOUT_LOG_PROBS: [[-0.25, -0.25, -0.5, -0.5, 0], [-0.5, 0, 0, 0, 0]],
        fields.TOKEN_VERSIONS: [[5, 5, 6, 6, 0], [6, 0, 0, 0, 0]],
        fields.INPUT_IDS: [[0, 3, 4, 1, 2, 3, 4, 0], [5, 6, 7, END, 0, 0, 0, 0]],
        fields.ATTENTION_MASK: [[0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]],
        fields.POSITION_IDS: [[0, 0, 1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 3, 3, 3, 3]],
        fields.PROMPTS: PROMPTS.tolist(),
        fields.SEQUENCE_LENGTH: [6, 4],
        fields.FINISHED: [0, 1],
        fields.PAUSED: [1, 0],
        fields.WEIGHT_VERSION: [5, 6],
    }
    assert {key: batch[key].tolist() for key in batch.keys()} == expected  # noqa: SIM118
    assert set(expected) == set(CONTINUE_SEQUENCES.writes)


def test_without_begun_responses_all_rows_are_new() -> None:
    engine = Continuing()
    new = generate_batch(engine, begun(**dict.fromkeys(BEGUN_RESPONSES)), FIVE, at_most=2).batch
    assert engine.request[2] == [0, 0]
    assert new[fields.RESPONSES].tolist() == [[3, 4, 0, 0, 0], [END, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "engine", "kind", "message"),
    [
        ({"token_versions": None}, Continuing(), FieldError, "'token_versions' is missing"),
        ({"responses": PROMPTS}, Continuing(), FieldError, r"'responses' is \[2, 3\]"),
        ({"response_mask": torch.ones(2, 5)}, Continuing(), FieldError, "must be torch.int64"),
        ({"response_mask": torch.ones(2, 5).long()}, Continuing(), RolloutInputError, "5 response"),
        ({"response_mask": torch.eye(5)[1:3].long()}, Continuing(), RolloutInputError, "adjacent"),
        ({}, Engine(), RolloutAbilityError, "cannot continue responses"),
    ],
)
def test_responses_that_cannot_go_on_are_refused(changes, engine, kind, message) -> None:
    with pytest.raises(kind, match=message):
        generate_batch(engine, begun(**changes), FIVE, at_most=2)

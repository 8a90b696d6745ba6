"""From Megatron-core's ranks to HybridFlow's generation groups: weights, and bytes of the paper."""

from __future__ import annotations

import pickle
from fractions import Fraction

import megatron_rank_cases as cases
import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from quadriga.models.loading import load_causal_lm
from quadriga.weight_sync.planning.grouping import transition_volume
from rank_groups import run_ranks

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
RANKS = 4


def test_all_degrees_of_four_ranks_are_tried():
    assert len(cases.trainings(4)) == 6
    assert sum(len(cases.generations(degrees)) for degrees in cases.trainings(4)) == 15


def test_ranks_receive_the_volume_of_the_paper_and_the_right_weights(tmp_path):
    pytest.importorskip("megatron.core")
    # A vocabulary that four ranks divide: padding of four ranks would not be that of two.
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=32,
    )  # fmt: skip
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    run_ranks(RANKS, cases.rank_main, RANKS, str(folder), str(tmp_path), wait_s=840)
    found = [pickle.loads((tmp_path / f"rank_{r}.pickle").read_bytes()) for r in range(RANKS)]
    sizes = {name: 4 * p.numel() for name, p in load_causal_lm(folder).named_parameters()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    divided = sum(sizes.values()) - norms
    for degrees in [d for training in cases.trainings(RANKS) for d in cases.generations(training)]:
        of_ranks = [own[degrees] for own in found]
        for rank, (received, planned, redundant, right) in enumerate(of_ranks):
            assert right, (degrees, rank)
            assert (received, redundant) == (planned, 0), (degrees, rank)
        # The embedding is on the first stage and the head on the last, so ranks receive unequally;
        # all of them together receive what the formula says. Norms are divided by stages only.
        stages = Fraction(1, degrees.gen_pipeline) - Fraction(1, degrees.pipeline)
        volume = transition_volume("hybridflow", degrees) * divided + stages * norms
        assert sum(received for received, *_ in of_ranks) == RANKS * volume, degrees

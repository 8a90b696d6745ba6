"""Weight syncs between real processes: values, bytes, memory, and mistakes that are named."""

import pickle

import pytest
import rank_cases

from rank_groups import fork_ranks


@pytest.fixture(scope="module")
def found_by_ranks(tmp_path_factory):
    """`found_by_ranks(main, count, *args)` returns what each of `count` ranks found."""

    def run(main, count, *args):
        work = tmp_path_factory.mktemp("ranks")
        fork_ranks(main, count, *args, str(work), limit=240)
        return [pickle.loads((work / f"rank_{r}.pickle").read_bytes()) for r in range(count)]

    return run


@pytest.fixture(scope="module")
def ranks(found_by_ranks):
    return found_by_ranks(rank_cases.rank_main, 4)


def test_all_weights_arrive_from_every_mesh(ranks):
    for rank, found in enumerate(ranks):
        for (mesh, bucket), (equal, tied, received, plan) in found["syncs"].items():
            assert equal and tied, (rank, mesh, bucket)
            assert received == sum(
                size for (_, target), size in plan.link_bytes.items() if target == rank
            )
            assert (received == 0) == (mesh == "whole")
            assert (len([*plan.rounds(bucket)]) > 5) == (bucket == 256 and mesh != "whole")


def test_a_training_engine_sends_its_shards(found_by_ranks, model_folder):
    for found in found_by_ranks(rank_cases.engine_main, 2, model_folder):
        for name, (largest, received, whole, version) in found.items():
            # An adapter is merged into shards here and into whole tensors there.
            assert largest <= (1e-6 if name == "adapters" else 0), name
            assert version == 3 and received == whole / 2


def test_ranks_that_hold_a_copy_together_receive_their_parts_only(ranks):
    """64 rows of `large` on four ranks of training, 16 each, and 32 on each rank of a copy."""
    for rank, found in enumerate(ranks):
        of_groups = found["divided"]
        assert of_groups.pop("wrong") == ("large",)
        for groups, (equal, sizes, _, own) in of_groups.items():
            assert equal and sizes, (rank, groups)
            # Ranks 0 and 3 have their own shard in either case, ranks 1 and 2 only with strides.
            assert own == (groups == "strides" or rank in (0, 3)), (rank, groups)
    of_strides, of_neighbours = (
        sum(found["divided"][groups][2] for found in ranks) for groups in ("strides", "neighbours")
    )
    # Their own 16 rows of 40 floats, and for rank 2 its two elements of `norm`.
    assert of_neighbours - of_strides == 2 * 16 * 40 * 4 + 2 * 2

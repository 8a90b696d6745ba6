"""The processes of tests with several ranks: handlers run at their end, the interpreter does not
end in the middle of gloo's threads, and an error of a rank is raised."""

import atexit
import builtins
import os

import pytest

from rank_groups import run_ranks


class AbortsLate:
    """Ends the process as a thread of gloo does that asks for Python's lock too late."""

    def __del__(self) -> None:
        os.abort()


def leave_a_late_abort(rank: int, folder, port: int) -> None:
    builtins.held_until_the_end = AbortsLate()
    atexit.register((folder / f"{rank}").write_text, "handlers ran")


def fail_on_one_rank(rank: int, port: int) -> None:
    if rank == 1:
        raise LookupError("rank 1 has no such entry")


def test_ranks_end_after_their_handlers_and_before_the_interpreter_does(tmp_path):
    run_ranks(2, leave_a_late_abort, tmp_path)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["handlers ran"] * 2


def test_an_error_of_a_rank_is_raised():
    with pytest.raises(Exception, match="rank 1 has no such entry"):
        run_ranks(2, fail_on_one_rank)

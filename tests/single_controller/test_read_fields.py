"""Only the fields that a method reads are sent to its ranks."""

import functools

import pytest
import torch

from group_fixtures import local_group
from quadriga.errors import DispatchError
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.single_controller.worker import registered_methods
from quadriga.workers import ActorRolloutRefWorker, CriticWorker, method_fields
from quadriga.workers.actor_rollout_ref import SFTWorker

SPLIT = {"dispatch_mode": Dispatch.DP_COMPUTE_PROTO}


def names(data: DataProto) -> list[str]:
    return sorted([*([] if data.batch is None else data.batch.keys()), *data.non_tensor_batch])


def timed(function):
    @functools.wraps(function)
    def wrapper(self, data):
        return function(self, data)

    return wrapper


def seeing(**options):
    """Return a method that says which fields its rows have."""
    return register(**SPLIT, **options)(lambda self, data: self.seen(data))


class Reader(Worker):
    """Returns the names of the fields that its rows have, as one field."""

    some = seeing(reads=("ids", "name", "absent"))
    all = seeing()
    overridden, wrapped, registered_again = (seeing(reads=["ids"]) for _ in range(3))

    @register(**SPLIT)
    def all_rows(self, data):
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=("ids",), materialize_futures=False)
    def futures(self, future):
        return type(future).__name__

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=("ids",))
    def nested(self, text, number=None, data=None):
        return text, number, names(data)

    @register(**SPLIT, reads=["ids"])
    @timed
    def marked_outside(self, data):
        return self.seen(data)

    def seen(self, data):
        meta = ",".join(sorted(data.meta_info))
        return DataProto.from_dict(
            non_tensors={"seen": [f"{' '.join(names(data))} {meta}"] * len(data)}
        )


class Derived(Reader):
    wrapped = timed(Reader.wrapped)
    alias = Reader.some
    registered_again = seeing(reads=["scores"])

    def overridden(self, data):
        return self.seen(data)


def group(kind=Reader):
    return local_group(kind)


def batch(rows=4):
    return DataProto.from_dict(
        {"ids": torch.arange(rows), "scores": torch.ones(rows, 3)},
        {"name": [str(i) for i in range(rows)], "text": ["…"] * rows},
        meta_info={"step": 3},
    )


def seen(result) -> set[str]:
    return set(result.non_tensor_batch["seen"])


def test_a_method_receives_the_fields_that_it_reads_and_the_settings():
    given = batch()
    assert seen(group().some(given)) == {"ids name step"}
    assert seen(group().some(data=given)) == {"ids name step"}
    assert seen(group().all(given)) == {"ids name scores text step"}
    assert names(given) == ["ids", "name", "scores", "text"], "the caller's batch is as it was"
    future = group().some.submit(given)
    assert seen(future.get()) == {"ids name step"}


def test_other_arguments_are_sent_as_they_are():
    assert group().nested("a", number=1, data=batch()) == [("a", 1, ["ids"])] * 2


def test_a_batch_without_these_fields_stays_whole():
    """The method can then say what it lacks. Without a field there would be no rows to split."""
    other = DataProto.from_dict({"scores": torch.ones(4, 3)})
    assert seen(group().some(other)) == {"scores "}


def test_a_future_that_has_arrived_is_sent_with_the_fields_that_are_read():
    reader = group()
    arrived = reader.all_rows.submit(batch())
    arrived.get()
    assert seen(reader.some(arrived)) == {"ids name step"}
    assert seen(reader.some(data=arrived)) == {"ids name step"}
    assert reader.futures(arrived) == ["DataProtoFuture"] * 2


def test_a_method_that_overrides_receives_all_fields_unless_it_names_its_own():
    assert seen(group(Derived).overridden(batch())) == {"ids name scores text step"}
    assert seen(group(Derived).registered_again(batch())) == {"scores step"}
    assert seen(group(Derived).wrapped(batch())) == {"ids name scores text step"}
    assert seen(group(Derived).marked_outside(batch())) == {"ids step"}
    assert seen(group(Derived).alias(batch())) == {"ids name step"}
    assert seen(group(Derived).some(batch())) == {"ids name step"}


@pytest.mark.parametrize("reads", ["ids", [1], [None]])
def test_reads_that_are_not_names_are_refused(reads):
    with pytest.raises(DispatchError, match="reads must be a collection of names of fields, got"):
        register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=reads)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((ActorRolloutRefWorker, f"compute_{name}log_prob") for name in ("", "ref_")),
        (ActorRolloutRefWorker, "update_actor"),
        (CriticWorker, "compute_values"),
        (CriticWorker, "update_critic"),
        (SFTWorker, "update_sft"),
        (SFTWorker, "compute_log_prob"),
    ],
)
def test_the_passes_and_updates_of_the_roles_name_their_fields(kind, method):
    stage = getattr(method_fields, method.upper())
    reads = registered_methods(kind)[method].reads
    assert reads == set(stage.inputs) >= set(stage.reads)
    assert fields.RESPONSES not in reads
    with_images = fields.MULTI_MODAL_INPUTS in stage.reads_if_present
    assert (fields.POSITION_IDS in reads) == with_images

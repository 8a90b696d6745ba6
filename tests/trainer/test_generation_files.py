"""`quadriga generate`: files that a second run continues, on one rank and on several."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from run_cases import noted
from safetensors.torch import load_file, save_file

from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config
from quadriga.errors import ConfigError, InputError
from quadriga.observability import jsonl
from quadriga.streams import replicas
from quadriga.trainer import evaluation as generation
from quadriga.trainer.evaluation import ResponseFile, run_generation


def generated(task, path: Path, *more: str) -> Path:
    """Write 16 prompts in batches of 6 with 3 responses each; return the path."""
    run_generation(
        load_config(
            GenerateConfig,
            [f"model.path={task.model}", f"data_files={task.data('test')}", "n=3",
             "sampling.temperature=1", "max_response_length=6", "batch_size=6", "seed=5",
             "trainer.threads_per_worker=1", "trainer.device=cpu", f"output={path}", *more],
        )
    )  # fmt: skip
    return path


@pytest.fixture
def generate(tiny_task, tmp_path):
    """generate("n=3", …) writes responses to answers.jsonl and returns its path."""
    return lambda *more, output="answers.jsonl": generated(tiny_task, tmp_path / output, *more)


@pytest.fixture(scope="module")
def whole(tiny_task, tmp_path_factory) -> bytes:
    """The file of an undisturbed run on one rank."""
    return generated(tiny_task, tmp_path_factory.mktemp("whole") / "answers.jsonl").read_bytes()


def no_ranks(monkeypatch) -> None:
    monkeypatch.setattr(generation, "rollout_group", lambda *_: pytest.fail("ranks were started"))


def test_a_row_has_the_prompt_and_its_responses_and_what_scores_them(generate) -> None:
    rows = list(jsonl.read_jsonl(generate()))
    assert [row["index"] for row in rows] == list(range(16))
    for row in rows:
        assert [len(row[key]) for key in ("responses", "response_tokens", "finished")] == [3] * 3
        assert row["prompt"][-1]["role"] == "user"
        assert row["data_source"] == "quadriga/arithmetic" and row["reward_model"]["ground_truth"]
        assert all(1 <= count <= 6 for count in row["response_tokens"])
    assert len({tuple(row["responses"]) for row in rows}) > 8


def test_two_local_ranks_and_other_batches_have_the_responses_of_one_rank(generate, whole) -> None:
    two = generate("trainer.backend=local", "trainer.n_gpus_per_node=2", output="two.jsonl")
    assert two.read_bytes() == whole
    other = generate("batch_size=5", "rollout.micro_batch_size=2", output="batches.jsonl")
    assert other.read_bytes() == whole
    assert generate("seed=6", output="seed.jsonl").read_bytes() != whole


# Continuing.


@pytest.mark.parametrize("written", [4, 6, 16])
def test_a_run_that_was_killed_is_continued_to_the_file_of_an_undisturbed_one(
    generate, whole, monkeypatch, caplog, written
) -> None:
    write = jsonl.JsonlFile.write
    count = 0

    def killed(self, row) -> None:
        nonlocal count
        if count == written:
            os.write(self._fd, b'{"index": 3, "pro')  # half a line, as a killed process leaves
            raise KeyboardInterrupt
        count += 1
        write(self, row)

    with monkeypatch.context() as patched:
        patched.setattr(generation.ResponseFile, "finish", lambda self: None)
        patched.setattr(jsonl.JsonlFile, "write", killed)
        if written < 16:
            with pytest.raises(KeyboardInterrupt):
                generate()
            assert "the same command generates the responses that " in caplog.text
        else:
            generate()
    seen = []
    batch = generation._generate_batch
    monkeypatch.setattr(
        generation, "_generate_batch", lambda *a: seen.append(len(a[2])) or batch(*a)
    )
    assert generate().read_bytes() == whole
    assert seen == {4: [6, 6, 4], 6: [6, 4], 16: []}[written]


def test_parquet_has_the_rows_of_json_lines_and_is_returned_without_ranks(
    generate, monkeypatch
) -> None:
    import pyarrow.parquet as pq

    lines, table = generate(), generate(output="answers.parquet")
    assert pq.read_table(table).to_pylist() == list(jsonl.read_jsonl(lines))
    assert sorted(p.name for p in table.parent.glob("answers.parquet*")) == [
        "answers.parquet", "answers.parquet.inputs.json",
    ]  # fmt: skip
    no_ranks(monkeypatch)
    generate(output="answers.parquet")


# Refusing.


def test_changed_settings_are_refused_and_named(generate, monkeypatch) -> None:
    path = generate()
    before = path.read_bytes()
    no_ranks(monkeypatch)
    for override, words in (
        ("n=2", "n: 3 → 2"),
        ("sampling.temperature=0.5", r"sampling\.temperature: 1\.0 → 0\.5"),
        ("seed=6", "seed: 5 → 6"),
        ("batch_size=4", "batch_size: 6 → 4"),
        ("max_response_length=7", "max_response_length: 6 → 7"),
        ("rollout.dtype=float32", r"rollout\.dtype: auto → float32"),
    ):
        with pytest.raises(ConfigError, match=f"other inputs: {words}; choose another") as error:
            generate(override)
        assert error.value.key == "output"
    assert path.read_bytes() == before
    generate("trainer.n_gpus_per_node=2", "rollout.micro_batch_size=3")  # complete: no ranks
    assert path.read_bytes() == before


def test_changed_data_and_weights_are_refused_and_named(generate, tiny_task, tmp_path) -> None:
    shutil.copytree(tiny_task.model, tmp_path / "model")
    model = f"model.path={tmp_path / 'model'}"
    generate(model)
    generate()  # the same model in another folder
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = sorted(weights)[0]
    weights[name].view(-1)[0] += 1e-3
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"the content of model\.path is another one"):
        generate(model)
    with pytest.raises(ConfigError, match="the content of data_files is another one"):
        generate(f"data_files={tiny_task.data('train')}")


def test_two_processes_do_not_write_one_file(generate, tiny_task, tmp_path) -> None:
    config = load_config(GenerateConfig, [f"model.path={tiny_task.model}"])
    opened = ResponseFile.open(tmp_path / "answers.jsonl", config, 1, lambda: None)
    with opened, pytest.raises(ConfigError, match=r"answers\.jsonl is in use by another run"):
        generate()
    generate()


# Faults.


def test_a_full_disk_keeps_what_was_written(generate, whole, monkeypatch, tmp_path) -> None:
    write, calls = os.write, []

    def full(handle: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    with monkeypatch.context() as patched:
        patched.setattr(jsonl.os, "write", full)
        with pytest.raises(InputError, match=r"answers\.jsonl: No space left on device"):
            generate()
    assert (tmp_path / "answers.jsonl").read_bytes() == b"".join(whole.splitlines(True)[:8])
    assert generate().read_bytes() == whole


# Replicas: each response once, also after losses.

TWO = (
    "trainer.backend=local", "trainer.n_gpus_per_node=2", "rollout.replicas.enable=true",
    "rollout.replicas.request_rows=4",
)  # fmt: skip


@pytest.fixture
def requests(monkeypatch) -> list[tuple[int, int]]:
    """(replica, rows) of every request that has ended."""
    found: list[tuple[int, int]] = []

    def note(self, future):
        replica, prompts = self._asked[future]
        found.append((replica.number, sum(map(len, prompts))))

    noted(monkeypatch, replicas._Call, "_receive", note)
    return found


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_replica_that_is_lost_in_the_middle_loses_no_response(
    generate, whole, requests, monkeypatch, restarts
):
    batches = []

    def disturb(self, prompts):
        batches.append(self.replicas)
        if len(batches) == 2:
            self.replicas.all[0].group.shutdown()

    noted(monkeypatch, replicas.ReplicatedRollout, "generate_sequences", disturb)
    assert generate(*TWO, f"rollout.replicas.restarts={restarts}").read_bytes() == whole
    # It is noticed in the second batch, and replica 0 is started again before the third.
    assert [replica.starts for replica in batches[0].all] == [1 + restarts, 1]
    assert (batches[0].all[0].loss is None) == (restarts == 1)
    assert all(rows == 3 for _, rows in requests)  # the samples of a prompt are one request
    last = [replica for replica, _ in requests[-4:]]
    assert (0 in last) == (restarts == 1)

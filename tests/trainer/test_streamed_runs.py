"""Runs with `trainer.max_staleness`: resumed to the bit, on ranks of their own, and refused."""

import re
from itertools import pairwise

import pytest
from run_cases import STREAMED, assert_equal_tensors, metrics_of_run, timeless

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import CheckpointError, ConfigError, GroupError
from quadriga.observability.jsonl import keep_rows, read_jsonl
from quadriga.rollout import ROLLOUTS, Rollout
from quadriga.streams.timeline import recorded_spans
from quadriga.trainer.checkpoints import read_state
from quadriga.trainer.checks.settings import check_train_settings

APART = ["trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]"]
NO_VALIDATION = "data.val_files=[]"
STEPS = "trainer.total_training_steps=4"
ENDS = f"actor_rollout_ref.rollout.sampling.stop_token_ids={list(range(3, 90))}"


def of_tokens(rows):
    """The metrics without times, and without counts of the calls of the reward function."""
    return [{k: v for k, v in row.items() if "reward/" not in k} for row in timeless(rows)]


def spans_of(folder, track):
    """(name, start, end) of the spans of a track of the run."""
    spans = recorded_spans(folder)
    return [(span.name, span.start, span.end) for span in spans if span.track == track]


REPLICAS = ["trainer.n_gpus_per_node=3", "placement.actor=[0]", "placement.rollout=[1,2]"]
REFILL = "algorithm.filter_groups={enable: true, mode: refill, max_num_gen_batches: 9}"
WARMUP = ["algorithm.adv_estimator=gae", "critic.warmup_steps=2"]


@pytest.mark.parametrize("more", [[], [*REPLICAS, *WARMUP, REFILL]], ids=["turns", "replicas"])
def test_a_run_is_resumed_to_the_bit(train_overrides, rule, tmp_path, more):
    critic = train_overrides[0].replace("actor_rollout_ref", "critic")
    common = [*train_overrides, rule, *STREAMED, ENDS, NO_VALIDATION, STEPS, critic, *more]
    common += ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=null"]
    whole = metrics_of_run(common)
    first = tmp_path / "run"
    middle = first / "checkpoints/global_step_1"
    assert {file.name for file in (middle / "stream").iterdir()} > {"prompts.batch"}
    run = f"trainer.default_local_dir={tmp_path / 'resumed'}"
    resumed = metrics_of_run([*common, run, f"trainer.resume_mode={middle}"])
    assert timeless(resumed) == timeless(whole)[1:]
    assert_equal_tensors(tmp_path / "resumed/model", first / "model")
    samples = [row for row in read_jsonl(first / "samples.jsonl") if row["step"] > 1]
    assert [*read_jsonl(tmp_path / "resumed/samples.jsonl")] == samples, "versions and tokens"
    assert whole[-1]["stream/started"] == whole[-1]["stream/waiting"] == 0 or more
    assert "mismatch/is_weight_mean" in whole[0], "old responses are corrected by default"
    if more:
        assert whole[0]["stream/dropped"] > 0
        return
    assert len({row["actor/grad_norm"] for row in whole}) == 4
    assert max(row["staleness/max"] for row in whole) == 1
    drawn = read_state(first / "checkpoints/global_step_4").loader["batches_done"]
    assert drawn == 4, "a longer run goes on with the next prompts"
    for change in (
        "trainer.max_staleness=0", "actor_rollout_ref.rollout.n=4", "data.max_response_length=16",
        "algorithm.reward_components=[form]",
    ):  # fmt: skip
        changed = rf"{re.escape(change.split('=')[0])}: .* → .*; undo them"
        with pytest.raises(CheckpointError, match=rf"prompts on their way, which .*: {changed}"):
            metrics_of_run([*common, run, change, f"trainer.resume_mode={middle}"])


def test_the_order_of_a_run_is_repeated_to_the_bit_on_one_process(train_overrides, rule, tmp_path):
    common = [*train_overrides, rule, *STREAMED, ENDS, NO_VALIDATION, "trainer.max_staleness=2"]
    common.append("actor_rollout_ref.rollout.sampling.stop=[en, es, s]")
    critic = train_overrides[0].replace("actor_rollout_ref", "critic")
    common += [critic, "algorithm.adv_estimator=gae", "critic.warmup_steps=2"]  # no sync in these
    apart = ["trainer.n_gpus_per_node=3", "placement.actor=[0]", "placement.rollout=[1,2]"]
    first = metrics_of_run([*common, *apart, STEPS])
    assert max(row["staleness/max"] for row in first) > 0
    responses = [row["response"] for row in read_jsonl(tmp_path / "run/samples.jsonl")]
    assert sum(text.endswith(("en", "es", "s")) for text in responses) > 2
    run = f"trainer.default_local_dir={tmp_path / 'again'}"
    replay = [run, f"trainer.replay_order={tmp_path / 'run'}"]
    again = metrics_of_run([*common, *apart, *replay, STEPS])
    assert of_tokens(again) == of_tokens(first)
    assert_equal_tensors(tmp_path / "again/model", tmp_path / "run/model")
    tracks = {
        track: spans_of(tmp_path / "run", track)
        for track in ("replica 0", "replica 1", "controller", "reward", "pause")
    }
    assert all(tracks.values()) and "evaluate" in {name for name, *_ in tracks["controller"]}
    for own in tracks.values():
        assert all(a[2] <= b[1] + 2e-4 for a, b in pairwise(sorted(own, key=lambda span: span[1])))
    orders = [list(read_jsonl(tmp_path / name / "stream.jsonl")) for name in ("run", "again")]
    calls = [[event["call"] for event in order if "call" in event] for order in orders]
    assert calls[0] == calls[1] and len(calls[0]) > 4
    for folder, steps in (("run", 3), ("again", 4)):
        order = tmp_path / folder / "stream.jsonl"
        keep_rows(order, lambda event, kept=folder == "run": kept or event["step"] > 1)
        given = [f"trainer.total_training_steps={steps}", "trainer.overwrite=true"]
        given += [run.replace("again", "third"), f"trainer.replay_order={tmp_path / folder}"]
        with pytest.raises(ConfigError, match=r"replay_order=.* does not fit this run at step 1"):
            metrics_of_run([*common, *given])
    shorter = "actor_rollout_ref.rollout.sampling.temperature=0.3"
    for change in ("trainer.seed=7", "data.max_response_length=9", shorter):
        given = [change, STEPS, "trainer.overwrite=true", run.replace("again", "third")]
        with pytest.raises(ConfigError, match=r"replay_order=.* does not fit this run at step"):
            metrics_of_run([*common, *given, f"trainer.replay_order={tmp_path / 'run'}"])


def test_a_run_that_was_resumed_with_more_steps_is_repeated(train_overrides, rule, tmp_path):
    masks = "algorithm.filter_groups.enable=true"
    common = [*train_overrides, rule, *STREAMED, ENDS, NO_VALIDATION, masks]
    metrics_of_run([*common, "trainer.save_freq=1"])
    rows = metrics_of_run([*common, STEPS, "trainer.resume_mode=auto"])
    assert sum(row["group/dead"] for row in rows) > 0, "rows are masked"
    for sample in read_jsonl(tmp_path / "run/samples.jsonl"):
        tokens = sum(tokens for _, tokens in sample["weight_versions"])
        assert tokens == sample["response_tokens"] > 0, "masked responses are shown, too"
    run = f"trainer.default_local_dir={tmp_path / 'again'}"
    given = [*common, STEPS, run, f"trainer.replay_order={tmp_path / 'run'}"]
    decays = "actor_rollout_ref.actor.optim.lr_scheduler=linear"
    with pytest.raises(ConfigError, match=r"step 1: .* if a resumption has changed it"):
        metrics_of_run([*given, decays])
    metrics_of_run([*given, "trainer.overwrite=true"])
    assert_equal_tensors(tmp_path / "again/model", tmp_path / "run/model")
    order = tmp_path / "run/stream.jsonl"  # as if the resumption had kept caches
    head, last, rest = order.read_text().rpartition('"settings": [')
    order.write_text(head + last + rest.replace("]", ", 0]", 1))
    with pytest.raises(ConfigError, match=r"step 1: .*reset_caches=false cannot be repeated"):
        metrics_of_run([*given, "trainer.overwrite=true"])


def test_remax_and_refilling_are_streamed(train_overrides, rule):
    """The first step, whose responses are all of the first weights, is that of a run without."""
    common = [*train_overrides, rule, NO_VALIDATION, "trainer.overwrite=true"]
    common.append("algorithm.adv_estimator=remax")
    first, streamed = (metrics_of_run([*common, f"trainer.max_staleness={k}"]) for k in (0, 1))
    for name in ("reward/mean", "critic/advantages/mean", "response_length/mean", "batch/tokens"):
        assert streamed[0][name] == pytest.approx(first[0][name], rel=1e-6), name
    refill = "algorithm.filter_groups={enable: true, mode: refill}"
    rows = metrics_of_run([*common, refill, "trainer.max_staleness=1"])
    assert [row["group/dead"] for row in rows] == [0.0, 0.0] and rows[1]["stream/dropped"] > 0
    with pytest.raises(
        GroupError, match=r"zero-variance after 1 batches .* max_num_gen_batches \(1\)"
    ):
        always = "{enable: true, mode: refill, max_num_gen_batches: 1, under_filled: error}"
        metrics_of_run([*common, f"algorithm.filter_groups={always}", "trainer.max_staleness=1"])


def test_a_reward_that_hangs_costs_its_own_responses(train_overrides, tmp_path):
    head = "import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    body = "  time.sleep(60 * (extra_info['index'] == 7))\n  return len(solution_str)\n"
    (tmp_path / "hangs.py").write_text(head + body)
    given = [f"reward.path={tmp_path / 'hangs.py'}", "reward.num_processes=1", "reward.timeout_s=1"]
    given += [*STREAMED, NO_VALIDATION, "trainer.total_training_steps=8"]  # an epoch
    rows = metrics_of_run([*train_overrides, *given, "reward.on_failure=mask"])
    assert sum(row.get("reward/timed_out", 0) for row in rows) == 2 and len(rows) == 8


@pytest.mark.nightly
def test_a_run_with_weights_in_flight_is_repeated_on_one_process(train_overrides, rule, tmp_path):
    common = [*train_overrides, rule, *STREAMED, ENDS, NO_VALIDATION, "trainer.max_staleness=2"]
    common += ["trainer.total_training_steps=6", "actor_rollout_ref.rollout.slice_tokens=2"]
    apart = ["trainer.n_gpus_per_node=3", "placement.actor=[0]", "placement.rollout=[1,2]"]
    metrics_of_run([*common, *apart, "trainer.backend=ray", "trainer.num_cpus=3", IN_FLIGHT])
    run = f"trainer.default_local_dir={tmp_path / 'again'}"
    metrics_of_run([*common, run, f"trainer.replay_order={tmp_path / 'run'}"])
    first, again = (
        list(read_jsonl(tmp_path / name / "samples.jsonl")) for name in ("run", "again")
    )
    for name in ("response_tokens", "response", "weight_versions"):
        assert [row[name] for row in again] == [row[name] for row in first], name
    assert any(len(row["weight_versions"]) > 1 for row in first), "weights came within responses"


IN_FLIGHT = "actor_rollout_ref.rollout.update=in_flight"
RESETS = "actor_rollout_ref.rollout.reset_caches=false"
REFUSED = {
    f"{IN_FLIGHT} placement.actor=[0,1] placement.rollout=[0,1]": "needs placement.rollout",
    f"{IN_FLIGHT} actor_rollout_ref.rollout.name=plain": "is not built for .*name=plain",
    "actor_rollout_ref.rollout.oversample=2.1": r"oversample=2\.1 is above .*staleness \+ 1 = 2",
    "actor_rollout_ref.rollout.oversample=0.5": r"oversample",
    "trainer.max_staleness=0 actor_rollout_ref.rollout.update=drain": r"drain needs .* above 0",
    f"{RESETS} trainer.max_staleness=0": "reset_caches=false needs trainer.max_staleness above 0",
    f"{RESETS} actor_rollout_ref.rollout.name=plain": "reset_caches=false is not built for",
    "placement.ref=[1]": r"max_staleness=1 needs ranks on which only the rollout runs, .* of ref",
    "trainer.replay_order=nowhere": r"replay_order=nowhere is no run folder with a stream\.jsonl",
    "trainer.snapshot_freq=1": r"snapshot_freq=1 keeps no prompts on .*staleness to 0",
    "actor_rollout_ref.rollout.weight_transport=collective": r"but trainer.max_staleness=1; set",
}


def test_a_run_whose_caches_are_kept_cannot_be_repeated(tmp_path):
    (tmp_path / "stream.jsonl").touch()
    given = [*STREAMED, *APART, RESETS, f"trainer.replay_order={tmp_path}"]
    given += ["actor_rollout_ref.rollout.n=2", "actor_rollout_ref.model.path=some"]
    with pytest.raises(ConfigError, match="reset_caches=false cannot be repeated"):
        check_train_settings(load_config(TrainConfig, [*given, "algorithm.adv_estimator=grpo"]))


@pytest.mark.parametrize(("setting", "message"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_streamed_is_refused(setting, message, monkeypatch):
    monkeypatch.setitem(ROLLOUTS, "plain", type("Plain", (Rollout,), {"continues": True}))
    apart = [*APART, "algorithm.use_kl_in_reward=true", "actor_rollout_ref.model.path=some"]
    given = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", *STREAMED, *apart]
    settings = [setting] if "{" in setting else setting.split()
    with pytest.raises(ConfigError, match=message):
        check_train_settings(load_config(TrainConfig, [*given, *settings]))

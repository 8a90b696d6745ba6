"""The memory plan of a run: its table, and the refusal of a run that does not fit."""

import re

import pytest
from run_cases import two_steps
from transformers import LlamaConfig

from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.engines import memory as engine_memory
from quadriga.errors import ConfigError
from quadriga.parallel.device import planned_device
from quadriga.rollout.memory import CONTEXT_BYTES
from quadriga.trainer.checks import memory
from quadriga.trainer.checks.memory import GIB, PROCESS_BYTES, RunMemory, train_plan
from quadriga.trainer.preflight import check_train_config

ENGINE = "actor_rollout_ref.actor.engine"
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.take_turns=true"
GPU = ("trainer.device=cuda", "trainer.device_memory_gb=32")
RANKS = ("trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]")
UPDATE, SYNC = "update of the actor", "weight sync"

NO_COPY = "trainer.async_save=false"


@pytest.fixture(autouse=True, scope="module")
def _engines_are_counted_once():
    """Most plans have engines of an earlier one, and to count one takes a third of a second."""
    counted, count = {}, engine_memory.fsdp_memory

    def found(*arguments):
        if (key := repr(arguments)) not in counted:
            counted[key] = count(*arguments)
        return counted[key]

    engine_memory.fsdp_memory = found
    yield
    engine_memory.fsdp_memory = count


@pytest.fixture
def settings(tiny_task, tmp_path):
    def make(*more) -> TrainConfig:
        check = "trainer.check_memory=true"
        return load_config(TrainConfig, [*two_steps(tiny_task, tmp_path), check, *more])

    return make


@pytest.fixture
def pools(settings):
    def make(*more, device="cpu"):
        return train_plan(settings(*more), device).pools

    return make


def size(held) -> int:
    return sum(held.values())


def refusal(config) -> str:
    with pytest.raises(ConfigError) as refused:
        RunMemory(config).check()
    return str(refused.value)


def limits(needed: int) -> tuple[str, str]:
    """Settings of a little more and a little less memory than is needed."""
    more, less = (f"trainer.device_memory_gb={needed / GIB + by}" for by in (1e-6, -1e-6))
    return more, less


@pytest.mark.parametrize("shared", [True, False])
def test_phases_add_what_the_roles_hold(pools, shared):
    share = f"{ROLLOUT}.share_weights={str(shared).lower()}"
    (pool,) = pools("algorithm.adv_estimator=gae", share)
    actor, critic, rollout = pool.engines["actor"], pool.engines["critic"], pool.generation
    held = PROCESS_BYTES["cpu"] + size(actor.held) + size(critic.held)
    copied = sum(size(e.held) - e.held["buffers of the model"] for e in (actor, critic))
    held += copied  # for checkpoints that are written beside the steps
    held += 0 if shared else rollout.held["weights"]
    assert pool.totals["generation"] == held + rollout.peak("generate")
    assert pool.totals[UPDATE] == held + actor.peak("backward", "step")
    assert pool.totals["values"] == held + critic.peak("evaluate")
    assert pool.phases[UPDATE]["actor activations"] == actor.adds["backward"]["activations"]
    assert pool.largest[1] == max(pool.totals.values())


def test_streams_keep_caches_and_a_second_copy_of_weights_in_flight(pools):
    def generation(*more, streamed=True):
        given = ("trainer.max_staleness=1", "data.val_files=[]") if streamed else ()
        return next(p.generation for p in pools(*given, *more) if p.generation is not None)

    rows = f"{ROLLOUT}.micro_batch_size="  # of 32 on their way
    few, all_at_once = generation(rows + "8"), generation(rows + "32")
    assert few.adds["generate"]["KV cache"] * 2 == all_at_once.adds["generate"]["KV cache"]
    apart = generation(*RANKS, rows + "8")
    assert few.adds["generate"]["KV cache"] == 2 * apart.adds["generate"]["KV cache"]
    held = generation(*RANKS, f"{ROLLOUT}.update=in_flight").held
    assert held["weights in flight"] == held["weights"]


def test_offload_and_turns_free_memory_of_accelerators_only(pools):
    offload = (f"{ENGINE}.param_offload=true", f"{ENGINE}.optimizer_offload=true")
    plain, offloaded, turns, without = (
        pools(*m, device="cuda")[0] for m in ((), offload, (TURNS,), (*offload, NO_COPY))
    )
    actor = plain.engines["actor"]
    states = size(actor.held) - actor.held["buffers of the model"]
    assert plain.totals["generation"] - offloaded.totals["generation"] == pytest.approx(
        states, abs=actor.held["buffers of the model"]
    )
    assert plain.totals["generation"] - turns.totals["generation"] == size(actor.held)
    # Offloaded moments are on the device during the step of the optimizer, after the gradients.
    saved = min(actor.held["optimizer states"], actor.peak("backward") - actor.peak("step"))
    assert plain.totals[UPDATE] - offloaded.totals[UPDATE] == saved > 0
    weights = plain.generation.held["weights"]
    assert plain.totals[UPDATE] - turns.totals[UPDATE] == weights
    own = f"{ROLLOUT}.share_weights=false"
    assert pools(*offload, own)[0].phases == pools(own)[0].phases
    # What leaves the device is in the memory of the host.
    assert without.host == CONTEXT_BYTES + size(actor.held)
    assert offloaded.host == turns.host == without.host + states  # a copy for checkpoints
    (unsaved,) = pools(NO_COPY, device="cuda")
    assert unsaved.host == CONTEXT_BYTES + weights  # while the rollout is loaded


def test_the_offload_policy_leaves_no_states_on_an_accelerator(pools):
    offload = f"{ENGINE}.offload_policy=true"
    (plain,), (hosted,) = (pools(NO_COPY, *more, device="cuda") for more in ([], [offload]))
    one, other = plain.engines["actor"], hosted.engines["actor"]
    shards = one.held["parameters"]
    assert other.held == {"buffers of the model": one.held["buffers of the model"]}
    assert other.host == 4 * shards and one.host == other.peak("step") == 0
    assert hosted.host == CONTEXT_BYTES + 4 * shards
    assert plain.totals["generation"] - hosted.totals["generation"] == 3 * shards
    assert pools(offload)[0].phases == pools()[0].phases  # on a CPU the host is the device


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        # With one optimizer step the update computes the old log-probabilities.
        (["ppo_mini_batch_size=8"], "value"),
        (["ppo_mini_batch_size=8", "old_log_probs_from_update=false"], "unused"),
        (["ppo_mini_batch_size=8", "entropy_coeff=0.01"], "gradient"),
        ([], "unused"),
    ],
)
def test_the_plan_knows_what_the_update_needs_of_the_entropies(more, expected, settings):
    config = settings(*(f"actor_rollout_ref.actor.{setting}" for setting in more))
    assert memory.update_rows(config, "actor").entropy == expected


def test_the_ranks_of_each_node_are_added(settings, pools):
    """States are sharded over the ranks of a role. Pools on different nodes share no memory."""
    (one,) = pools()
    four = ("trainer.n_gpus_per_node=4", "placement.actor=[0,1]", "placement.rollout=[2,3]")
    plan = train_plan(settings(*four), "cpu")
    actor, rollout = plan.pools
    assert actor.generation is None and not rollout.engines
    states = (pool.engines["actor"].held["optimizer states"] for pool in (actor, one))
    assert next(states) == pytest.approx(next(states) / 2, rel=0.02)
    assert plan.needed == 2 * actor.largest[1] + 2 * rollout.largest[1]
    nodes = ("trainer.nnodes=2", "trainer.n_gpus_per_node=2", "trainer.backend=ray")
    apart = train_plan(settings(*nodes, *four[1:]), "cpu")
    assert apart.needed == max(2 * pool.largest[1] for pool in apart.pools)
    uneven = ("placement.actor=[0,1,2]", "placement.rollout=[3]", "data.train_batch_size=12",
              "actor_rollout_ref.actor.ppo_mini_batch_size=12")  # fmt: skip
    plan = train_plan(settings(*nodes, *uneven), "cpu")
    actor, rollout = (pool.largest[1] for pool in plan.pools)
    assert plan.needed == max(2 * actor, actor + rollout)


def test_a_weight_sync_holds_buffers(pools):
    """Buckets are not larger than the model."""
    (alone,) = pools("trainer.backend=ray")
    engine = alone.engines["actor"]
    bucket, weight = 4 * sum(engine.weights.values()), 8 * engine.largest_weight
    assert alone.phases[SYNC]["weights in flight"] == weight
    (both,) = pools("trainer.backend=ray", "trainer.n_gpus_per_node=2")
    assert both.phases[SYNC]["weights in flight"] == weight + 2 * bucket
    actor, _ = pools(*RANKS)
    assert actor.phases[SYNC]["weights in flight"] == weight + 3 * bucket


@pytest.mark.parametrize(("shards", "copies"), [(1, 0), (-1, 1)])
def test_ranks_with_whole_weights_share_them_with_the_rollout(pools, shards, copies):
    ranks = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", f"{ENGINE}.fsdp_size={shards}")
    (pool,) = pools(*ranks)
    own = pool.phases["generation"].get("rollout weights", 0)
    assert own == copies * pool.generation.held["weights"]


def test_a_training_run_plans_its_validation(pools):
    def peak(*more):
        return pools("data.max_prompt_length=2", *more)[0].generation.peak("generate")

    more, batch = f"{ROLLOUT}.val_n=8", "data.val_batch_size=24"
    assert peak(more, batch) > peak(batch)
    assert peak(more, batch, "data.val_files=[]") == peak("data.val_files=[]")


# The refusal, and what to change.


def test_a_run_that_does_not_fit_is_refused_before_it_starts(settings, tmp_path):
    few = f"{ROLLOUT}.micro_batch_size=1"
    small = settings("trainer.device_memory_gb=0.51", few)
    with pytest.raises(ConfigError) as refused:
        check_train_config(small)
    text = str(refused.value)
    sums = r"the run needs .* GiB on a node: ranks × GiB = 1 × .* \(actor, rollout: update of the "
    assert re.match(sums, text), text
    assert "= 0.5 (processes) + " in text
    assert "the 0.51 GiB there are (trainer.device_memory_gb)" in text
    assert "set actor_rollout_ref.model.gradient_checkpointing=true (" in text
    assert "max_tokens_per_micro_batch=16384 (" in text
    assert "offload_policy" not in text and not (tmp_path / "run").exists()
    RunMemory(settings("trainer.device_memory_gb=0.51", "trainer.check_memory=false")).check()
    RunMemory(settings("trainer.device_memory_gb=16")).check()


def test_a_rank_that_needs_more_than_its_device_has_is_refused(settings):
    """The controller needs no device for the check: the settings say what the ranks have."""
    device = ("trainer.device=cuda", "trainer.backend=ray", "trainer.n_gpus_per_node=2")
    phase, needed = train_plan(settings(*device), "cuda").pools[0].largest
    enough, less = limits(needed)
    RunMemory(settings(*device, enough)).check()
    text = refusal(settings(*device, less))
    found = re.search(
        rf"the run needs (\S*) GiB on a device: .* \(actor, rollout: {phase} = .*; "
        "this is 1e-06 GiB more than",
        text,
    )
    assert found and float(found[1]) == pytest.approx(needed / GIB, rel=0.01), text
    assert text.count(" (acts on ") == 3, text  # changes, with the bytes on which they act


def test_changes_that_do_nothing_are_not_proposed(pools):
    def remedies(*more, device="cuda", pool=0):
        return "; ".join(pools(*RANKS, *more, device=device)[pool].remedies())

    checkpointed = "actor_rollout_ref.model.gradient_checkpointing=true"
    lower = f"lower {ENGINE}.max_tokens_per_micro_batch=16384"
    offload = f"set {ENGINE}.offload_policy=true"
    assert "gradient_checkpointing" in remedies() and "checkpointing" not in remedies(checkpointed)
    # No offload or turns where the host is the device.
    found = remedies(device="cpu")
    assert lower in found and "offload" not in found and "take_turns" not in found
    # Adapters that are off are the reference, which has the settings of the actor.
    found = remedies(
        "actor_rollout_ref.model.lora.rank=2", "actor_rollout_ref.actor.use_kl_loss=true"
    )
    assert lower in found and offload in found
    assert offload not in remedies(f"{ENGINE}.offload_policy=true")
    by_rows = f"{ENGINE}.use_dynamic_bsz=false"
    assert f"set {by_rows.replace('false', 'true')} and {lower}" in remedies(by_rows)
    assert "lower" not in remedies(
        by_rows, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    )
    rows = f"{ROLLOUT}.micro_batch_size"
    assert remedies(f"{rows}=2", pool=1) == f"lower {rows}=2" and not remedies(f"{rows}=1", pool=1)


def write_llama(folder, hidden: int) -> str:
    LlamaConfig(
        vocab_size=96, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1,
        num_attention_heads=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def test_remedies_are_those_of_the_pool_that_needs_most(settings, tmp_path):
    """States of a large critic on ranks of its own: only its settings lower them."""
    path = write_llama(tmp_path / "critic", 512)
    config = settings(
        "trainer.device=cuda", "trainer.n_gpus_per_node=4", "placement.actor=[0,1]",
        "placement.rollout=[0,1]", "placement.critic=[2,3]", "algorithm.adv_estimator=gae",
        f"critic.model.path={path}", "trainer.device_memory_gb=1.001",
        "critic.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.micro_batch_size=1",
    )  # fmt: skip
    text = refusal(config)
    assert "ranks × GiB = 1 × 1.04 (critic: " in text
    assert "set critic.engine.offload_policy=true (" in text
    assert "actor_rollout_ref" not in text


def test_a_host_that_is_too_small_is_refused(settings, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 2**29)
    config = settings(*GPU, f"{ENGINE}.optimizer_offload=true")
    text = refusal(config)
    assert "the ranks of a node need 1 GiB of host memory" in text
    assert "but 0.5 GiB are available on this machine" in text and "keep states on" in text
    assert "host memory of a node: 1 GiB" in RunMemory(config).text()
    nodes = settings(*GPU, "trainer.nnodes=2", "trainer.backend=ray")
    RunMemory(nodes).check()  # the memory of other machines is not known


def test_the_command_shows_the_table(tiny_task, tmp_path, capsys):
    assert main(["plan", *two_steps(tiny_task, tmp_path)]) == 0
    out = capsys.readouterr().out
    for row in ("actor parameters", "actor optimizer states", "processes",
                "actor activations", "rollout KV cache", UPDATE, "the run fits"):  # fmt: skip
        assert row in out


def test_the_table_names_what_is_not_counted(settings, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("the code of this model reads numbers")

    monkeypatch.setattr("quadriga.engines.memory.pass_memory", fail)
    text = RunMemory(settings("data.max_response_length=14")).text()
    assert "not counted: activations of the actor (RuntimeError: the code of this model" in text


# The memory of the machine.


def test_a_cluster_elsewhere_has_devices_of_its_own(monkeypatch):
    assert planned_device(load_config(TrainConfig, ["trainer.device=cuda"]).trainer) == "cuda"
    monkeypatch.setattr("quadriga.parallel.device.get_device_name", lambda: "cpu")
    auto = load_config(TrainConfig, []).trainer
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert planned_device(auto) == "cpu"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert planned_device(auto) is None
    assert planned_device(load_config(TrainConfig, ["trainer.backend=local"]).trainer) == "cpu"


# vLLM and SGLang, which reserve memory.


def engine(name, *options) -> list[str]:
    return [f"{ROLLOUT}.name={name}", *(f"+{ROLLOUT}.options.{option}" for option in options)]


def test_vllm_holds_its_share_of_the_device_in_every_phase(pools):
    """Half of 32 GiB: the context of the process, the weights, and keys and values in the rest."""
    (pool,) = pools(*GPU, *engine("vllm"), device="cuda")
    assert size(pool.generation.held) == 16 * GIB - CONTEXT_BYTES
    held = size(pool.engines["actor"].held) + 16 * GIB
    assert pool.totals["generation"] == held
    assert pool.totals[UPDATE] == held + pool.engines["actor"].peak("backward", "step")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_taking_turns_releases_the_reservation_while_the_actor_trains(name, pools):
    (plain,) = pools(*GPU, *engine(name), device="cuda")
    (turns,) = pools(*GPU, *engine(name), TURNS, device="cuda")
    actor = plain.engines["actor"].held
    context = CONTEXT_BYTES if name == "vllm" else 0  # which the process keeps
    assert plain.totals[UPDATE] - turns.totals[UPDATE] == 16 * GIB - context
    assert plain.totals["generation"] - turns.totals["generation"] == size(actor)
    # Before the first sync nothing was released, and there are no moments.
    difference = plain.totals[SYNC] - turns.totals[SYNC]
    assert difference == actor["optimizer states"]
    assert turns.host >= CONTEXT_BYTES + size(actor)
    dropped = pools(*GPU, *engine("vllm", "sleep_level=2"), TURNS, device="cuda")
    assert dropped[0].generation.host == 0 < turns.generation.host


def test_the_options_of_vllm_are_in_the_plan(settings):
    def reserved(*options, more=GPU, device="cuda"):
        plan = train_plan(settings(*more, *engine("vllm", *options)), device)
        return plan.pools[0].generation.held, plan.missing

    share, missing = reserved("gpu_memory_utilization=0.25")
    assert size(share) == 8 * GIB - CONTEXT_BYTES and missing == ()
    cache, missing = reserved("kv_cache_mb=2048")
    assert cache["KV cache"] == 2 * GIB and missing == ("activations and CUDA graphs of vllm",)
    half, _ = reserved("tensor_parallel_size=2", more=(*GPU, "trainer.n_gpus_per_node=2"))
    assert half["weights"] == share["weights"] // 2
    on_cpu, missing = reserved(device="cpu")
    assert on_cpu["KV cache"] == GIB and missing == ("activations of vllm",)
    unknown, missing = reserved(more=["trainer.device=cuda"])
    assert unknown["KV cache"] == 0 and missing == ("keys and values of vllm",)


def test_the_options_of_sglang_are_in_the_plan(settings):
    def reserved(*options, device="cuda"):
        plan = train_plan(settings(*GPU, *engine("sglang", *options)), device)
        return plan.pools[0], plan.missing

    half, missing = reserved()
    assert size(half.generation.held) == 16 * GIB
    assert missing == ("activations and CUDA graphs of sglang",)
    # Its scheduler is a process of its own that uses the device.
    held = 2 * CONTEXT_BYTES + size(half.engines["actor"].held) + 16 * GIB
    assert half.totals["generation"] == held
    server, missing = reserved("url=http://127.0.0.1:30000")
    assert not server.generation.held and missing == ("the SGLang at http://127.0.0.1:30000",)
    two, _ = reserved("tensor_parallel=2")
    assert two.generation.held["weights"] == half.generation.held["weights"] // 2
    on_cpu, missing = reserved(device="cpu")
    assert missing == ("keys and values of sglang",)
    assert on_cpu.totals["generation"] > 4 * PROCESS_BYTES["cpu"]


def test_a_rollout_with_devices_of_its_own_has_a_table_of_its_own(pools):
    actor, rollout = pools(*GPU, *engine("vllm"), *RANKS, device="cuda")
    assert actor.largest[1] < 2 * GIB and rollout.totals == {"generation": 16 * GIB}
    _, rollout = pools(*GPU, *engine("sglang"), *RANKS, device="cuda")
    # Its rank only sends requests; the scheduler is the process that uses the device.
    assert rollout.totals == {"generation": CONTEXT_BYTES + 16 * GIB}


def test_a_reservation_that_does_not_fit_is_refused_with_its_setting(settings):
    text = refusal(settings(*GPU, *engine("vllm", "gpu_memory_utilization=1.0")))
    assert f"lower {ROLLOUT}.options.gpu_memory_utilization=1 (" in text
    assert "take_turns=true" in text and "micro_batch_size=256" not in text
    RunMemory(settings(*GPU, *engine("vllm"))).check()


def test_a_plan_that_leaves_something_out_does_not_say_that_the_run_fits(settings):
    assert "the run fits" in RunMemory(settings(*GPU, *engine("vllm"))).text()
    config = settings(*GPU, *engine("sglang"))
    text, left = RunMemory(config).text(), 32 * GIB - train_plan(config, "cuda").needed
    assert "not counted: activations and CUDA graphs of sglang" in text
    assert f"what is counted fits; {left / GIB:.3g} GiB are left for what is not" in text

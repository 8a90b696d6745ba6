"""Commands with images: a run of two steps, evaluation, generation, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import vision_cases as cases

from quadriga.cli.main import main
from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import ModelConfig, TrainConfig
from quadriga.data import PromptDataset, encoded
from quadriga.models import load_tokenizer
from quadriga.observability.jsonl import read_jsonl, read_samples
from quadriga.rollout.sglang.options import SGLang
from quadriga.rollout.vllm.options import VLLM
from quadriga.trainer.checks.memory import train_plan
from quadriga.trainer.evaluation import run_generation
from quadriga.trainer.ingredients import image_rules
from quadriga.trainer.main import run_training

RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 5)
"""


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    """Twelve rows as JSON lines, of which every third has no image, and a reward file."""
    work = tmp_path_factory.mktemp("files")
    for colour in ("red", "blue"):
        (work / f"{colour}.png").write_bytes(cases.png(colour))
    images = (["red.png"], [], ["blue.png"])
    prompts = [cases.QUESTION if image else "which colour?" for image in images]
    rows = [{"prompt": p, "images": i} for p, i in zip(prompts, images, strict=True)] * 4
    (work / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (work / "rule.py").write_text(RULE)
    return work


@pytest.fixture
def overrides(folder, files, tmp_path):
    return [
        f"actor_rollout_ref.model.path={folder}", f"data.train_files=[{files / 'rows.jsonl'}]",
        f"data.val_files=[{files / 'rows.jsonl'}]", f"reward.path={files / 'rule.py'}",
        "data.train_batch_size=6", "data.max_prompt_length=32", "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "actor_rollout_ref.actor.use_kl_loss=true", "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=2", "trainer.backend=local", "trainer.threads_per_worker=1",
        f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.loggers=[jsonl]",
    ]  # fmt: skip


def test_a_run_trains_on_rows_with_and_without_images(overrides, tmp_path):
    more = ["actor_rollout_ref.actor.old_log_probs_from_update=false"]
    config = load_config(TrainConfig, [*overrides, *more])
    run_training(config)
    steps = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps[1:]:
        assert step["mismatch/max"] < 1e-4
        assert step["actor/grad_norm"] > 0
    # The exported model generates from an image file.
    generate = [
        f"model.path={tmp_path / 'run' / 'model'}", "prompt=which colour has it?",
        "max_response_length=3", "trainer.threads_per_worker=1",
    ]  # fmt: skip
    picture = tmp_path / "a.png"
    picture.write_bytes(cases.png("red"))
    answers = run_generation(load_config(GenerateConfig, [*generate, f"images=[{picture}]"]))
    assert answers[0].prompt[0]["content"] == "<image>which colour has it?"
    assert len(answers[0].responses) == 1
    assert "image encoder" in train_plan(config, "cpu").missing[0]


def test_images_of_prompts_on_their_way_are_in_the_checkpoint(overrides, tmp_path):
    more = [
        "trainer.max_staleness=1", "actor_rollout_ref.rollout.slice_tokens=1", "data.val_files=[]",
        "trainer.save_freq=1", "trainer.total_training_steps=3", "trainer.max_ckpt_to_keep=null",
    ]  # fmt: skip
    run_training(load_config(TrainConfig, [*overrides, *more]))
    middle, again = tmp_path / "run/checkpoints/global_step_1", tmp_path / "again"
    assert (middle / "stream/images.safetensors").exists()
    more += [f"trainer.resume_mode={middle}", f"trainer.default_local_dir={again}"]
    run_training(load_config(TrainConfig, [*overrides, *more]))
    whole, rest = (list(read_samples(f / "samples.jsonl")) for f in (tmp_path / "run", again))
    assert rest == [sample for sample in whole if sample.step > 1]


def test_token_ids_that_are_kept_follow_the_size_of_an_image(folder, files, tmp_path, monkeypatch):
    monkeypatch.setattr(encoded, "LARGE_FILE", 0)
    copied = shutil.copytree(files, tmp_path / "copied")
    tokenizer = load_tokenizer(str(folder))

    def longest():
        rules = image_rules(ModelConfig(path=str(folder)), "images")
        cache = tmp_path / "cache"
        kept = PromptDataset([copied / "rows.jsonl"], tokenizer, images=rules, cache_dir=cache)
        return kept.longest, len(list(cache.iterdir()))

    first, count = longest()
    assert longest() == (first, count == 1)
    (copied / "red.png").write_bytes(cases.png("red", (64, 64)))
    larger, count = longest()
    assert larger > first and count == 2


SCORER = "reward_model.enable=true"
REFUSED = {
    "vllm": (["actor_rollout_ref.rollout.name=vllm"], "vllm"),
    "sglang": (["actor_rollout_ref.rollout.name=sglang"], "sglang"),
    "a critic": (
        ["algorithm.adv_estimator=gae"],
        "adv_estimator=gae has a critic, which computes text only",
    ),
    "a reward model": (
        [SCORER, "reward_model.model.path=x"],
        "reward_model.enable=true computes text only",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_role_that_cannot_compute_images_is_refused_before_the_start(
    overrides, case, tmp_path, capsys, monkeypatch
):
    for engine in (VLLM, SGLang):
        monkeypatch.setattr(engine, "check", lambda *of_installed: None)
    more, message = REFUSED[case]
    assert main(["train", *overrides, *more]) == 2
    found = capsys.readouterr().err.strip()
    assert f"takes images, and the rollout engine {message!r}" in found or message in found
    assert "\n" not in found and not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_model_learns_to_name_the_colour_of_a_square(tmp_path, monkeypatch):
    """The commands of examples/recipes/train_images.yaml: from a quarter to most of the answers."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    cases.squares.write_task(Path("squares"))
    assert main([
        "sft", "model.path=squares/base", "data.train_files=[squares/sft.parquet]",
        "data.train_batch_size=32", "optim.lr=2e-3", "trainer.total_training_steps=30",
        "trainer.backend=local", "trainer.default_local_dir=squares/sft",
    ]) == 0  # fmt: skip
    recipe = root / "examples" / "recipes" / "train_images.yaml"
    assert main([
        "train", "--config", str(recipe), "actor_rollout_ref.model.path=squares/sft/model",
        "data.train_files=[squares/train.parquet]", "data.val_files=[squares/test.parquet]",
        f"reward.path={root / 'examples' / 'trainer' / 'squares.py'}",
    ]) == 0  # fmt: skip
    steps = read_jsonl(tmp_path / "runs" / "images" / "metrics.jsonl")
    curve = [step["val/accuracy"] for step in steps if "val/accuracy" in step]
    assert curve[0] < 0.5 and curve[-1] > 0.8

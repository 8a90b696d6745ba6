"""The output of the commands."""

from types import SimpleNamespace

from quadriga.cli.main import main
from quadriga.cli.show import show_responses, version_of


def answer(prompt, *responses):
    return SimpleNamespace(prompt=prompt, responses=list(responses))


def test_plan_shows_the_arithmetic(capsys):
    assert main(["plan", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]) == 0
    out = capsys.readouterr().out
    assert "prompts × 8 responses" in out and "critic" not in out
    assert main(["plan", "trainer.n_gpus_per_node=3"]) == 2
    assert "= 64 × 1 = 64 sequences do not divide over 3 ranks" in capsys.readouterr().err


def test_algorithms_lists_the_registries(capsys):
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    names = [f"\n  {name} " for name in ("gae", "grpo", "ppo_clip", "token-mean", "k3")]
    assert all(text in out for text in (*names, "arXiv 2402.03300", "needs prompt groups"))


def test_doctor_shows_packages_and_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    engines = "rollout.name=vllm", "rollout.name=sglang"
    assert all(text in out for text in ("torch", "Python 3.", "CPUs", *engines))


def test_version_of_installed_and_missing_packages():
    assert version_of("numpy")
    assert version_of("no_such_package_at_all") is None


def test_one_response_is_printed_as_it_is_and_several_below_their_prompts(capsys):
    chats = [[{"role": "user", "content": text}] for text in ("a?", "b?")]
    show_responses([answer(chats[0], "4")])
    assert capsys.readouterr().out == "4\n"
    show_responses([answer(chats[0], "1", "2"), answer(chats[1], "3")])
    assert capsys.readouterr().out == "> a?\n1\n2\n\n> b?\n3\n\n"


def test_data_make_names_invalid_settings(capsys, tmp_path):
    assert main(["data", "make", f"output={tmp_path}", "min_steps=3", "max_steps=2"]) == 2
    assert "min_steps=3" in capsys.readouterr().err
    assert main(["data", "make", f"output={tmp_path}", "train_size=0"]) == 2
    limits = "at least 1 and at most 5000000"
    assert capsys.readouterr().err == f"error: train_size must be {limits}, got 0\n"

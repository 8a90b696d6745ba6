"""`SGLangRollout` over a program that answers as SGLang does, with faults that it injects.

tests/real_engines runs the same engine over SGLang itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from fake_sglang import Fake, http_server
from sglang_cases import (
    NORM,
    ROWS,
    SAMPLING,
    batch,
    engine,
    faulty,
    generate,
    interpreter,
    noise,
    start,
)

from processes import children, gone
from quadriga.config.schema import ModelConfig
from quadriga.errors import (
    ModelError,
    RolloutAbilityError,
    RolloutDiedError,
    RolloutError,
    RolloutInputError,
    RolloutOutputError,
)
from quadriga.rollout import build_rollout
from quadriga.rollout.base import tensor_digest

__all__ = ["engine", "faulty", "interpreter", "start"]


def test_requests_weights_and_memory(start):
    before = children()
    engine = start()
    out = generate(engine)
    expected = [[6] * 3, [7] * 3, [10] * 3, [2, 0, 0], [12] * 3]
    assert out.response_ids.tolist() == expected
    assert out.response_mask.tolist()[3] == [1, 0, 0]
    assert out.finish_reason == ("length", "length", "length", "stop", "length")
    assert out.weight_versions.tolist() == [-1] * 5
    new = noise(engine)
    engine.update_weights(new.items(), 4)
    assert engine.version == 4
    shift = float(new[NORM].mean())
    assert generate(engine).rollout_log_probs[0].tolist() == pytest.approx(
        [-1 + shift, -2 + shift, -3 + shift]
    )
    scores = engine.score(*ROWS)
    assert scores[2].tolist() == pytest.approx([0, 0, -0.5 + shift, -0.5 + shift])
    assert engine.weights_digest() == {name: tensor_digest(w) for name, w in new.items()}
    assert set(engine.weight_dtypes().values()) == {torch.float32}
    engine.release()
    with pytest.raises(RolloutError, match="call resume"):
        generate(engine)
    engine.resume()
    engine.pause_generation()
    engine.continue_generation()
    engine.abort()
    folder = engine._client._transport.folder
    engine.close()
    assert not folder.exists()
    assert gone(children() - before)


@pytest.mark.parametrize(
    ("faults", "fault"),
    [
        ({"version": "3"}, "weight version"),
        ({"missing row": True}, "rows"),
        ({"info": {"output_token_logprobs": [[-1.0, 5, None]]}}, "log-probabilities"),
        ({"info": {"finish_reason": {"type": "stop", "matched": 9}}}, "finish reason"),
    ],
)
def test_wrong_answers_are_refused(engine, faulty, faults, fault):
    faulty(faults)
    engine.update_weights([(NORM, torch.ones(32))], 4)
    with pytest.raises(RolloutOutputError) as caught:
        generate(engine)
    assert caught.value.fault == fault


def test_bad_input_never_reaches_sglang(engine):
    engine.update_weights([], 4)
    vocabulary = engine.abilities.vocabulary
    with pytest.raises(RolloutInputError, match="outside the vocabulary"):
        generate(engine, rows=batch((5, vocabulary)))
    with pytest.raises(RolloutInputError, match="outside the vocabulary"):
        engine.score(*batch((5, -1)))
    with pytest.raises(RolloutAbilityError, match="min_new_tokens"):
        generate(engine, replace(SAMPLING, min_new_tokens=2))
    with pytest.raises(RolloutAbilityError, match="log-probabilities"):
        generate(engine, replace(SAMPLING, top_k=5, log_probs="sampled"))
    for name, weight in (("no.such", torch.ones(3)), (NORM, torch.ones(3))):
        with pytest.raises(ModelError, match=name):
            engine.update_weights([(name, weight)], 5)
    assert generate(engine).weight_versions.tolist() == [4] * 5
    with pytest.raises(ModelError, match="twice"):
        engine.update_weights([(NORM, torch.ones(32))] * 2, 5)
    engine.update_weights(noise(engine).items(), 5)


def test_a_failed_update_must_be_repeated(engine, faulty):
    faulty({"refuse weight": "lm_head.weight"})
    with pytest.raises(RolloutError, match="no space"):
        engine.update_weights(noise(engine).items(), 1)
    with pytest.raises(RolloutError, match="an update of its weights broke off"):
        generate(engine)
    faulty({})
    rest = [(name, w) for name, w in noise(engine).items() if name != "lm_head.weight"]
    engine.update_weights(rest, 2)
    with pytest.raises(RolloutError, match=r"'lm_head\.weight' was not sent since"):
        generate(engine)
    engine.update_weights([("lm_head.weight", noise(engine)["lm_head.weight"])], 2)
    assert generate(engine).weight_versions.tolist() == [2] * 5


def test_a_server_that_runs_already(model_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(Path(model_folder) / "model.safetensors")
    args = {"weight_version": "6", "lives": str(tmp_path / "lives"), "model_path": str(folder)}
    fake = Fake(args)
    with http_server(fake, "right") as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        build = partial(
            build_rollout, "sglang", ModelConfig(path=model_folder), url=url, request_rows=2
        )
        with pytest.raises(RolloutError, match="right key"):
            build(api_key="wrong")
        engine = build(api_key="right")
        ends = engine._own_ends
        assert engine.version == 6
        assert ends and not engine.abilities.exposes_weights
        sampling = replace(SAMPLING, eos_token_ids=tuple(ends))
        assert generate(engine, sampling).weight_versions.tolist() == [6] * 5
        engine.update_weights([(NORM, torch.zeros(32))], 7)
        assert generate(engine, sampling).weight_versions.tolist() == [7] * 5
        assert engine.received_digests() == {NORM: tensor_digest(torch.zeros(32))}
        with pytest.raises(RolloutAbilityError, match="ends responses with them too"):
            generate(engine, replace(sampling, eos_token_ids=(150,)))
        generate(engine, replace(sampling, eos_token_ids=()))
        fake.version = "8"
        with pytest.raises(RolloutOutputError, match="does another program update"):
            generate(engine, sampling)
        engine.close()
        server.shutdown()
        thread.join()
    with pytest.raises(RolloutDiedError, match="cannot be reached"):
        build(api_key="right")

"""A rollout engine with declared limits and injected faults, for the code around an engine.

Without a fault it is the engine `hf` in float32.
"""

import random
import threading
from dataclasses import replace
from typing import Literal

import torch

from quadriga.config.schema import ModelConfig, RolloutEngineConfig
from quadriga.rollout import Rollout
from quadriga.rollout.base import RolloutOutput
from quadriga.rollout.hf.engine import HFRollout

Fault = Literal["dies", "fails", "wedges", "wrong version", "missing row"]
"""`dies`: the connection is reset. `fails`: the engine's library raises. `wedges`: the call does
not return before `close`. The others change the last row of an output."""


class FakeRollout(HFRollout):
    """`abilities`: what it declares; None: everything. `after`: right calls before the fault."""

    name = "fake"
    version = -1

    def __init__(self, folder, *, abilities=None, fault=None, after=0):
        rollout = Rollout(RolloutEngineConfig(dtype="float32"))
        super().__init__(rollout, ModelConfig(path=str(folder)), "cpu")
        self.abilities = abilities or self.abilities
        self._fault, self._after = fault, after
        self._calls = 0
        self._closed = threading.Event()

    def generate(self, prompt_ids, attention_mask, sampling, sample_seeds):
        self._calls += 1
        faulty = self._calls > self._after
        if faulty:
            self._fail_before_the_answer()
        if not self.abilities.seeded:
            sample_seeds = torch.tensor([random.getrandbits(60) for _ in sample_seeds]).long()
        out = super().generate(prompt_ids, attention_mask, sampling, sample_seeds)
        out = replace(out, weight_versions=torch.full_like(out.weight_versions, self.version))
        return self._faulty(out) if faulty and len(out.response_ids) else out

    def update_weights(self, stream, version):
        super().update_weights(stream, version)
        self.version = version

    def weights_digest(self):
        if not self.abilities.exposes_weights:
            raise self._unable("show its weights", "exposes_weights")
        return super().weights_digest()

    def weight_dtypes(self):
        self._check("weight_dtypes", "ready", "released")
        return {name: tensor.dtype for name, tensor in self.weights()}

    def close(self):
        super().close()
        self._closed.set()

    def _fail_before_the_answer(self):
        if self._fault == "dies":
            raise ConnectionResetError("the engine's process has ended")
        if self._fault == "fails":
            raise ArithmeticError("an error of the engine's library")
        if self._fault == "wedges":
            self._closed.wait()

    def _faulty(self, out: RolloutOutput) -> RolloutOutput:
        if self._fault == "missing row":
            names = ("response_ids", "response_mask", "rollout_log_probs", "finish_reason")
            return replace(out, **{name: getattr(out, name)[:-1] for name in names})
        if self._fault == "wrong version":
            out.weight_versions[-1] += 1
        return out


def full_abilities(vocabulary):
    """Return the declaration of an engine that can do everything, with a window of 128 tokens."""
    return Rollout(RolloutEngineConfig()).abilities(vocabulary, 128)

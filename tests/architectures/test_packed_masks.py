"""The masks of every packed architecture have a form that each attention kernel knows."""

from __future__ import annotations

import pytest
import torch
from small_models import VARIANTS, small_model
from test_architectures import case_name

from quadriga.engines.token_model import TokenModel
from quadriga.models.architectures import PACKED

CASES = [(name, {}) for name in PACKED] + [case for case in VARIANTS if case[0] in PACKED]


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=case_name)
def test_masks_are_causal_windows_or_chunks(model_type, changes):
    model = TokenModel(small_model(model_type, changes), "lm", torch.device("cpu"))
    calls = model._attention_calls()
    assert calls and {call.mask for call in calls} <= {"causal", "window", "chunk"}

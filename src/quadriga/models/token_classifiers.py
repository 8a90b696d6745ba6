"""A scalar head on each token of a causal backbone, for any architecture.

Transformers makes the token classifiers of most causal models from one generic class: a backbone,
and a linear layer `score`. Many causal models, such as Gemma 3 of text, Olmo 2 and Granite, have no
token classifier, and older ones, such as GPT-2, have a head of another name. For these, a class is
made here in the same way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_outputs import TokenClassifierOutput

from quadriga.errors import ModelError

_REFUSED = {
    "falcon_h1": "transformers fills constants of its layers only in its causal language model",
}
"""Architecture -> why it cannot have a head."""


class CausalTokenClassifier(GenericForTokenClassification):
    """A backbone and the linear layer `score`, whose outputs are the logits."""

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, *, dtype: torch.dtype | None = None, **_: object
    ) -> PreTrainedModel:
        """Return the model with random weights, as the auto classes do."""
        kind: Any = cls  # a class that `_made` returns also derives from `PreTrainedModel`
        model: PreTrainedModel = kind._from_config(config, dtype=dtype)
        return model

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> TokenClassifierOutput:
        """Compute `logits` [B, T, labels]. `inputs`: further inputs of the backbone."""
        backbone = getattr(self, self.base_model_prefix)
        hidden = backbone(input_ids, **inputs).last_hidden_state
        return TokenClassifierOutput(logits=self.score(self.dropout(hidden)))


def token_classifier(config: PretrainedConfig) -> type[Any]:
    """Return the class that loads a token classifier: an auto class, or one that is made here.

    Raises:
        ModelError: the architecture cannot have one.
    """
    if config.model_type in _REFUSED:
        raise ModelError(
            f"a model of type {config.model_type!r} cannot have a head for values or scores: "
            f"{_REFUSED[config.model_type]}; choose another model, or an advantage estimator "
            "without a critic, such as grpo",
            path=str(config.name_or_path),
        )
    kind: Any = type(config)
    own: Any = AutoModelForTokenClassification._model_mapping
    if kind in own and issubclass(own[kind], GenericForTokenClassification):
        return AutoModelForTokenClassification
    if kind not in AutoModelForCausalLM._model_mapping:  # of the code of its folder, or no model
        return AutoModelForTokenClassification
    return _made(kind)


@cache
def _made(kind: Any) -> type[Any]:
    """Return the token classifier of a class of configs."""
    language_model: Any = AutoModelForCausalLM._model_mapping[kind]
    base = next(cls for cls in language_model.__mro__ if PreTrainedModel in cls.__bases__)
    name = language_model.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return type(
        f"{name}ForTokenClassification",
        (CausalTokenClassifier, base),
        {
            "config_class": kind,
            "base_model_prefix": language_model.base_model_prefix,
            "__module__": __name__,
        },
    )

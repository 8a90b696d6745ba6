"""A reward model: a causal backbone with one number for a sequence, and its folder.

Transformers computes the score of a sequence classifier from the last token that is not padding
(`pad_token_id` of its config). Sequence classifiers have a linear layer `score` without a bias, and
token classifiers one with a bias. Here a reward model is a token classifier without the bias: the
score of a sequence is its output at that token, and its weights have the names of a sequence
classifier.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from quadriga.errors import ModelError
from quadriga.models.loading import VALUE_HEAD, load_tokenizer, read_config
from quadriga.models.weights import stored_tensors


def without_bias(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the bias of the head of a token classifier, in place."""
    head = model.get_submodule(VALUE_HEAD)
    assert isinstance(head, nn.Linear)
    head.register_parameter("bias", None)
    return model


def classifier_name(config: PretrainedConfig) -> str:
    """Return the class of transformers that an export of a reward model is loaded with.

    Raises:
        ModelError: this architecture has none.
    """
    mapping = AutoModelForSequenceClassification._model_mapping
    if type(config) not in mapping:
        raise ModelError(
            f"transformers has no sequence classifier for models of type {config.model_type}, so a "
            "reward model of this kind could not be exported; choose another base model",
            path=str(config.name_or_path),
        )
    return str(getattr(mapping[type(config)], "__name__", ""))


def check_reward_model(path: str | Path, *, trust_remote_code: bool = False) -> None:
    """Check that a folder holds a reward model: a sequence classifier with one label.

    Reads config.json and the headers of the weights.

    Raises:
        ModelError: it has no head, or one of another size.
    """
    folder = Path(path)
    tensors = stored_tensors(folder)
    heads = {name: t.shape for name, t in tensors.items() if name.endswith(f"{VALUE_HEAD}.weight")}
    if not heads:
        others = [name for name, t in tensors.items() if 1 in t.shape and len(t.shape) == 2]
        hint = f" ({min(others)!r} is not read)" if others else ""
        raise ModelError(
            f"the model in {folder} has no head: a reward model is a sequence classifier with a "
            f"weight {VALUE_HEAD!r} of shape [1, hidden size]{hint}; train one with `quadriga rm`",
            path=str(folder),
        )
    for name, shape in heads.items():
        if len(shape) != 2 or shape[0] != 1:
            raise ModelError(
                f"the model in {folder} has {shape[0] if shape else 0} labels: {name} is "
                f"{list(shape)}, and the head of a reward model has the shape [1, hidden size]",
                path=str(folder),
            )
    if f"{VALUE_HEAD}.bias" in tensors:
        raise ModelError(
            f"the model in {folder} has {VALUE_HEAD}.bias, so it is a value model of tokens; a "
            "reward model is a sequence classifier, whose head has no bias",
            path=str(folder),
        )
    classifier_name(read_config(folder, trust_remote_code=trust_remote_code))


def padding_token(path: str | Path, tokenizer_path: str | Path, *, trust_remote_code: bool) -> int:
    """Return the token that a reward model takes for padding, also in an export of it.

    It is that of config.json, or else that of the tokenizer, which may be its end token.
    """
    config = read_config(Path(path), trust_remote_code=trust_remote_code)
    if isinstance(config.pad_token_id, int):
        return config.pad_token_id
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code)
    token: int = tokenizer.pad_token_id
    return token

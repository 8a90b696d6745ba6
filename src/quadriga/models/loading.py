"""Load tokenizers and models from a folder, or from the hub if the name starts with `hf://`.

Every loader checks the folder first, so that a mistake gives a `ModelError` of one line that names
the folder and what is missing. `check_model_folder` does the same check without loading weights.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import hub_kernels
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import GENERATION_CONFIG_NAME

from quadriga.config.schema import ModelConfig
from quadriga.containment import code_runs
from quadriga.errors import ModelError
from quadriga.models.architectures import takes_images
from quadriga.models.cpu_linear import use_cpu_linear
from quadriga.models.folder import (
    ModelSource,
    check_model_folder,
    local_folder,
    model_settings,
    weight_file_names,
)
from quadriga.models.weights import check_all_finite, count_not_finite, stored_tensors
from quadriga.observability.quiet import quiet_libraries
from quadriga.parallel.device import DTYPES, ComputeDtypeName
from quadriga.parallel.node_memory import folder_in_memory, on_joined_ranks

_log = logging.getLogger(__name__)

AutoModelClass = type[
    AutoModelForCausalLM | AutoModelForImageTextToText | AutoModelForTokenClassification
]
Dtype = ComputeDtypeName | torch.dtype
"""A dtype by name, "auto" (the dtype in the folder's config.json), or a torch dtype."""

VALUE_HEAD = "score"
VALUE_HEAD_PREFIX = f"{VALUE_HEAD}."


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, with left padding and a padding token.

    If the tokenizer has no padding token, the end token is used for padding.

    Raises:
        ModelError: the folder has no tokenizer, or the tokenizer has no end token.
    """
    folder = local_folder(path)
    check_model_folder(folder, weights=False, trust_remote_code=trust_remote_code)
    with quiet_libraries(), model_errors(folder, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code and code_runs(), padding_side="left"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {folder} has no end token, so no response could ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the settings of a model name."""
    path = model.tokenizer_path or model.path
    return load_tokenizer(path, trust_remote_code=model.trust_remote_code)


def load_causal_lm(model: ModelSource, *, dtype: Dtype = "float32") -> PreTrainedModel:
    """Load the causal language model of a folder on the CPU, in evaluation mode.

    A model of text and images is loaded with its image encoder.

    Raises:
        ModelError: the folder has no causal language model, or weights are missing.
    """
    loaded, missing = _load(settings := model_settings(model), dtype, value_head=False)
    _check_no_missing(settings.path, missing, "model in its config.json")
    return loaded


def load_value_model(model: ModelSource, *, dtype: Dtype = "float32") -> PreTrainedModel:
    """Load a causal backbone with a scalar head on every token: `model(...).logits` is [B, T, 1].

    The folder may hold a causal language model. The head is then new and zero, so that the first
    values are 0 on every rank. Or it holds a value model that `save_pretrained` wrote, or a reward
    model (a sequence classifier with one label), whose head has no bias: that of the values is 0.

    Raises:
        ModelError: transformers has no token head for this architecture, or weights of the backbone
            are missing.
    """
    loaded, missing = _load(settings := model_settings(model), dtype, value_head=True)
    head = _value_head(loaded, settings.path)
    new_head = {name for name in missing if name.startswith(VALUE_HEAD_PREFIX)}
    _check_no_missing(settings.path, missing - new_head, "backbone")
    with torch.no_grad():
        for name in new_head:
            head.get_parameter(name.removeprefix(VALUE_HEAD_PREFIX)).zero_()
    return loaded


def _check_no_missing(path: str, missing: set[str], what: str) -> None:
    if missing:
        raise ModelError(
            f"the weights in {path} lack {len(missing)} tensors of the {what}, among them "
            f"{min(missing)!r}"
        )


def model_without_weights(
    model: ModelSource, *, value_head: bool = False, dtype: Dtype = "float32", buffers: bool = False
) -> PreTrainedModel:
    """Return the model of a folder's config.json on the meta device: shapes without numbers.

    Args:
        buffers: apart from its parameters, the model is what `load_causal_lm` or `load_value_model`
            returns: buffers are on the CPU, with the numbers that the model computes. Those that
            are saved have to be read. False: no file of weights is read or downloaded.

    Raises:
        ModelError: the folder has no suitable model.
    """
    settings = model_settings(model)
    folder, trusted = local_folder(settings.path, weights=buffers), settings.trust_remote_code
    kind, config = _checked(folder, settings, value_head=value_head, weights=buffers)
    own_code = nullcontext() if trusted else _no_code_of_the_hub()
    with quiet_libraries(), model_errors(folder, "model"), own_code, torch.device("meta"):
        made: PreTrainedModel = kind.from_config(  # type: ignore[no-untyped-call]  # none
            config, dtype=_torch_dtype(dtype), trust_remote_code=trusted
        )
    if value_head:
        _value_head(made, folder)
    made.train(False)
    if buffers:
        with quiet_libraries(), model_errors(folder, "model"):
            _fill_buffers(made, folder)
    return made


def _fill_buffers(model: PreTrainedModel, folder: Path) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # as in `from_pretrained`
    # On parameters of the meta device this does nothing.
    model.initialize_weights()  # type: ignore[no-untyped-call]  # none
    if (folder / GENERATION_CONFIG_NAME).is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = str(folder)
    use_cpu_linear(model)


def _value_head(model: PreTrainedModel, path: str | Path) -> torch.nn.Linear:
    """Return the value head, whose output is no view from now on.

    Raises:
        ModelError: the token classifier of this architecture has no such layer.
    """
    head = getattr(model, VALUE_HEAD, None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"{type(model).__name__}, the token classifier for the model in {path}, has no linear "
            f"layer {VALUE_HEAD!r}; a value model needs one"
        )
    # The output of a linear layer of three dimensions is a view, and FSDP2 warns of a model that
    # returns one. One float per token is copied.
    head.register_forward_hook(lambda _, inputs, output: output.clone())
    return head


def _checked(
    folder: Path, settings: ModelConfig, *, value_head: bool, weights: bool = True
) -> tuple[AutoModelClass, PretrainedConfig]:
    """Return the class of a folder's model, and its config with the attention of the settings.

    A config.json can name an attention or an experts implementation, also one of the hub, whose
    code transformers would download and run. A value head gives one number a token, without dropout
    before it.

    Raises:
        ModelError: the folder is not a model folder, `attn_implementation` is code of the hub, or
            the model cannot have a value head.
    """
    attention, trusted = settings.attn_implementation, settings.trust_remote_code
    if "/" in attention and not trusted:
        raise ModelError(
            f"attn_implementation {attention!r} is code of the hub; set "
            "trust_remote_code=true to run it, or choose sdpa, eager or flash_attention_2"
        )
    check_model_folder(folder, weights=weights, tokenizer=False, trust_remote_code=trusted)
    config = read_config(folder, trust_remote_code=trusted)
    with model_errors(folder, "config"):
        # None: SDPA if the model supports it, else its own attention (for example with capped
        # scores, sinks or ALiBi). Both setters also reach the configs inside this one.
        config._attn_implementation = None if attention == "sdpa" else attention
        config._experts_implementation = None
    images = takes_images(config)
    if not value_head:
        return AutoModelForImageTextToText if images else AutoModelForCausalLM, config
    if images:
        raise ModelError(
            f"model_type {config.model_type!r} of the model in {folder} takes images, and such a "
            "model cannot have a head for values or scores; set the path to a model of text, or "
            "choose an advantage estimator without a critic, such as grpo"
        )
    config.num_labels = 1
    config.classifier_dropout = 0.0
    return token_classifier(config), config


def folder_config(model: ModelSource) -> PretrainedConfig:
    """Return the config of a model folder, which needs no weights.

    Raises:
        ModelError: the folder is not a model folder.
    """
    settings = model_settings(model)
    folder, trusted = local_folder(settings.path, weights=False), settings.trust_remote_code
    check_model_folder(folder, weights=False, tokenizer=False, trust_remote_code=trusted)
    return read_config(folder, trust_remote_code=trusted)


def read_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read the config of a folder that `check_model_folder` has checked.

    Raises:
        ModelError: transformers cannot use config.json.
    """
    with quiet_libraries(), model_errors(folder, "config"):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code and code_runs()
        )
        return config


def _load(
    settings: ModelConfig, dtype: Dtype, *, value_head: bool
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model, and the names of its parameters that the folder's weights do not hold.

    Raises:
        ModelError: the model cannot be loaded, or a weight is not finite.
    """

    def checked() -> tuple[Path, AutoModelClass, PretrainedConfig]:
        folder = local_folder(settings.path)
        return folder, *_checked(folder, settings, value_head=value_head)

    folder, auto_class, config = on_joined_ranks(checked) if settings.use_shm else checked()
    code_of_hub = nullcontext() if settings.trust_remote_code else _no_code_of_the_hub()
    shared: AbstractContextManager[Path] = nullcontext(folder)
    if settings.use_shm:
        shared = folder_in_memory(folder, weight_file_names)
    with quiet_libraries(), model_errors(folder, "model"), code_of_hub, shared as source:
        model, info = auto_class.from_pretrained(  # type: ignore[misc]  # output_loading_info: a pair
            source,
            dtype=_torch_dtype(dtype),
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            config=config,
        )
    model.config.name_or_path = str(folder)  # `source` is gone
    # Buffers are not checked: Gemma 4 has limits of clipping in them, which may be infinite.
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    check_all_finite(folder, {name: count_not_finite(weight) for name, weight in weights})
    use_cpu_linear(model)
    report_attention(model, settings.path, settings.attn_implementation)
    return model.eval(), set(info["missing_keys"])


def report_attention(model: PreTrainedModel, folder: str | Path, asked: str) -> None:
    """Warn if a model that was loaded has another attention than was asked for."""
    used = model.config._attn_implementation
    if used != asked:
        _log.warning(
            "%s in %s does not support attn_implementation=%s; using %s",
            type(model).__name__, folder, asked, used,
        )  # fmt: skip


@contextmanager
def _no_code_of_the_hub() -> Iterator[None]:
    """Let transformers load no kernel of the hub within the block; it uses its own code instead."""

    def refuse(kernel_name: str, *_: object, **__: object) -> NoReturn:
        raise ImportError(
            f"kernel {kernel_name!r} is code of the hub, and trust_remote_code is false"
        )

    before = hub_kernels._kernels_enabled, hub_kernels.get_kernel
    hub_kernels._kernels_enabled, hub_kernels.get_kernel = False, refuse
    try:
        yield
    finally:
        hub_kernels._kernels_enabled, hub_kernels.get_kernel = before


def _torch_dtype(dtype: Dtype) -> torch.dtype | Literal["auto"]:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)} or a torch dtype")
    return DTYPES[dtype]


@contextmanager
def model_errors(folder: Path, what: str) -> Iterator[None]:
    """Turn the errors of the loading libraries into a `ModelError` that names the folder."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a wrong value in config.json raises errors of any type
        text = " ".join(str(error).split()) or repr(error)
        raise ModelError(f"the {what} in {folder} cannot be loaded: {text[:400]}") from error


_REFUSED = {
    "falcon_h1": "transformers fills constants of its layers only in its causal language model"
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
        return cast(PreTrainedModel, kind._from_config(config, dtype=dtype))

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
            "without a critic, such as grpo"
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


# The head of a reward model: one number for a sequence.
#
# Transformers computes the score of a sequence classifier from the last token that is not padding
# (`pad_token_id` of its config). Sequence classifiers have a linear layer `score` without a bias,
# and token classifiers one with a bias. Here a reward model is a token classifier without the bias:
# the score of a sequence is its output at that token, and its weights have the names of a sequence
# classifier.


def without_bias(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the bias of the head of a token classifier, in place."""
    head = model.get_submodule(VALUE_HEAD)
    assert isinstance(head, torch.nn.Linear)
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
            "reward model of this kind could not be exported; choose another base model"
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
            f"weight {VALUE_HEAD!r} of shape [1, hidden size]{hint}; train one with `quadriga rm`"
        )
    for name, shape in heads.items():
        if len(shape) != 2 or shape[0] != 1:
            raise ModelError(
                f"the model in {folder} has {shape[0] if shape else 0} labels: {name} is "
                f"{list(shape)}, and the head of a reward model has the shape [1, hidden size]"
            )
    if f"{VALUE_HEAD}.bias" in tensors:
        raise ModelError(
            f"the model in {folder} has {VALUE_HEAD}.bias, so it is a value model of tokens; a "
            "reward model is a sequence classifier, whose head has no bias"
        )
    classifier_name(read_config(folder, trust_remote_code=trust_remote_code))


def padding_token(model: ModelConfig) -> int:
    """Return the token that a reward model takes for padding, also in an export of it.

    config.json names it, or else the tokenizer, whose token may be its end token.
    """
    config = read_config(local_folder(model.path), trust_remote_code=model.trust_remote_code)
    if isinstance(config.pad_token_id, int):
        return config.pad_token_id
    return int(tokenizer_of(model).pad_token_id)

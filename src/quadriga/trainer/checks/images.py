"""Whether the model of a run takes images, how they become tokens, and what cannot use them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import ModelConfig, RolloutEngineConfig, TrainConfig
from quadriga.errors import ConfigError
from quadriga.models.images import image_tokens
from quadriga.rollout import REFERENCE, rollout_of
from quadriga.trainer.roles.needed import needs_critic

if TYPE_CHECKING:
    from quadriga.data.images import ImageRules

_TEXT_ONLY = {
    "name": "fsdp",
    "tensor_parallel_size": 1,
    "sequence_parallel_size": 1,
    "context_parallel_size": 1,
}
"""Settings of a training engine -> the value with which it computes images."""


def image_rules(model: ModelConfig, image_key: str | None) -> ImageRules | None:
    """Return how the images of prompts become tokens; None for a model of text.

    Args:
        image_key: column of the images.

    Raises:
        ModelError: the model takes images, and its folder has no image processor.
        ConfigError: the model takes images, and Pillow is not installed.
    """
    from quadriga.data.images import ImageRules
    from quadriga.models.images import load_image_processor

    trusted = model.trust_remote_code
    tokens = image_tokens(model.path, trust_remote_code=trusted) if model.path else None
    if tokens is None:
        return None
    processor = load_image_processor(model.path, trust_remote_code=trusted)
    return ImageRules(
        image_key=image_key,
        image_token=tokens.image,
        merge_size=tokens.merge_size,
        process=partial(processor, return_tensors="pt"),
        count_patches=processor.get_number_of_image_patches,
        settings=processor.to_json_string(),
    )


def check_images_supported(config: TrainConfig) -> None:
    """Check, if the model of the policy takes images, that every role of the run can.

    Raises:
        ConfigError: one cannot. Names the setting.
    """
    model = config.actor_rollout_ref.model
    if image_tokens(model.path, trust_remote_code=model.trust_remote_code) is None:
        return
    what = f"the model in {model.path} takes images"
    _check_rollout("actor_rollout_ref.rollout.name", config.actor_rollout_ref.rollout, what)
    for use in ("actor", "ref"):
        engine = getattr(config.actor_rollout_ref, use).engine
        for name, needed in _TEXT_ONLY.items():
            value, key = getattr(engine, name), f"actor_rollout_ref.{use}.engine.{name}"
            if value != needed:
                raise ConfigError(
                    f"{what}, and {key}={value} computes text only; set it to {needed}", key=key
                )
    if needs_critic(config):
        raise ConfigError(
            f"{what}, and the critic of algorithm.adv_estimator={config.algorithm.adv_estimator} "
            "cannot compute images; choose an estimator without a critic, such as grpo",
            key="algorithm.adv_estimator",
        )
    if has_reward_model(config):
        raise ConfigError(
            f"{what}, and the reward model cannot compute images; score the responses by rules, "
            "and set reward_model.enable=false",
            key="reward_model.enable",
        )


def check_generation_takes_images(rollout: RolloutEngineConfig, model: ModelConfig) -> None:
    """Check, if a model takes images, that the rollout engine of a generation can.

    Raises:
        ConfigError: it cannot.
    """
    if image_tokens(model.path, trust_remote_code=model.trust_remote_code) is not None:
        _check_rollout("rollout.name", rollout, f"the model in {model.path} takes images")


def uncounted_images(model: ModelConfig) -> list[str]:
    """Return what a memory plan of the model does not count because it takes images."""
    takes = model.path and image_tokens(model.path, trust_remote_code=model.trust_remote_code)
    return ["activations of the image encoder, whose parameters are counted"] if takes else []


def _check_rollout(key: str, rollout: RolloutEngineConfig, what: str) -> None:
    if not rollout_of(rollout).computes_images:
        raise ConfigError(
            f"{what}, and the rollout engine {rollout.name!r} computes text only in this release; "
            f"set {key}={REFERENCE}",
            key=key,
        )

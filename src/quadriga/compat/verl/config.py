"""verl's configuration objects: how settings are read from them, and its classes of settings.

    config = ActorConfig(strategy="fsdp", rollout_n=1, clip_ratio=0.3)
    loss, metrics = compute_policy_loss_vanilla(…, config=config)

An object of a class holds the settings of verl under verl's names, with verl's default values, and
can be read as a mapping. Only the estimators and losses of this package read it. The settings of a
run are `quadriga.config.schema`.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Final, TypeAlias, overload

from quadriga.errors import ConfigError, UnknownSettingError, nearest_name

VerlConfig: TypeAlias = object
"""A mapping, an OmegaConf node or an object with attributes; None: no settings."""
_NO_SECTION: Final = (int, float, Sequence)  # a text is a sequence, and so is a list of OmegaConf


def setting(config: VerlConfig, key: str, default: object = None) -> Any:
    """Return `config[key]` or `config.key`; `default` if the setting is missing or None.

    Raises `ConfigError` if `config` is a single value or a list, which has no settings.
    """
    if config is None:
        return default
    if isinstance(config, _NO_SECTION):
        raise ConfigError(f"expected a section of settings with {key!r}, got {config!r}", key=key)
    getter = getattr(config, "get", None)
    found = getter(key, default) if getter is not None else getattr(config, key, default)
    return default if found is None else found


@overload
def number(config: VerlConfig, key: str, default: float) -> float: ...
@overload
def number(config: VerlConfig, key: str, default: None = None) -> float | None: ...


def number(config: VerlConfig, key: str, default: float | None = None) -> float | None:
    """Return a setting as a float; `default` if it is missing or None.

    Raises `ConfigError` for a value that is no number.
    """
    found = setting(config, key, default)
    try:
        return None if found is None else float(found)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} must be a number, got {found!r}", key=key) from None


class VerlSettings(Mapping[str, object]):
    """Settings as attributes and as keys.

    Raises `UnknownSettingError` for a keyword that the class of verl does not have.
    """

    defaults: ClassVar[dict[str, object]] = {}

    def __init__(self, **given: object) -> None:
        for key in given:
            if key not in self.defaults:
                nearest = nearest_name(key, self.defaults)
                hint = f"Did you mean {nearest}? " if nearest else ""
                raise UnknownSettingError(
                    f"{type(self).__name__} has no setting {key!r}. {hint}It has: "
                    f"{', '.join(self.defaults)}",
                    key=key,
                    nearest=nearest,
                )
        vars(self).update(deepcopy(self.defaults))
        vars(self).update(given)

    def __getitem__(self, key: str) -> object:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.items())
        return f"{type(self).__name__}({shown})"


class KLControlConfig(VerlSettings):
    """Settings of `get_kl_controller`."""

    defaults: ClassVar[dict[str, object]] = {
        "type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1,
    }  # fmt: skip


class AlgoConfig(VerlSettings):
    """Settings of an advantage estimator."""

    defaults: ClassVar[dict[str, object]] = {
        "gamma": 1.0, "lam": 1.0, "adv_estimator": "gae", "norm_adv_by_std_in_grpo": True,
        "use_kl_in_reward": False, "kl_penalty": "kl", "kl_ctrl": KLControlConfig(),
        "use_pf_ppo": False, "pf_ppo": {}, "filter_groups": None, "rollout_correction": None,
        "gdpo_reward_keys": None, "gdpo_reward_weights": None,
    }  # fmt: skip


class PolicyLossConfig(VerlSettings):
    """Settings of one policy loss, `ActorConfig.policy_loss`."""

    defaults: ClassVar[dict[str, object]] = {
        "loss_mode": "vanilla", "clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0,
        "kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1, "dro_beta": None, "rollout_correction": None,
    }  # fmt: skip


class ActorConfig(VerlSettings):
    """Settings of a policy loss. `global_batch_info`: the last four arguments of `agg_loss`."""

    defaults: ClassVar[dict[str, object]] = {
        "strategy": None, "rollout_n": None, "ppo_mini_batch_size": 256,
        "ppo_micro_batch_size": None, "ppo_micro_batch_size_per_gpu": None, "ppo_epochs": 1,
        "ppo_max_token_len_per_gpu": 16384, "use_dynamic_bsz": False, "shuffle": False,
        "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0,
        "tau_pos": 1.0, "tau_neg": 1.05, "policy_loss": PolicyLossConfig(),
        "loss_agg_mode": "token-mean", "loss_scale_factor": None, "entropy_coeff": 0.0,
        "use_kl_loss": False, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl",
        "global_batch_info": {}, "optim": None, "calculate_entropy": False,
        "calculate_sum_pi_squared": False, "freeze_vision_tower": False,
        "use_fused_kernels": False, "use_prefix_grouper": False, "checkpoint": None,
        "engine": None, "model_config": None, "profiler": None, "qat": None,
        "data_loader_seed": 42, "ppo_infer_max_token_len_per_gpu": 16384,
        "ppo_infer_micro_batch_size_per_gpu": None, "use_torch_compile": True,
    }  # fmt: skip


class FSDPActorConfig(ActorConfig):
    """`ActorConfig` under the name of verl's class for FSDP."""

    defaults: ClassVar[dict[str, object]] = {
        **ActorConfig.defaults, "strategy": "fsdp", "grad_clip": 1.0, "fsdp_config": None,
        "use_remove_padding": False, "use_rollout_log_probs": False,
        "ulysses_sequence_parallel_size": 1,
    }  # fmt: skip

"""SGLang before it is started: what `rollout.options` may hold for it, and what it can do then.

Imports neither torch nor SGLang: the settings are checked before a worker starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quadriga.config import schema
from quadriga.config.convert import build
from quadriga.containment import code_runs
from quadriga.errors import ConfigError
from quadriga.rollout import ROLLOUT_KEY, Rollout, refuse_untested
from quadriga.rollout.abilities import ALL_SETTINGS, RolloutAbilities, SamplingSetting

if TYPE_CHECKING:
    from quadriga.models.memory import EngineMemory
    from quadriga.rollout.memory import GenerationUse

TESTED_VERSION = "0.5.23"
"""The version of SGLang that the tests run with."""

KEY = f"{ROLLOUT_KEY}.options"
"""The setting that holds the options, for messages."""

MEM_FRACTION_STATIC = 0.5
"""Share of a GPU for weights, keys and values, if `server_args` names none: the trainer needs the
rest."""

CPU_TOKENS = 1 << 16
"""Tokens whose keys and values SGLang holds on a CPU, if `server_args` names no `max_total_tokens`.
By default SGLang would reserve most of the memory."""

_SET_BY = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "tp_size": f"{KEY}.tensor_parallel",
    "enable_deterministic_inference": f"{KEY}.seeds",
    "device": "trainer.device",
    "enable_return_routed_experts": "rollout.replay_routes",
    "enable_memory_saver": "rollout.take_turns",
    "enable_weights_cpu_backup": "rollout.take_turns",
}
"""Arguments of SGLang that are not for `server_args` -> the setting that decides them."""
_OWN = frozenset(
    {
        "host", "port", "api_key", "admin_api_key", "skip_tokenizer_init", "weight_version",
        "json_model_override_args", "context_length", "custom_weight_loader", "base_gpu_id",
        "enable_lora", "lora_paths",
    }
)  # fmt: skip
"""Arguments that no setting decides: no server is started, SGLang gets token ids, and adapters are
merged into the weights that it receives."""


@dataclass(frozen=True)
class SGLangOptions:
    """How SGLang is started and called.

    Attributes:
        url: an HTTP server that runs already, such as "http://10.0.0.2:30000". Nothing is started.
        api_key: the key of the server at `url`.
        python: the interpreter of the environment that holds SGLang; None: that of the rank.
        tensor_parallel: GPUs over which SGLang splits the model.
        seeds: start SGLang's deterministic inference, in which each sample has a seed. It costs
            speed, and excludes min_p.
        request_rows: rows of one request, at most `rollout.micro_batch_size`. Up to 64 requests
            run side by side.
        bucket_mb: MiB of weights that are sent at once.
        weight_handles: SGLang maps the memory of a bucket (CUDA IPC; on a CPU a file in shared
            memory) in place of receiving its bytes; None: on a CUDA device, for an SGLang that is
            started here.
        start_timeout_s, call_timeout_s, generate_timeout_s: deadlines, in seconds, of the start; of
            a call that generates nothing; and of one request of `request_rows` rows.
        untested_version: accept a version of SGLang that has not been tested.
        server_args: further arguments of SGLang's `ServerArgs`, such as the `log_level` of the log,
            which goes to a file and is shown in errors.

    Raises:
        ConfigError: values conflict.
    """

    url: str | None = None
    api_key: str | None = None
    python: str | None = None
    tensor_parallel: schema.Count = 1
    seeds: bool = False
    request_rows: schema.Count = 32
    bucket_mb: schema.Count = 256
    weight_handles: bool | None = None
    start_timeout_s: schema.Positive = 600.0
    call_timeout_s: schema.Positive = 300.0
    generate_timeout_s: schema.Positive = 1800.0
    untested_version: bool = False
    server_args: schema.Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.url is not None:
            self._check_url(self.url)
        elif self.api_key is not None:
            raise _wrong("api_key", "***", f"the key of the server at {KEY}.url; set url too")
        for name in self.server_args:
            if name in _OWN or name in _SET_BY:
                remedy = f"set {_SET_BY[name]}" if name in _SET_BY else "remove it"
                raise ConfigError(
                    f"{KEY}.server_args.{name} is decided by Quadriga; {remedy}",
                    key=f"{KEY}.server_args.{name}",
                )

    def _check_url(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise _wrong("url", url, 'of the form "http://host:port"')
        # `seeds` and `tensor_parallel` describe the server at the address.
        for name in ("python", "server_args", "weight_handles"):
            if getattr(self, name):
                raise ConfigError(
                    f"{KEY}.{name} is for an SGLang that is started here, but {KEY}.url={url} "
                    f"names one that runs already; remove {name} or url",
                    key=f"{KEY}.{name}",
                )


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{KEY}.{name} must be {expected}, got {value!r}", key=f"{KEY}.{name}")


# `min_new_tokens` of SGLang needs its tokenizer, and makes log-probabilities of neither kind.
_UNABLE: frozenset[SamplingSetting] = frozenset({"min_new_tokens", "excluded_token_ids"})


class SGLang(Rollout):
    """See `Rollout`."""

    engine = "quadriga.rollout.sglang.engine:SGLangRollout"
    continues = in_flight = file_names = reports_routes = True

    def __init__(self, settings: schema.RolloutEngineConfig) -> None:
        super().__init__(settings)
        if "restarts" in settings.options:
            raise ConfigError(
                f"{KEY}.restarts is a setting of every engine now; set "
                "actor_rollout_ref.rollout.replicas.restarts",
                key=f"{KEY}.restarts",
            )
        self.options = build(SGLangOptions, settings.options, f"{KEY} for sglang: ")

    def abilities(self, vocabulary: int, window: int | None) -> RolloutAbilities:
        seeds = self.options.seeds
        # Its seeds do not work with min_p.
        settings = ALL_SETTINGS - _UNABLE - (frozenset({"min_p"}) if seeds else frozenset())
        return replace(
            super().abilities(vocabulary, window),
            log_probs=frozenset({"policy"}),
            settings=settings,
            seeded=seeds,
            batch_invariant=False,
        )

    def check(self, ranks: int | None) -> None:
        if self.options.url is not None:
            return
        parts = self.options.tensor_parallel
        if ranks is not None and min(parts, ranks) > 1:
            raise ConfigError(
                f"{KEY}.tensor_parallel={parts}, and each of the {ranks} ranks would start "
                f"an SGLang on {parts} devices, its neighbours' among them; give the rollout "
                "one rank (placement.rollout), or set tensor_parallel=1",
                key=f"{KEY}.tensor_parallel",
            )
        check_installed(self.options)

    def check_updates(self, ranks: int | None, *, take_turns: bool) -> None:
        url, parts = self.options.url, self.options.tensor_parallel
        if url is not None and ranks is not None and ranks > 1:
            raise ConfigError(
                f"{KEY}.url={url} is one server, but {ranks} ranks would update its weights at "
                "the same time; use one rank for the rollout (placement.rollout), or remove url, "
                "so that each rank starts an SGLang of its own",
                key=f"{KEY}.url",
            )
        if take_turns and (url is not None or parts > 1):
            found = f"tensor_parallel={parts}" if url is None else f"url={url}"
            raise ConfigError(
                f"actor_rollout_ref.rollout.take_turns=true cannot be kept with {KEY}.{found}: its "
                "weights are compared by the log-probabilities that it computes, for which its "
                "memory must not be released; remove one of them",
                key="actor_rollout_ref.rollout.take_turns",
            )

    def memory(self, model: schema.ModelConfig, use: GenerationUse) -> EngineMemory:
        from quadriga.models.memory import EngineMemory
        from quadriga.rollout.memory import reserved_memory

        options, name = self.options, "server_args.mem_fraction_static"
        share: Any = options.server_args.get("mem_fraction_static", MEM_FRACTION_STATIC)
        missing = "" if options.url is None else f"the SGLang at {options.url}"
        if not isinstance(share, int | float):
            missing = f"keys and values: {name}={share} is no number"
        if missing:
            return EngineMemory({}, {"generate": {}}, missing=missing)
        processes = 3 if use.device_type == "cpu" else 1  # host, scheduler, detokenizer; scheduler
        return reserved_memory(
            self.settings, model, use, (name, float(share)), ranks=options.tensor_parallel,
            processes=processes,
        )  # fmt: skip

    def not_reproduced(self, sampling: schema.SamplingConfig) -> str:
        if sampling.temperature > 0 and not self.options.seeds:
            return (
                "SGLang draws other random numbers in each run; with rollout.options.seeds=true "
                "each response has a seed"
            )
        return (
            "the rounding of SGLang depends on the rows that it computes together, so a token can "
            "change where two tokens have nearly equal probabilities"
        )


def check_installed(options: SGLangOptions) -> None:
    """Raise `ConfigError` unless the interpreter of `options` finds Quadriga and SGLang, in the
    version that was tested or with `untested_version`."""
    python = options.python or sys.executable
    if not os.access(python, os.X_OK):
        raise _wrong("python", python, "an interpreter")
    if not code_runs():
        return
    code = (
        "import importlib.util as u, importlib.metadata as m, sys; "
        "sys.exit(', '.join(n for n in ('sglang', 'quadriga') if u.find_spec(n) is None) "
        "or print(m.version('sglang')))"
    )
    found = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        missing = found.stderr.strip().splitlines()[-1] if found.stderr.strip() else "sglang"
        raise ConfigError(
            f"rollout engine 'sglang': {python} does not find {missing}; run "
            "`make engines ENGINES=sglang` and `source .venv-sglang/bin/activate`, or name the "
            f"interpreter in {KEY}.python",
            key="actor_rollout_ref.rollout.name",
        )
    if (version := found.stdout.strip()) == TESTED_VERSION:
        return
    problem = f"{python} has SGLang {version}, and version {TESTED_VERSION} is the one tested"
    refuse_untested(problem, "sglang", accepted=options.untested_version)

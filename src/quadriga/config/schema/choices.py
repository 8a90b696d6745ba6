"""The closed lists of choices of settings, and the type of free-form options."""

from __future__ import annotations

from typing import Any, Literal

BackendName = Literal["ray", "local"]
GenerationBackendName = Literal["auto", "ray", "local"]
DeviceName = Literal["auto", "cpu", "cuda", "npu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
ReduceDtypeName = Literal["float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "sdpa", "varlen", "flex"]
LrSchedulerName = Literal["constant", "linear", "cosine"]
AggregationName = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
# `SampledKLName` reads only the log-probabilities of the sampled tokens, all that the reward has.
SampledKLName = Literal["k1", "abs", "k2", "k3", "low_var_kl", "k1+", "abs+", "k3+", "low_var_kl+"]
KLName = Literal[SampledKLName, "full"]
KLControlType = Literal["fixed", "adaptive"]
FilterMode = Literal["mask", "refill"]
UnderFilled = Literal["proceed", "error"]
CorrectionLevel = Literal["none", "token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]
FailurePolicy = Literal["zero", "mask", "fail"]
AlarmAction = Literal["warn", "fail"]
LossTurns = Literal["all", "last"]
WeightTransport = Literal["auto", "shared_memory", "collective"]
Operation = Literal["+", "-", "*"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
Checkpointing = bool | Literal["selective"]

# Keyword arguments for a function of the user's own: the names and types are up to that function.
Options = dict[str, Any]

MISSING_PATH = ""

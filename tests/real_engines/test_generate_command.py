"""`quadriga generate` writes the same greedy responses with each engine."""

from __future__ import annotations

import importlib.util

import pytest

from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig, GenerateConfig
from quadriga.config.loading import load_config
from quadriga.trainer.evaluation.generate import run_generation

ENGINES = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is not None]

pytestmark = [
    pytest.mark.skipif(not ENGINES, reason="no engine is installed; see make engines"),
    pytest.mark.nightly,
]


REPLICAS = [
    "trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.num_cpus=2",
    "trainer.threads_per_worker=1", "rollout.replicas.enable=true",
    "rollout.replicas.request_rows=2",
]  # fmt: skip
RANKS = {"one rank": [], "two replicas": REPLICAS}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.timeout(900)
def test_the_file_of_an_engine_equals_that_of_hf(engine, ranks, tmp_path) -> None:
    run_make_data(
        load_config(
            ArithmeticDataConfig,
            [f"output={tmp_path / 'data'}", f"model_output={tmp_path / 'base'}", "train_size=4",
             "val_size=12", "sft_size=4", "max_number=5", "hidden_size=64", "num_layers=2",
             "num_heads=2", "num_kv_heads=1", "intermediate_size=64"],
        )
    )  # fmt: skip

    def written(name: str, *more: str) -> bytes:
        path = tmp_path / f"{name}.jsonl"
        run_generation(
            load_config(
                GenerateConfig,
                [f"model.path={tmp_path / 'base'}",
                 f"data_files={tmp_path / 'data' / 'test.parquet'}", "max_response_length=12",
                 f"rollout.name={name}", "rollout.dtype=float32", "batch_size=8",
                 f"output={path}", *more],
            )
        )  # fmt: skip
        return path.read_bytes()

    assert written(engine, *RANKS[ranks]) == written("hf")

"""Load models by shards and whole, on real ranks, and note what each rank reads and allocates."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import engine_cases as cases
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import loading
from quadriga.engines.fsdp import FSDPEngine
from quadriga.engines.optimizers import local_shard
from quadriga.errors import ModelError
from quadriga.models import weights as reader
from quadriga.models.loading import load_value_model
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.models.weights import WeightNames
from rank_groups import fork_ranks

# 0.7 million parameters. 3 does not divide 970, so that shards on 3 ranks are uneven.
SHAPE = TinyModel(hidden_size=96, num_layers=2, num_heads=6, num_kv_heads=2, intermediate_size=970)
PIECE_BYTES = 2**14
WAIT_S = 180


@dataclass(frozen=True)
class Case:
    """What is loaded, and the settings of the engine that loads it."""

    folder: str
    head: str = "lm"
    trained: bool = True
    fsdp_size: int = -1
    use_shm: bool = False
    on_host: bool = False


CASES = [
    Case("tied"),
    Case("files", trained=False),
    Case("value", head="value"),
    Case("untied", head="value"),
    Case("untied", fsdp_size=1),
    Case("files", use_shm=True),
    Case("files", on_host=True),
]


def write_folders(root: Path) -> None:
    """Write the model, a tied one, one in bfloat16 in several files, and a value model."""
    texts = ["one two three"]
    write_tiny_model(root / "untied", texts, SHAPE)
    tied = {**vars(SHAPE), "tie_word_embeddings": True}
    write_tiny_model(root / "tied", texts, TinyModel(**tied))
    model = AutoModelForCausalLM.from_pretrained(root / "untied", dtype=torch.bfloat16)
    model.save_pretrained(root / "files", max_shard_size="500KB")
    value = load_value_model(root / "untied")
    torch.nn.init.normal_(value.score.weight)
    value.save_pretrained(root / "value")
    write_tiny_model(root / "nan", texts, SHAPE)
    weights = load_file(root / "nan" / "model.safetensors")
    weights["lm_head.weight"][-1, :3] = float("nan")  # a row of the last rank
    weights["model.norm.weight"][0] = float("inf")  # a row of rank 0
    save_file(weights, root / "nan" / "model.safetensors", {"format": "pt"})


def build(root: str, case: Case) -> FSDPEngine:
    model = ModelConfig(path=f"{root}/{case.folder}", use_shm=case.use_shm)
    engine = EngineConfig(
        fsdp_size=case.fsdp_size,
        dtype="float32" if case.trained else "bfloat16",
        offload_policy=case.on_host,
    )
    optim = OptimConfig(lr=0.01) if case.trained else None
    return FSDPEngine(model, engine, optim, head=case.head, min_unit_parameters=1)


def whole_models():
    """Let engines load whole models within the block."""
    return mock.patch.object(
        loading, "match_names", lambda *_, **__: WeightNames(reason="of a test")
    )


def noted_reads(read: list[str]):
    """Note each tensor file that is read by shards within the block."""
    real = reader.TensorReader.read

    def noting(self, tensor, first, target):
        read.append(tensor.file)
        real(self, tensor, first, target)

    return mock.patch.object(reader.TensorReader, "read", noting)


def state_of(engine: FSDPEngine, *, steps: int) -> list[torch.Tensor]:
    """Shards, buffers and the outputs of a batch, after a step if there are steps."""
    metrics = [cases.step(engine)["grad_norm"]] if steps else []
    outputs = engine.forward(cases.make_batch())
    shards = [local_shard(parameter) for parameter in engine.module.parameters()]
    return [*shards, *engine.module.buffers(), *outputs.values(), torch.tensor(metrics)]


def compare(root: str, case: Case) -> tuple[bool, bool]:
    """Whether the two ways give equal numbers, and whether the first one reads shards."""
    steps = int(case.trained and case.head == "lm")
    read: list[str] = []
    with noted_reads(read):
        found = state_of(build(root, case), steps=steps)
    with whole_models():
        expected = state_of(build(root, case), steps=steps)
    equal = len(found) == len(expected) and all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )
    return equal, bool(read)


def bytes_read(call) -> int:
    """The bytes that this process asks the system for while it runs `call`."""

    def total() -> int:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["rchar"])

    before = total()
    call()
    return total() - before


def error_of(call) -> str:
    try:
        call()
    except ModelError as error:
        return str(error)
    return "no error"


def failing_reads(root: str, rank: int) -> str:
    """The error of each rank if the disk of rank 1 fails."""

    def failing(self, tensor, first, target):
        raise OSError(5, "Input/output error", tensor.file)

    changed = failing if rank == 1 else reader.TensorReader.read
    with mock.patch.object(reader.TensorReader, "read", changed):
        return error_of(lambda: build(root, Case("untied")))


def rank_main(rank: int, ranks: int, root: str) -> None:
    reader.PIECE_BYTES = PIECE_BYTES
    case = Case("files")
    own_elements = sum(local_shard(p).numel() for p in build(root, case).module.parameters())
    errors = {"not finite": error_of(lambda: build(root, Case("nan")))}
    with whole_models():
        errors["not finite, whole"] = error_of(lambda: build(root, Case("nan")))
    errors["disk"] = failing_reads(root, rank)
    errors["absent"] = error_of(lambda: build(root, Case("untied" if rank != 1 else "absent")))
    found = {
        "compared": {case: compare(root, case) for case in CASES},
        "own elements": own_elements,
        "bytes read": bytes_read(lambda: build(root, case)),
        "errors": errors,
    }
    torch.save(found, f"{root}/found_{ranks}_{rank}.pt")


def run(root: Path, ranks: int) -> list[dict[str, object]]:
    """Return what each of `ranks` processes found."""
    fork_ranks(rank_main, ranks, str(root), limit=WAIT_S)
    # The files were written by `rank_main`; they hold dataclasses, which need pickle.
    files = [root / f"found_{ranks}_{rank}.pt" for rank in range(ranks)]
    return [torch.load(file, weights_only=False) for file in files]

"""Two ranks that split the tokens, against one, for every architecture with packed rows."""

import pytest
import torch
from naive_loop import make_batch
from small_models import VOCABULARY, small_model

from quadriga.config.schema import EngineConfig
from quadriga.engines.tensor_parallel import NOT_COMPARED, check_model_parallel
from quadriga.engines.token_model import TokenModel
from quadriga.models.architectures import PACKED
from quadriga.parallel.distributed import init_distributed
from quadriga.parallel.model_ranks import model_ranks
from rank_groups import fork_ranks

COMPARED = [name for name in PACKED if name not in NOT_COMPARED]
pytestmark = pytest.mark.nightly
WAIT_S = 3600
WAYS = ({"sequence_parallel_size": 2}, {"context_parallel_size": 2})


def outputs_and_gradients(model_type, sizes):
    """Log-probabilities, and the sums over ranks of the gradients of all weights."""
    model, engine = small_model(model_type), EngineConfig(**sizes)
    check_model_parallel(model.config, engine, "engine")
    ranks = model_ranks(engine, "cpu") if sizes else None
    token_model = TokenModel(model, "lm", torch.device("cpu"), ranks=ranks)
    model.requires_grad_(True)
    batch, routers = make_batch(VOCABULARY), token_model.routers
    if routers.layers:  # given experts, the same ones for equal prompts
        first = batch["input_ids"][..., None] % 3 + torch.zeros(routers.layers).to(int)
        batch["routed_experts"] = torch.stack([first, first + 1], -1)
    outputs = token_model(batch, temperature=1.0, entropy=True)
    (outputs["log_probs"].sum() + outputs["entropy"].square().sum()).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if sizes:
            torch.distributed.all_reduce(grad)
        gradients[name] = grad
    return {name: value.detach() for name, value in outputs.items()}, gradients


def rank_main(rank, ranks, results):
    init_distributed("cpu")
    found = {}
    for model_type in COMPARED:
        for way, sizes in enumerate(WAYS):
            try:
                found[model_type, way] = outputs_and_gradients(model_type, sizes)
            except Exception as error:  # each architecture is a result of its own
                found[model_type, way] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(found, results)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    results = str(tmp_path_factory.mktemp("divided") / "found.pt")
    fork_ranks(rank_main, 2, results, limit=WAIT_S)
    return torch.load(results)


@pytest.mark.parametrize("way", range(len(WAYS)), ids=[next(iter(way)) for way in WAYS])
@pytest.mark.parametrize("model_type", COMPARED)
def test_two_ranks_give_the_numbers_of_one(model_type, way, on_two_ranks):
    found = on_two_ranks[model_type, way]
    assert not isinstance(found, str), found
    outputs, gradients = outputs_and_gradients(model_type, {})
    for name, values in outputs.items():
        assert torch.allclose(found[0][name], values, atol=2e-5), name
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((found[1][name] - gradient).abs().max()) < 1e-4 * scale, name

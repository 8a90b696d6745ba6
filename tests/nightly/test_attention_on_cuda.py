"""The attention kernels of accelerators on a CUDA device, against SDPA in float32."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

from quadriga.engines.attention.choice import kernel_problem, unsupported
from quadriga.engines.attention.kernels import AttentionCall
from quadriga.engines.token_model import TokenModel

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BASE = AttentionCall(torch.bfloat16, heads=8, key_heads=2, size=64, value_size=64)
CALLS = [
    BASE,
    replace(BASE, dtype=torch.float16, heads=4, key_heads=4),
    replace(BASE, size=128, value_size=128),
    replace(BASE, size=80, value_size=80),
    replace(BASE, size=192, value_size=128),
    replace(BASE, mask="window"),
    replace(BASE, mask="chunk"),
    replace(BASE, softcap=True, mask="window"),
    replace(BASE, sinks=True),
    replace(BASE, sinks=True, mask="window"),
    replace(BASE, dtype=torch.float32),
    replace(BASE, dtype=torch.float32, softcap=True),
]


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_kernel_equals_sdpa(kernel, call):
    device = torch.device("cuda")
    reason = unsupported(kernel, call, "cuda", torch.cuda.get_device_capability(device))
    if reason is not None:
        pytest.skip(reason)
    assert kernel_problem(kernel, call, device) is None


SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
MODELS = {
    "varlen": LlamaConfig(**SIZES),
    "flex": Gemma2Config(sliding_window=32, **SIZES),
    "flex with sinks": GptOssConfig(
        sliding_window=32, num_local_experts=2, num_experts_per_tok=1, **SIZES
    ),
}


def rows(count: int, prompt: int, response: int) -> dict[str, torch.Tensor]:
    """Return rows of which each four share a prompt, with responses of different lengths."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 256, (count, prompt + response), generator=random)
    ids[:, :prompt] = ids[torch.arange(count) // 4 * 4, :prompt]
    attention = torch.ones_like(ids)
    for row in range(count):
        attention[row, prompt + 1 + (row * 37) % response :] = 0
    return {
        "input_ids": ids, "attention_mask": attention, "response_mask": attention[:, prompt:]
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_a_model_in_bfloat16(name):
    """Micro-batches of many shapes, with gradients and without: the kernel is compiled for all."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = AutoModelForCausalLM.from_config(MODELS[name]).to(device, torch.bfloat16).eval()
    chosen = TokenModel(model, "lm", device, dtype=torch.bfloat16)
    sdpa = TokenModel(model, "lm", device, dtype=torch.bfloat16, attention="sdpa")
    kernels = {chosen.kernel_of(call) for call in sdpa._attention_calls()}
    assert kernels == {name.partition(" ")[0]}
    for count, prompt, response in [(4, 16, 8), (8, 200, 100), (12, 3, 300), (1, 5, 1)]:
        batch = rows(count, prompt, response)
        found = chosen(batch, temperature=1.0, entropy=False)["log_probs"]
        found.sum().backward()
        with torch.no_grad():
            again = chosen(batch, temperature=1.0, entropy=False)["log_probs"]
            expected = sdpa(batch, temperature=1.0, entropy=False)["log_probs"]
        assert torch.isfinite(found).all()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
        torch.testing.assert_close(found.detach(), again, atol=0.02, rtol=0.02)
        torch.testing.assert_close(again, expected, atol=0.1, rtol=0.1)

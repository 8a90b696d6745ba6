"""Small models of several families, whose memory is computed and measured, and the measurement."""

from torch.profiler import ProfilerActivity, profile
from transformers import FalconConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3MoeConfig

SIZES = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "llama untied": lambda: LlamaConfig(tie_word_embeddings=False, **SIZES),
    "qwen2 tied": lambda: Qwen2Config(tie_word_embeddings=True, **SIZES),
    "mistral window": lambda: MistralConfig(sliding_window=24, **SIZES),
    "qwen3 experts": lambda: Qwen3MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16, **SIZES
    ),
    # One head of keys and values for all heads, without the argument `enable_gqa` of the kernel.
    "falcon one key head": lambda: FalconConfig(
        vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
}


def peak_of(call) -> int:
    """Return the most bytes that exist at once of those that a call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak

"""A small random model of every causal architecture, with every kind of layer that it can have.

Windows and chunks are shorter than the sequences, and the indexers of sparse attention keep fewer
tokens than there are, so that a layer that sees too much or too little changes the result.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 96
WINDOW = 6

# Sizes under every name that configs use. A config takes those that it has.
SIZES = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "n_positions": 64,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48,
    "num_hidden_layers": 2, "n_layers": 2, "n_layer": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_heads": 4, "n_head": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "rotary_dim": 8, "initializer_range": 0.15,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "use_sliding_window": True,
    "max_window_layers": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2,
    "moe_topk": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1,
    "num_shared_experts": 1, "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_chunk_size": 4, "chunk_size": 4, "linear_num_heads": 4, "linear_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # An indexer scores tokens by a sum of ReLUs over its heads. With few heads many sums are 0, and
    # which of them it keeps would depend on the padding.
    "index_topk": 4, "index_head_dim": 8, "index_n_heads": 16,
}  # fmt: skip

_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
_LATENT = {"head_dim": None, "num_key_value_heads": 4}
_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": [*_WINDOWS["layer_types"]] * 2}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"], "swa_num_attention_heads": 4, "d_rel": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": WINDOW,
    "rel_extent": 32,
}  # fmt: skip
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
    "indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 4,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

OF_ONE_KIND = (
    (_WINDOWS, (
        "afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "gemma2",
        "gemma3_text", "kolibri1", "laguna", "mellum", "olmo3", "smollm3")),
    (_LATENT, (
        "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
        "glm_moe_dsa", "minicpm3", "youtu")),
    (_RECURRENT, ("granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")),
    (_INKLING, ("inkling2_text", "inkling_text")),
)  # fmt: skip
"""Changes, and the configs that need these and no others."""

# What a config needs beyond `SIZES`. None leaves a setting at the config's own default.
SPECIAL = {
    **{name: changes for changes, names in OF_ONE_KIND for name in names},
    "bailing_hybrid": {**_LATENT, **_RECURRENT},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        **_WINDOWS, "rope_parameters": dict.fromkeys(_WINDOWS["layer_types"], _ROPE)
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "doge": {"keep_window_size": 64},
    "dots3_note_text": {
        **_LATENT, "layer_types": ["indexed_attention", "sliding_attention"], "head_dim": 16,
        "per_layer_config": {},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **_FOUR_LAYERS, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 4,
    },
    "gemma4_text": {
        **_FOUR_LAYERS, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {**_FOUR_LAYERS, "global_head_dim": 8},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "num_layers": 2,
        "num_heads": 4,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {**_LATENT, **_RECURRENT, "q_lora_rank": None},
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3,
    },
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
    "longcat_flash": {
        **_LATENT, "head_dim": 8, "num_layers": 2, "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24, "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 2,
        "index_topk_blocks": 2, "index_n_heads": 2,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    "qwen4_exp_text": _QWEN4,
    "zamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 0,
        "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
        "n_mamba_heads": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_headdim": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"], "num_experts_per_tok": 1,
        "router_hidden_size": 8,
    },
}  # fmt: skip

# Models of text and images whose text model has a config of its own.
TEXT_CONFIG = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
_IMAGES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
    "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "mm_embed_dim": 16,
    "embedding_size": 16, "output_proj_dims": 16, "mm_posemb_size": 16,
    "num_position_embeddings": 16,
}  # fmt: skip

# Settings that change the kind of layers, tested beside the settings above.
VARIANTS = [
    ("falcon", {"alibi": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("gemma3_text", {"sliding_window": 16}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None}),
    ("opt", {"do_layer_norm_before": False}),
    ("phi3", {"sliding_window": 12}),
    ("qwen2", {"tie_word_embeddings": True, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen2_moe", {"tie_word_embeddings": True}),
    ("stablelm", {"use_parallel_residual": True}),
]


def each(names, of_each_kind):
    """Parameters of a test: the architectures of each kind, and in `make nightly` the others."""
    return [
        name if name in of_each_kind else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]


def small_config(model_type, changes=None):
    """The config of a small model. `changes` apply to the text model."""
    config_class = type(AutoConfig.for_model(model_type))
    if model_type in TEXT_CONFIG:
        text = small_config(TEXT_CONFIG[model_type], changes).to_dict()
        others = (name for name in config_class.sub_configs if name != "text_config")
        return config_class(text_config=text, **dict.fromkeys(others, _IMAGES))
    known = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
    settings = {name: value for name, value in SIZES.items() if name in known}
    settings |= SPECIAL.get(model_type, {})
    settings = {name: value for name, value in settings.items() if value is not None}
    return config_class(**settings | (changes or {}))


def small_model(model_type, changes=None):
    """A small model in float32 whose weights are random, also those that start as 0 or 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type, changes)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for module in model.modules():
            # Some models set the row of the padding token to 0 when they are loaded.
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model.requires_grad_(False)

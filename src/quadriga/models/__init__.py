"""Models: loading and checking folders, log-probabilities and KL, and a tiny model.

- `folder`: check a model folder without loading weights; its end tokens.
- `architectures`: which architectures are supported, and in which form each is computed.
- `limits`: how many tokens a model can compute, and whether its embedding has a row for every id.
- `loading`: tokenizers, causal language models, value models and reward models from a folder.
- `adapters`: LoRA, in PEFT's layers and format.
- `weights`: read parts of a folder's tensors; their names in the model, and their dtypes.
- `log_probs`: log-probabilities, entropy and KL, from logits or from hidden states.
- `images`: what a model of text and images needs beside its weights.
- `tiny`: write a small model and its tokenizer.
- `memory`: models without weights, whose allocations are counted.
- `cpu_linear`: products by oneDNN.

May import every package below `models` in docs/architecture.md. Names load when they are first
used, so importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names
from quadriga.observability.quiet import silence_imports

silence_imports()
if TYPE_CHECKING:
    from quadriga.models.folder import (
        check_model_folder as check_model_folder,
        end_token_ids as end_token_ids,
    )
    from quadriga.models.limits import (
        check_context_window as check_context_window,
        check_vocabulary as check_vocabulary,
    )
    from quadriga.models.loading import (
        load_causal_lm as load_causal_lm,
        load_tokenizer as load_tokenizer,
        load_value_model as load_value_model,
    )
    from quadriga.models.tiny import (
        TinyModel as TinyModel,
        train_tokenizer as train_tokenizer,
        write_tiny_model as write_tiny_model,
    )
    from quadriga.observability.quiet import quiet_libraries as quiet_libraries
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

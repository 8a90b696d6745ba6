"""The chat templates of several families, with tokenizers that have their special tokens."""

import json

from transformers import AddedToken

from quadriga.models.tiny import train_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen2 adds a system message if there is none.
QWEN = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    "{% endif %}" + CHATML
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}"
    "{{ '<|header|>' + m.role + '<|end_header|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
# Gemma calls the assistant "model".
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% set r = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + r + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Qwen3 leaves the thoughts of earlier turns out.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CASES = {
    "ChatML": (CHATML, ["<|im_start|>", "<|im_end|>"], ["Three.<|im_end|>", "Four.<|im_end|>"]),
    "Qwen": (QWEN, ["<|im_start|>", "<|im_end|>"], ["Three.<|im_end|>", "Four.<|im_end|>"]),
    "Llama 3": (
        LLAMA3, ["<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"],
        ["Three.<|eot|>", "Four.<|eot|>"],
    ),
    "Gemma": (
        GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        ["Three.<end_of_turn>", "Four.<end_of_turn>"],
    ),
}  # fmt: skip
CHAT = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Four."},
]


def family(template, special=()):
    tokenizer = train_tokenizer(["How many? And one more? Three. Four. Be kind."] * 4)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True) for text in special]}
    )
    tokenizer.chat_template = template
    return tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

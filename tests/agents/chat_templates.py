# ruff: noqa: E501
"""Chat templates in the form of those of 13 families, with tokenizers that have their tokens.

They are written for the tests. Each does what the template of its family does at the border of two
turns: its roles, its form of a call, its end tokens, and what it changes in earlier turns.
"""

from transformers import AddedToken

from quadriga.models.tiny import train_tokenizer

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_CALLS = """\
{%- macro calls(m) %}{% for c in m.tool_calls or [] %}{% set f = c.function %}
{{- '\n' if m.content or not loop.first }}{{ '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{% endmacro %}"""

# Results of tools that follow each other are one turn of the user.
_QWEN_BODY = """\
{%- if tools %}{{ '<|im_start|>system\nBe kind.\n<tools>' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{{ THOUGHT }}{{ CONTENT }}{{ calls(m) }}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN25 = _CALLS + _QWEN_BODY.replace("THOUGHT", "''").replace("CONTENT", "m.content")
# The thoughts of turns before the last question are left out.
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _CALLS
    + _QWEN_BODY.replace("THOUGHT", "''").replace(
        "CONTENT",
        "m.content if loop.index0 > ns.last else m.content.split('</think>')[-1].lstrip('\\n')",
    )
)
QWEN3_CODER = """\
{%- macro calls(m) %}{% for c in m.tool_calls or [] %}{% set f = c.function %}
{{- '\n<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments | items %}
{{- '<parameter=' + k + '>\n' }}{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}{% endmacro %}""" + _QWEN_BODY.replace(
    "THOUGHT", "''"
).replace("CONTENT", "m.content")
HERMES = (
    _CALLS
    + """\
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '</tools><|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>tool\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{{ calls(m) }}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)
LLAMA3 = """\
{{- '<|begin|>' }}{% if tools %}{{ '<|header|>system<|end_header|>\n\nTools:' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|eot|>' }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set f = m.tool_calls[0].function %}{{ '<|header|>assistant<|end_header|>\n\n' }}
{{- '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}<|eot|>' }}
{%- elif m.role == 'tool' %}{{ '<|header|>ipython<|end_header|>\n\n' }}{{ m.content | tojson }}{{ '<|eot|>' }}
{%- else %}{{ '<|header|>' + m.role + '<|end_header|>\n\n' + m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"""
# The tools stand before the last question. Turns must alternate; a call has an id of nine letters.
MISTRAL = """\
{{- '<s>' }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% set ns = namespace(i=0) %}
{%- for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{% set out = c.function | tojson %}
{{- out[:-1] + ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}
{%- else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"""
GEMMA = """\
{{- '<bos>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# The last answer ends with another token than the same answer in the history; thoughts are left out.
HARMONY = """\
{%- set ns = namespace(call=none) %}{{ '<|start|>system<|message|>You are a model.<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>namespace functions {' }}{% for t in tools %}{{ 'type ' + t.function.name + ' = any;' }}{% endfor %}{{ '}<|end|>' }}{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('channel tags in content') }}{% endif %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set ns.call = f.name %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}{{ f.arguments | tojson }}{{ '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('no previous assistant message with a tool call') }}{% endif %}
{{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
PHI = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""
# Arguments must be JSON; thoughts of earlier turns are left out; no generation prompt after a result.
DEEPSEEK = """\
{{- '<s>' }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|outputs_begin|>' }}{% endif %}
{{- '<|output_begin|>' + m.content + '<|output_end|>' }}{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|outputs_end|>' }}{% endif %}
{%- elif m.tool_calls %}{{ '<|Assistant|>' + m.content + '<|calls_begin|>' }}{% for c in m.tool_calls %}
{{- '<|call_begin|>function<|sep|>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```<|call_end|>' }}{% endfor %}{{ '<|calls_end|></s>' }}
{%- else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
GRANITE = """\
{%- for t in tools or [] %}{{ '<|start_role|>available_tools<|end_role|>' + t | tojson + '<|end_of_text|>\n' }}{% endfor %}
{%- for m in messages %}{{ '<|start_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_role|>' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<|tool_call|>' if loop.first }}{{ [{'name': c.function.name, 'arguments': c.function.arguments}] | tojson }}{% endfor %}
{{- '<|end_of_text|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_role|>assistant<|end_role|>' }}{% endif %}"""
# Only the last turn has an end token.
LAST_END = """\
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|end|>' }}{% endif %}"""
PLAIN = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

FAMILIES = {
    "Qwen2.5": QWEN25, "Qwen3": QWEN3, "Qwen3-Coder": QWEN3_CODER, "Hermes": HERMES, "Llama 3": LLAMA3,
    "Mistral": MISTRAL, "Gemma": GEMMA, "gpt-oss": HARMONY, "Phi": PHI, "ChatML": CHATML,
    "DeepSeek": DEEPSEEK, "Granite": GRANITE, "last end": LAST_END, "plain": PLAIN,
}  # fmt: skip
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>",
    "<|python_tag|>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>",
    "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>",
    "<|return|>", "<|constrain|>", "<|endoftext|>", "<|User|>", "<|Assistant|>",
    "<|outputs_begin|>", "<|outputs_end|>", "<|output_begin|>", "<|output_end|>",
    "<|calls_begin|>", "<|calls_end|>", "<|call_begin|>", "<|call_end|>", "<|sep|>",
    "<|start_role|>", "<|end_role|>", "<|end_of_text|>", "<|tool_call|>",
]  # fmt: skip


def tokenizer_of(name):
    """A tokenizer with the template of a family, or a template."""
    tokenizer = train_tokenizer(["How many? And one more? Three. Four. Be kind.\n\n"] * 4)
    added = [AddedToken(text, special=True) for text in SPECIAL]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.chat_template = FAMILIES[name] if isinstance(name, str) and name in FAMILIES else name
    return tokenizer

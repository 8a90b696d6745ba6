"""The tables of docs/concepts/architectures.md, from the tables of `models/architectures.py`.

`python tests/architectures/document.py` writes them into the page.
"""

from pathlib import Path

from quadriga.models.architectures import ARCHITECTURES, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "architectures.md"
DIVIDED = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "jamba",
    "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "longcat_flash", "mellum", "mimo_v2_flash",
    "minimax_m2", "mixtral", "nemotron_h", "olmo_hybrid", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text",
    "solar_open",
)  # fmt: skip
"""Architectures whose parameters are several tensors of the files each: experts of a layer."""
RENAMED = (
    "aria_text", "flint", "gemma3", "gemma4_unified", "gpt_neox", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "hy_v4", "lfm3",
)  # fmt: skip
"""Architectures whose parameters have other names in the files."""
COMPUTED = ("hrm_text", "inkling2_text")
"""Architectures whose parameters transformers computes from the tensors of the files."""
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def names(model_types):
    return ", ".join(f"`{name}`" for name in sorted(model_types))


def tables():
    """The supported and the refused architectures as Markdown."""
    lines = ["### Supported", "", "| rows in training | prompts in generation | `model_type` |"]
    lines.append("|---|---|---|")
    for form in dict.fromkeys(ARCHITECTURES.values()):
        listed = names(name for name, other in ARCHITECTURES.items() if other == form)
        lines.append(f"| {form.rows} | {form.prompts} | {listed} |")
    lines += ["", "### Refused", "", "| reason | `model_type` |", "|---|---|"]
    lines += [f"| {reason} | {names(listed)} |" for reason, listed in REFUSED.items()]
    lines += [
        "",
        "### Weights in files",
        "",
        "| parameters, and tensors of the files | `model_type` |",
    ]
    lines += ["|---|---|", f"| one is several tensors, as those of experts | {names(DIVIDED)} |"]
    lines += [f"| another name | {names(RENAMED)} |"]
    lines += [f"| computed by transformers: `vllm` and `sglang` refuse them | {names(COMPUTED)} |"]
    return "\n".join(lines)


def page_with_tables(text):
    """The page with its tables replaced by the current ones."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))

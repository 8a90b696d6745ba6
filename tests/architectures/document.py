"""The tables of docs/concepts/architectures.md, from the tables of `models/architectures.py`.

`python tests/architectures/document.py` writes them into the page.
"""

from __future__ import annotations

from pathlib import Path

from quadriga.models.architectures import ARCHITECTURES, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "architectures.md"
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
    return "\n".join(lines)


def page_with_tables(text):
    """The page with its tables replaced by the current ones."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))

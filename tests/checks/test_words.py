"""The text of the project uses the words of the field, not the metaphors listed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from source_tree import ROOT

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")
PAGES = ("README.md", "CHANGELOG.md")
SUFFIXES = {".py", ".md"}

# Pattern → the word to write instead. A pattern leaves ordinary uses of its word alone
# (`math.floor`, "room for two more", "zero elsewhere"), constants such as `FLOOR`, and the names of
# modules in a path.
BANNED = {
    r"(?<![.\w])[Ff]loors?\b(?!\(| of\b| division)": "layer",
    r"\b[Rr]ooms\b": "packages",
    r"\b([Tt]he|[Tt]his|that|each|every|own|its|a|no) room\b(?! (for|to|that|left)\b)": "package",
    r"\b[Ss]eams?\b": "interface",
    r"\b[Dd]oors?\b": "on entry, a check of the arguments",
    r"\b(lies?|lying|lives?|stays?|is|are|was|were) elsewhere\b": "is remote, is stored elsewhere",
    r"\b(is|are|was|were) here\b(?! (to|for|because)\b)": "is local",
    r"\b[Kk]in\b": "related algorithms, subclasses",
    r"\b[Ww]hoever\b": "the process that, the user who",
    r"\b[Nn]obody\b": "no process, no reference",
    r"\b[Ss]omebody\b": "a process, a user",
    r"(?<!/)\b[Cc]ross(es|ed|ings?)\b": "is sent between processes, transport",
    r"\b[Tt]ravel(s|led|ling)?\b": "is sent, is pickled with",
    r"\b[Rr]eckon\w*": "calculate",
    r"(?<!/)\b[Tt]haw\w*": "decode",
    r"(?<!/)\b[Hh]osting\b": "rank_host",
    r"\b(go|goes|going|went) along\b": "is sent with",
    r"\b[Ww]ay (back|out)\b": "the result, the argument",
    r"\bon (its|their) way\b": "in flight",
    r"\b[Tt]he whole way\b": "from start to end",
    r"\b[Tt]here and back\b": "in both directions",
    r"\b[Mm]akes? up for\b": "corrects",
    r"\b[Tt]akes? up\b(?! (memory|space|time|to|\d))": "restores, loads",
    r"\b[Hh]eld(-| )out\b": "validation",
    r"\bin silence\b": "silently, is ignored",
    r"\bat hand\b": "available",
    r"\bin sight\b": "visible",
    r"\b[Ss]peaks\b": "writes, reports",
    r"\blives in the Ray namespace\b": "the namespace has",
    r"\btorn\b": "spread",
    r"\b(asks|ask) of the nodes\b": "needs",
    r"\bdied while\b": "ended while",
    r"\bno call was in flight\b": "it was idle",
    r"\b[Tt]akes? back\b": "cancels",
    r"\bcomes? back here\b": "recurses",
    r"\bcalled like a\b": "has the name of",
    r"\bend it as a whole\b": "end it with all its descendants",
    r"\bcome back in order\b": "are returned in order",
    r"\bcarr(y|ies) calls\b": "sends calls",
    r"\bkeep large memory alive\b": "keep in memory",
    r"(?<=\.) Raise `?[A-Z]\w*Error\b": "Raises `XError` (only a first line is imperative)",
}


def word_faults(text: str) -> list[str]:
    """`line: 'phrase' → what to write instead`, for every banned phrase of a text.

    A space in a pattern also matches the end of a line, with the `#` of a comment that goes on.
    """
    found = [
        (text.count("\n", 0, match.start()) + 1, " ".join(match.group(0).split()), better)
        for pattern, better in BANNED.items()
        for match in re.finditer(pattern.replace(" ", r"[\s#]+"), text)
    ]
    return [f"{line}: {phrase!r} → {better}" for line, phrase, better in sorted(found)]


def texts() -> list[Path]:
    """Every source file and page of the project, except this list."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found += [ROOT / page for page in PAGES]
    own = Path(__file__).resolve()
    return sorted(path for path in found if path.suffix in SUFFIXES and path != own)


def test_the_words_are_those_of_the_field():
    faults = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in texts()
        for fault in word_faults(path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join([f"{len(faults)} phrases to rewrite", *faults])


@pytest.mark.parametrize(
    "line",
    [
        "Imports point down the floors.",
        "rooms = 3",
        "the file can be read from the top of the room",
        "the seam between both",
        "checked at the door",
        "a field that lies elsewhere",
        "# a field that lies\n# elsewhere",
        "a worker lives elsewhere",
        "what is here is copied",
        "GRPO and its kin",
        "for whoever asks",
        "Nobody waits.",
        "somebody else's process",
        "the four crossings",
        "a batch as it crosses",
        "arguments that travel",
        "learns to reckon",
        "def thaw(value):",
        "from x import hosting",
        "buffers that go along",
        "on the way back",
        "a result on its way",
        "a weight that makes up for it",
        "take up the checkpoint",
        "held-out problems",
        "ignored in silence",
        "the text is at hand",
        "a table in sight",
        "the rank speaks",
        "the process died while it was idle",
        "takes back an exception",
        "that would come back here",
        "a key that is called like a secret",
        "the system that carries calls to ranks",
        "Return the value. Raise KeyError if there is none.",
    ],
)
def test_a_planted_phrase_is_reported(line):
    assert len(word_faults(f"x = 1\n{line}\n")) == 1
    assert word_faults(f"x = 1\n{line}\n")[0].startswith("2: ")


@pytest.mark.parametrize(
    "line",
    [
        "rows = math.floor(x) + torch.floor(y)",
        "the floor of the ratio, by floor division",
        "from quadriga.models.log_probs.softmax_tiles import FLOOR",
        "There is room for two more rows; the last node has no room left.",
        "a cache with room to grow takes the room that the node has",
        "log-probability under the mask, zero elsewhere",
        "The cross-entropy is averaged across ranks.",
        "gc.freeze() moves live objects to the permanent generation.",
        "The store takes up memory and takes up 3 GiB; this takes up to a second.",
        "Rows are split evenly along dimension 0.",
        "a kindness, skin, kind",
        "protocol/thaw   single_controller/crossing",
    ],
)
def test_ordinary_english_passes(line):
    assert word_faults(line) == []

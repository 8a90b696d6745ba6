"""A few invented words stay out of the project; each has an ordinary word of the field."""

import re
from pathlib import Path

from source_tree import ROOT

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")
PAGES = ("README.md", "CHANGELOG.md")
SUFFIXES = {".py", ".md"}

# Pattern → the word to write instead.
BANNED = {
    r"\b[Kk]in\b": "related algorithms, subclasses",
    r"\b[Rr]eckon\w*": "calculate",
    r"(?<!/)\b[Tt]haw\w*": "decode",
    r"(?<!/)\b[Hh]osting\b": "rank_host",
    r"\b[Ss]eams?\b": "interface",
    r"\b(lies?|lying|lives?) elsewhere\b": "is remote, is stored elsewhere",
    r"\b(go|goes|going|went) along\b": "is sent with",
    r"\bin silence\b": "silently, is ignored",
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


def test_a_planted_phrase_is_reported_and_ordinary_english_passes():
    for line in ("the seam between both", "# a field that lies\n# elsewhere"):
        (fault,) = word_faults(f"x = 1\n{line}\n")
        assert fault.startswith("2: ")
    assert word_faults("a kindness, skin, kind; zero elsewhere; protocol/thaw") == []

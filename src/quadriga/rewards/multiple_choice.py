"""The built-in rule for multiple choice: compare the letter of the answer.

A response is read in two steps. First every letter from A to J that stands for a choice becomes a
mark, `\\boxed{\\text{(B)}}` as well as `option B`, and several that are named together become one
mark without a letter. Then the last statement that names a mark decides.
"""

import re
from collections.abc import Mapping
from unicodedata import normalize

from quadriga.rewards.functions import after_thoughts

# Formatting that says nothing about the answer.
_FONT = re.compile(r"\\(?:text|textbf|mathrm|mathbf) ?\{([^{}]*)\}")
_SIGNS = re.compile(r"[*`$\"“”✅]|\\[()\[\]]|'(?=[A-J]')|(?<='[A-J])'")
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{(?: ?\\boxed ?\{)? ?([^{}\n]*)\}*")
_TAG = re.compile(r"</?answer>")

# A letter alone: not the B of Banana, B-flat, B = 3 or B12, and not the article of "A dog".
_END = (
    r"(?=\s*$|\n| ?[,;:!?})\]/<。，(]|\.(?!\w)(?! [A-Z]\.)"
    r"| (?:or|and|is|are|because|since|as|which|so|from|with|gives|works|fits|rather|[-–—])(?!\w))"
)
_LETTER = re.compile(
    r"(?<![\w'’\\{^+=-])(?:(?i:option|choice|letter) )?"
    rf"(?:[(\[] ?([A-J]) ?[)\]](?!\w)|([A-J]){_END})",
    re.ASCII,
)
_SMALL = re.compile(
    r"((?i:^|answer:|answer is:?(?= \(?[a-e]))\s*)\(?(?:([b-j])(?:\)|\.?$)|(a)\))", re.MULTILINE
)
_BOXED = re.compile(r"(?i:option |choice )?(?:\( ?([A-J]) ?\)|([A-J])(?= *$|[.:)](?:[ \\]|$)))")
_JOINED = r"(?: ?\([^()‹›]{0,60}\))?(?:,| and| or|, and|, or|/|\s*[,;]?\s*(?:and|or))? ?(?:boxed )?"
_SEVERAL = re.compile(rf"‹.›(?:{_JOINED}‹.›(?! (?:is|gives|works)))+")

_FILLERS = (
    r"is|be|would|must|should|has|to|the|this|that|it|question(?: \d+)?|here|therefore|thus|then"
    "|hence|clearly|simply|indeed|boxed|correct|right|one|answer|final|either|both|most likely"
)
_WORDS = rf"(?:[ ,:=→\n-]|\b(?:{_FILLERS})\b){{0,10}}"
_NAMED = (
    r"\b(?:answers?|guess)|(?:correct|right|best|closest|final|selected|answer)"
    " (?:option|choice|letter|one)|^(?:selection|conclusion|result)(?=:)"
)
_CONCLUDES = (
    "so|thus|therefore|hence|it(?:['’]s)?|this|which|that|choose|pick|select|go with|leaves"
    "|corresponds to|matches|choice is|only"
)
_BEFORE = r"(?:^|[.,;:!] ?|\b(?:so|thus|therefore|hence|only|that|no)\b,? ?)"
_RIGHT = (
    r"(?:is|are) (?:the )?(?:correct|right|best|answer|only|consistent)\b"
    r"|works\b|fits\b|is consistent"
)
_WRONG = r"(?!\?|,? (?:which |that )?(?:is|are|was) (?:not|wrong|incorrect|false)\b)"
_STATEMENTS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"boxed (‹.›)",
        r"####\s?(‹.›)(?!\?)",
        rf"(?i:{_NAMED})\b{_WORDS}(?:\b(?:is|be)\b|[:=→\n-]){_WORDS}(‹.›){_WRONG}",
        rf"(?i:\b(?:{_CONCLUDES})\b){_WORDS}(‹.›)(?= ?(?:[.,;:!)]|$))",
        rf"(?i:{_BEFORE})(‹.›) (?:{_RIGHT})",
        r"(?:答案|选项)(?:应该)?(?:是|为)?:? ?(‹.›)|选 ?(‹.›)",
        r"(?i:\b(?:respuesta|r[ée]ponse|antwort|ответ))(?: correcta)? ?"
        r"(?:\b(?:es|est|ist)\b|:) ?(‹.›)",
    )
)
_ALONE = re.compile(r"(?i:(?:option|choice|solution|probably|[=-]>):? )?(‹.›)[.):,]?")
_MARK = re.compile("‹.›")
_NONE = "‹?›"
"""The mark of several letters that are named together."""
_SUPPOSED = re.compile(r"(?i)\b(?:if|unless|suppose|whether|assum\w+|and not)\b[^.,;:!?\n]*$")


def chosen_letter(solution: str) -> str | None:
    """Return the letter of the answer, A to J; None if there is none, or more than one.

    So \\boxed{B}.                              B
    The answer is (A) or (B); it must be (B).  B
    <think>Answer: A</think> C                 C
    B) because the sum is even                 B
    The answer is A or B.                      None
    If the answer is A, then x = 1.            None
    Answer: A dog                              None
    A) 3 B) 4 C) 5                             None
    """
    text = _with_marks(solution)
    stated = [
        (found.end(), found[found.lastindex or 0])
        for form in _STATEMENTS
        for found in form.finditer(text)
        if not _SUPPOSED.search(text, max(0, found.start() - 100), found.start())
    ]
    mark = max(stated)[1] if stated else _opening(text)
    return mark[1] if mark and mark != _NONE else None


def _opening(text: str) -> str | None:
    """Return the mark of a text that only names a choice: `B`, `B) Paris`, options and then `B`."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    alone = {found[1] for line in lines if (found := _ALONE.fullmatch(line))}
    if alone:
        return alone.pop() if len(alone) == 1 else None
    first = re.match(r"(‹[A-HJ]›)(?! (?:is|are|and|or)\b)", lines[0])
    return first[1] if first and len(set(_MARK.findall(text))) == 1 else None


def _with_marks(solution: str) -> str:
    """Return the text after the thinking, with ‹B› for choice B and ‹?› for several."""
    text = after_thoughts(normalize("NFKC", solution))
    text = _BOX.sub(_boxed, _SIGNS.sub("", _FONT.sub(r"\1", text)))
    text = _TAG.sub("\nanswer: ", text.replace("\\ ", " "))
    text = re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text))
    text = _SMALL.sub(lambda found: f"{found[1]}({(found[2] or found[3]).upper()})", text)
    text = _LETTER.sub(lambda found: f"‹{found[1] or found[2]}›", text)
    return _SEVERAL.sub(
        lambda found: _NONE if len(set(_MARK.findall(found[0]))) > 1 else found[0], text
    )


def _boxed(box: re.Match[str]) -> str:
    letter = _BOXED.match(box[1])
    return f"boxed ({letter[1] or letter[2]}) " if letter else box[0]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
) -> dict[str, float | str | None]:
    """Return the score, 1.0 if the response chooses `ground_truth` and else 0.0, and the letter.

    Args:
        ground_truth: a letter, or the number of the choice from 0.

    Raises:
        ValueError: the ground truth is neither.
    """
    del data_source, extra_info
    answer = chosen_letter(solution_str)
    return {"score": float(answer == _letter(ground_truth)), "answer": answer}


def _letter(truth: object) -> str:
    if isinstance(truth, int) and 0 <= truth < 10:
        return "ABCDEFGHIJ"[truth]
    text = str(truth).strip().strip("().").upper()
    if len(text) != 1 or not "A" <= text <= "J":
        wanted = "a letter from A to J or a number from 0 to 9"
        raise ValueError(f"the ground truth must be {wanted}, got {truth!r:.100}")
    return text

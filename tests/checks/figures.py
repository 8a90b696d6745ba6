"""Figures of the package: lines, uses of `Any`, comments, sizes of folders and files.

    python tests/checks/figures.py          # prints JSON

`Any` is counted as a word in the source text, imports included. Comments are `#` comments
except directives of tools (`# noqa`, `# type:`, `# fmt:`). The modules of a folder are the Python
files directly in it, without its `__init__`.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence

from source_tree import PACKAGE, ROOT, SourceFile, package_files

ANY = re.compile(r"\bAny\b")
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|ruff:|mypy:|pragma)")
LONG_FILE = 800
SHORT_FILE = 25

Figures = dict[str, object]


def any_count(file: SourceFile) -> int:
    """The number of occurrences of the word `Any`."""
    return len(ANY.findall(file.text))


def code_lines(file: SourceFile) -> int:
    """The number of lines that are neither blank, nor comment, nor part of a docstring."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in _statements(file.tree):
        if isinstance(node, described) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            docstrings.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return sum(
        bool(text) and not text.startswith("#") and number not in docstrings
        for number, text in enumerate(map(str.strip, file.text.splitlines()), start=1)
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The module and its statements, without the expressions in them."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _statements(child)


def comment_count(file: SourceFile) -> int:
    """The number of `#` comments that are not directives of a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    return sum(
        token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string) for token in tokens
    )


def per_1000_lines(count: int, lines: int) -> float:
    return round(1000 * count / max(lines, 1), 1)


def package_of(file: SourceFile) -> str:
    """`src/quadriga/config/plan.py` → `config`; files of the top folder belong to `quadriga`."""
    inside = file.name.removeprefix(PACKAGE.relative_to(ROOT).as_posix() + "/")
    return inside.split("/")[0] if "/" in inside else "quadriga"


def modules_per_folder(files: Sequence[SourceFile]) -> dict[str, int]:
    """For each folder the number of Python files directly in it, without its `__init__`."""
    counts: dict[str, int] = {}
    for file in files:
        counts[file.folder] = counts.get(file.folder, 0) + (not file.is_package)
    return dict(sorted(counts.items(), key=lambda entry: -entry[1]))


def density(files: Sequence[SourceFile]) -> Figures:
    """Lines, and `Any` and comments per 1000 lines, of some files together."""
    lines = sum(file.lines for file in files)
    untyped = sum(map(any_count, files))
    comments = sum(map(comment_count, files))
    return {
        "lines": lines,
        "code_lines": sum(map(code_lines, files)),
        "any": untyped,
        "any_per_1000_lines": per_1000_lines(untyped, lines),
        "comments": comments,
        "comments_per_1000_lines": per_1000_lines(comments, lines),
    }


def figures(files: Sequence[SourceFile]) -> Figures:
    """All figures: of the package as a whole, of each sub-package, of folders and files."""
    packages = sorted({package_of(file) for file in files})
    return {
        "total": density(files),
        "packages": {
            name: density([file for file in files if package_of(file) == name]) for name in packages
        },
        "modules_per_folder": modules_per_folder(files),
        "files_above_800_lines": {f.name: f.lines for f in files if f.lines > LONG_FILE},
        "files_under_25_lines": {
            f.name: f.lines for f in files if f.lines < SHORT_FILE and not f.is_package
        },
    }


if __name__ == "__main__":
    print(json.dumps(figures(package_files()), indent=2))

"""Figures of the package: files, lines of code, uses of `Any`.

    python tests/checks/figures.py          # prints a line for each folder of the package

`Any` is counted as a word in the source text, imports included. The modules of a folder are the
Python files directly in it, without its `__init__`.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from source_tree import PACKAGE, ROOT, SourceFile, package_files

ANY = re.compile(r"\bAny\b")


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


def modules_per_folder(files: Sequence[SourceFile]) -> Counter[str]:
    """For each folder the number of Python files directly in it, without its `__init__`."""
    return Counter(file.folder for file in files if not file.is_package)


def main() -> None:
    """Print the figures of each folder of the package, and of the package as a whole."""
    lines: Counter[str] = Counter()
    untyped: Counter[str] = Counter()
    for file in package_files():
        inside = file.name.removeprefix(PACKAGE.relative_to(ROOT).as_posix() + "/")
        for name in (inside.split("/")[0] if "/" in inside else ".", "total"):
            lines[name] += code_lines(file)
            untyped[name] += any_count(file)
    for name, count in lines.items():
        print(f"{name:<20} {count:>6} lines of code  {untyped[name]:>4} Any")


if __name__ == "__main__":
    main()

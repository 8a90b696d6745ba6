"""Files, functions and classes stay below their size limits."""

import ast

from source_tree import SourceFile, all_python_files, package_files

FILE_LINES = 800
FUNCTION_LINES = 80
CLASS_LINES = 400
SHORT = 15  # at least half of all functions have fewer lines


def functions(file: SourceFile) -> list[tuple[str, int]]:
    """(name, lines) of every function, without decorators."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.name, lines_of(n)) for n in ast.walk(file.tree) if isinstance(n, kinds)]


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def size_faults(file: SourceFile) -> list[str]:
    long = file.lines > FILE_LINES
    faults = [f"{file.name}: {file.lines} lines > {FILE_LINES}"] if long else []
    faults += [
        f"{file.name}: {name} has {lines} lines > {FUNCTION_LINES}"
        for name, lines in functions(file)
        if lines > FUNCTION_LINES
    ]
    faults += [
        f"{file.name}: class {node.name} has {lines_of(node)} lines > {CLASS_LINES}"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and lines_of(node) > CLASS_LINES
    ]
    return faults


def test_files_functions_and_classes_are_small():
    faults = [fault for file in all_python_files() for fault in size_faults(file)]
    assert not faults, "\n".join(faults)


def test_half_of_the_functions_are_short():
    lengths = [lines for file in package_files() for _, lines in functions(file)]
    assert 2 * sum(lines < SHORT for lines in lengths) >= len(lengths)


def test_planted_faults_are_reported():
    long_function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
    long_class = "class C:\n" + "    x = 1\n" * CLASS_LINES
    for text in (long_function, long_class, "x = 1\n" * (FILE_LINES + 1)):
        assert len(size_faults(SourceFile("src/quadriga/x.py", text))) == 1
    assert size_faults(SourceFile("src/quadriga/x.py", "x = 1\n" * FILE_LINES)) == []

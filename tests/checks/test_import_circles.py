"""No two modules and no two folders of the package import each other, not even for types."""

import pytest
from import_graph import circle, describe, folder_edges, import_graph
from source_tree import SourceFile, package_files


def graph_of(**texts):
    """The graph of files given as `folder__module="text"`; `__` stands for a slash."""
    given = {f"src/quadriga/{n.replace('__', '/')}.py": text for n, text in texts.items()}
    inits = {f"{name.rpartition('/')[0]}/__init__.py": "" for name in given}
    given = inits | {n.replace("INIT", "__init__"): text for n, text in given.items()}
    return import_graph([SourceFile(name, text) for name, text in given.items()])


def test_no_import_circle():
    graph = import_graph(package_files())
    found = circle(graph)
    assert not found, describe(graph, found)


LAZY = (
    "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n"
    "    from quadriga.p.a import A as A\n"
    "    from quadriga.p.b import B as B\n"
    "else:\n"
    "    __getattr__, __dir__, __all__ = lazy_names(__name__)\n"
)


CIRCLES = {
    "two modules": (
        {"p__a": "from quadriga.p.b import B", "p__b": "import quadriga.p.a"},
        ["quadriga.p.a", "quadriga.p.b"],
    ),
    "types one way, inside a function the other way": (
        {"p__a": "if TYPE_CHECKING:\n    from quadriga.p.b import B\n",
         "p__b": "def f():\n    from quadriga.p import a\n"},
        ["quadriga.p.a", "quadriga.p.b"],
    ),
    "three modules": (
        {"p__a": "from . import b", "p__b": "from quadriga.q import c",
         "q__c": "import_module('quadriga.p.a')"},
        ["quadriga.p.a", "quadriga.p.b", "quadriga.q.c"],
    ),
    "names re-exported by their own package": (
        {"p__INIT": LAZY, "p__a": "from quadriga.p import B", "p__b": "from quadriga.p import A"},
        ["quadriga.p.a", "quadriga.p.b"],
    ),
    "a name that the package itself defines": (
        {"p__INIT": "from quadriga.p.a import A\nX = 1\n", "p__a": "from quadriga.p import X"},
        ["quadriga.p", "quadriga.p.a"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CIRCLES)
def test_a_planted_circle_is_found(name):
    texts, modules = CIRCLES[name]
    graph = graph_of(**texts)
    found = circle(graph)
    assert sorted(found) == modules
    assert len(describe(graph, found).splitlines()) == len(modules)


NO_CIRCLES = {
    "one way": {"p__a": "import quadriga.p.b", "p__b": "import torch"},
    "lazy re-exports are no edges": {
        "p__INIT": LAZY, "p__a": "from quadriga.p import B", "p__b": "import os"
    },
    "a name re-exported from another package": {
        "q__INIT": LAZY, "r__c": "from quadriga.q import A", "p__a": "A = 1", "p__b": ""
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CIRCLES)
def test_a_graph_without_a_circle_passes(name):
    assert circle(graph_of(**NO_CIRCLES[name])) == []


def mutual_folders(edges):
    """{(folder, folder): the imports of both directions}, each pair once."""
    pairs = sorted(pair for pair in edges if pair[0] < pair[1] and pair[::-1] in edges)
    return {pair: edges[pair] + edges[pair[::-1]] for pair in pairs}


def test_no_two_folders_import_each_other():
    assert mutual_folders(folder_edges(package_files())) == {}


def test_planted_mutual_imports_of_folders_are_reported():
    texts = {"p/__init__": "", "p/c": "", "p/q/__init__": "", "p/q/b": "import quadriga.p.c"}

    def pairs(text):
        files = {**texts, "p/a": text}.items()
        found = [SourceFile(f"src/quadriga/{name}.py", code) for name, code in files]
        return list(mutual_folders(folder_edges(found)))

    assert pairs("import quadriga.p.q.b") == [("p", "p/q")]
    assert pairs("import quadriga.p.c") == []

"""`lazy_names` imports a public name of a package when it is first used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from quadriga.lazy import lazy_names


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package with one module `part` that is already imported and defines `answer`."""
    package, part = ModuleType("some_package"), ModuleType("some_package.part")
    part.answer = 42
    (tmp_path / "names.py").write_text("from some_package.part import answer as answer\n")
    package.__file__ = str(tmp_path / "names.py")
    monkeypatch.setitem(sys.modules, "some_package", package)
    monkeypatch.setitem(sys.modules, "some_package.part", part)
    package.__getattr__, package.__dir__, package.__all__ = lazy_names("some_package")
    return package


def test_a_name_is_listed_before_it_is_used_and_stored_afterwards(package):
    assert "answer" in dir(package)
    assert package.__all__ == ["answer"]
    assert "answer" not in vars(package)
    assert package.answer == 42
    assert vars(package)["answer"] == 42


def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="module 'some_package' has no attribute 'answers'"):
        _ = package.answers

"""Code that benchmarks inject into processes patches names that the package has."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranvier.train.trainer import Trainer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(BENCHMARKS.glob("fault_*.py"))
DEFAULT_MODULE = Trainer.__module__
"""Module after whose import most faults are injected."""


def read_programs(path: Path) -> Iterator[ast.Module]:
    """Yields the programs in the strings of a file, with `0` for the values of f-strings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {part for node in formatted for part in node.values}
    texts = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        for node in formatted
    ]
    texts += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts
    ]
    for text in texts:
        if "before(" in text or "substitute(" in text:
            try:
                yield ast.parse(text)
            except SyntaxError:
                # A template, such as `{name!r}`: its names are known only when it is injected.
                continue


def list_modules(path: Path) -> list[str]:
    """The modules that faults of a file are injected into."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = [text for text in strings if text.startswith("ranvier.") and " " not in text]
    return [DEFAULT_MODULE, *named]


def find_unknown_names(program: ast.Module, modules: list[str]) -> list[str]:
    """Returns the patched attributes that their owner does not have.

    Owners are names of a module that is patched, or what the program itself imports.
    """
    scope: dict[str, Any] = {}
    for name in reversed(modules):
        scope |= vars(importlib.import_module(name))
    imports = [node for node in program.body if isinstance(node, ast.Import | ast.ImportFrom)]
    try:
        exec(compile(ast.Module(imports, []), "<imports>", "exec"), scope)
    except ImportError as error:
        return [str(error)]
    unknown = []
    for node in ast.walk(program):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in ("before", "substitute"):
            continue
        owner, name = node.args[:2]
        if not isinstance(name, ast.Constant) or isinstance(owner, ast.Set):
            continue  # a name of a template
        if ast.unparse(owner) == "sys.modules[__name__]":
            known = name.value in scope
        else:
            known = hasattr(eval(ast.unparse(owner), {"os": __import__("os")} | scope), name.value)
        if not known:
            unknown.append(ast.unparse(node)[:100])
    return unknown


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_injected_code_patches_names_that_exist(path: Path) -> None:
    modules = list_modules(path)
    problems = [text for one in read_programs(path) for text in find_unknown_names(one, modules)]
    assert problems == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ranks_are_killed_in_methods_that_exist(path: Path) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "at_step"
    ]
    names = [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]
    assert [name for name in names if not hasattr(Trainer, name)] == []


def test_there_are_programs() -> None:
    assert sum(1 for path in FILES for _ in read_programs(path)) > 25


@pytest.mark.parametrize(
    "program",
    [
        "before(Trainer, 'issue_stp', kill)",
        "before(Nothing, 'step', kill)",
        "from ranvier.checkpoint import rank_file\nsubstitute(rank_file, 'refuse_bad', None)",
        "from ranvier.checkpoint import no_such_module",
        "before(sys.modules[__name__], 'no_such_function', kill)",
    ],
)
def test_unknown_names_are_found(program: str) -> None:
    try:
        found = find_unknown_names(ast.parse(program), [DEFAULT_MODULE])
    except NameError as error:
        found = [str(error)]
    assert found

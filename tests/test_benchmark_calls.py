"""Calls in benchmarks/ fit the parameters of the functions of this repository that they call.

A smoke does not reach the calls that need a GPU, and mypy checks the package only.
"""

from __future__ import annotations

import ast
import functools
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest

from syntax_trees import dotted_name, parse

ROOT = Path(__file__).parents[1]
FOLDERS = tuple(ROOT / name for name in ("benchmarks", "src", "scripts", "tests"))
"""Where the scripts import from, besides packages that are installed."""
TRANSPARENT = {
    "cache",
    "functools.cache",
    "contextmanager",
    "torch.no_grad",
    "torch.inference_mode",
}
"""Decorators that keep the parameters of a function."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
NEW_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Target:
    """What a name stands for: a module, or something in it."""

    module: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


Scope = dict[str, Target | None]
"""What the names of a scope stand for; None: something that is not known here."""


@functools.cache
def find_module(name: str) -> Path | None:
    """Returns the file of a module; None if it is not one of this repository."""
    for folder in FOLDERS:
        stem = folder.joinpath(*name.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path
    return None


@functools.cache
def read_module(name: str) -> tuple[dict[str, ast.AST], Scope]:
    """Returns the functions and classes of a module, and what all of its names stand for."""
    path = find_module(name)
    assert path is not None
    tree = parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    definitions = {
        node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)
    }
    return definitions, read_scope(tree, own_nodes(tree), name, package)


def own_nodes(scope: ast.AST) -> list[ast.AST]:
    """Returns the nodes below a node, without those of functions and classes below it."""
    nodes = [*ast.iter_child_nodes(scope)]
    for node in nodes:
        if not isinstance(node, NEW_SCOPES):
            nodes.extend(ast.iter_child_nodes(node))
    return nodes


def read_scope(scope: ast.AST, nodes: list[ast.AST], module: str, package: str = "") -> Scope:
    """Returns what the names stand for that are bound by nodes of a module, class or function."""
    targets = Scope()
    unknown = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                targets[alias.asname or alias.name] = Target(source, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname or "." not in alias.name:
                    targets[alias.asname or alias.name] = Target(alias.name)
        elif isinstance(node, Function | ast.ClassDef):
            if isinstance(scope, ast.Module):
                targets[node.name] = Target(module, node.name)
            else:
                unknown.add(node.name)
        elif isinstance(node, ast.arg):
            unknown.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            unknown.add(node.id)
    return {**targets, **dict.fromkeys(unknown)}


def find_definition(target: Target) -> ast.AST | None:
    """Returns the function or class that a name stands for.

    None if it is something else, or not of this repository. Raises LookupError if its module has no
    such name.
    """
    path = find_module(target.module)
    if path is None or not target.name or find_module(f"{target.module}.{target.name}"):
        return None
    definitions, scope = read_module(target.module)
    if target.name in definitions:
        return definitions[target.name]
    if target.name not in scope and "__getattr__" not in definitions:
        raise LookupError(f"{target.module} has no {target.name}")
    found = scope.get(target.name)
    return None if found is None else find_definition(found)


def read_signature(node: ast.AST | None) -> inspect.Signature | None:
    """Returns the parameters of a function or of a class; None if they are not known."""
    if isinstance(node, ast.ClassDef):
        return read_constructor(node)
    if not isinstance(node, Function) or not has_decorators(node, TRANSPARENT):
        return None
    kind, arguments = inspect.Parameter, node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        kind(
            argument.arg,
            kind.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kind.POSITIONAL_OR_KEYWORD,
            default=kind.empty if i < required else None,
        )
        for i, argument in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        empty = kind.empty if default is None else None
        parameters.append(kind(argument.arg, kind.KEYWORD_ONLY, default=empty))
    if arguments.kwarg:
        parameters.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def read_constructor(node: ast.ClassDef) -> inspect.Signature | None:
    """Returns the parameters of a class without a base: those of `__init__`, or its fields."""
    if node.bases or node.keywords:
        return None
    for method in node.body:
        if isinstance(method, Function) and method.name == "__init__":
            signature = read_signature(method)
            return signature and signature.replace(parameters=[*signature.parameters.values()][1:])
    if not node.decorator_list or not has_decorators(node, {"dataclass"}):
        return None
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    if any("ClassVar" in ast.unparse(field) or "init=" in ast.unparse(field) for field in fields):
        return None
    kind = inspect.Parameter
    is_keyword_only = "kw_only=True" in ast.unparse(node.decorator_list[0])
    return inspect.Signature(
        kind(
            ast.unparse(field.target),
            kind.KEYWORD_ONLY if is_keyword_only else kind.POSITIONAL_OR_KEYWORD,
            default=kind.empty if field.value is None else None,
        )
        for field in fields
    )


def has_decorators(node: Function | ast.ClassDef, accepted: set[str]) -> bool:
    """Whether all decorators of a function or class are among the accepted ones."""
    decorators = [
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for decorator in node.decorator_list
    ]
    return all(dotted_name(decorator) in accepted for decorator in decorators)


def check_call(call: ast.Call, scopes: list[Scope]) -> str:
    """Returns what is wrong with a call; empty if nothing is, or if it cannot be known."""
    callee, arguments = call.func, call.args
    is_partial = dotted_name(callee) in ("partial", "functools.partial") and bool(arguments)
    if is_partial:
        callee, *arguments = arguments
    root, _, name = dotted_name(callee).partition(".")
    target = next((scope[root] for scope in scopes if root in scope), None)
    if target is None or "." in name or (name and target.name and not find_module(str(target))):
        return ""
    if name:
        target = Target(str(target), name)
    try:
        signature = read_signature(find_definition(target))
    except LookupError as error:
        return str(error)
    if signature is None:
        return ""
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    positional = [argument for argument in arguments if not isinstance(argument, ast.Starred)]
    is_known = len(positional) + len(keywords) == len(arguments) + len(call.keywords)
    bind = signature.bind if is_known and not is_partial else signature.bind_partial
    try:
        bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{target}{signature}: {error}"
    return ""


def check_import(names: Scope, node: ast.ImportFrom) -> str:
    """Returns which names an import does not find; empty if it finds all."""
    problems = []
    for alias in node.names:
        if target := names.get(alias.asname or alias.name):
            try:
                find_definition(target)
            except LookupError as error:
                problems.append(str(error))
    return ", ".join(problems)


def find_problems(module: str, source: str) -> list[str]:
    """Returns the calls of a source that do not fit what they call, and names that do not exist."""
    tree = parse(source)
    problems = []

    def visit(scope: ast.AST, outer: list[Scope]) -> None:
        nodes = own_nodes(scope)
        names = read_scope(scope, nodes, module)
        # Methods do not see the names of their class.
        inner = outer if isinstance(scope, ast.ClassDef) else [names, *outer]
        for node in nodes:
            problem = ""
            if isinstance(node, ast.Call):
                problem = check_call(node, [names, *outer])
            elif isinstance(node, ast.ImportFrom):
                problem = check_import(names, node)
            elif isinstance(node, NEW_SCOPES):
                visit(node, inner)
            if problem:
                problems.append(f"{module}.py:{node.lineno}: {problem}")

    visit(tree, [])
    return problems


def test_calls_fit_their_functions() -> None:
    sources = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
    }
    assert [
        line for module, source in sources.items() for line in find_problems(module, source)
    ] == []


GOOD_CALLS = """
import serving_peers as peers
from functools import partial
from right_tokens import check_tokens
from script_parser import ScriptParser

def measure(check_twin, *arguments, **options):
    from paged_attention import copy_bandwidth, make_flush
    copy_bandwidth(make_flush())
    copy_bandwidth(*arguments)
    partial(copy_bandwidth)
    check_twin(1, 2, 3)
    peers.median_seconds(lambda: None, None, 5)
    ScriptParser("Times.", smoke="", **options)
"""


def test_good_calls_are_accepted() -> None:
    assert find_problems("measure", GOOD_CALLS) == []


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("copy_bandwidth()", "missing a required argument: 'flush'"),
        ("copy_bandwidth(1, 2)", "too many positional arguments"),
        ("partial(copy_bandwidth, buffer=1)", "unexpected keyword argument 'buffer'"),
        ("ScriptParser.parse()", ""),
        ("Rates(1.0, 1.0)", "missing a required argument: 'attention'"),
        ("peers.median_time()", "serving_peers has no median_time"),
    ],
)
def test_wrong_calls_are_found(call: str, problem: str) -> None:
    source = GOOD_CALLS + f"    from serving_bound import Rates\n    {call}\n"
    problems = find_problems("measure", source)
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)


def test_names_that_do_not_exist_are_found() -> None:
    source = "def measure():\n    from paged_attention import seconds_of\n"
    assert find_problems("measure", source) == ["measure.py:2: paged_attention has no seconds_of"]

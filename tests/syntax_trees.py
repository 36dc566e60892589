"""Syntax trees of sources, each parsed and walked once for all tests that read it."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parse(source: str) -> ast.Module:
    """Returns the tree of a source."""
    return ast.parse(source)


@functools.cache
def walk(source: str) -> list[ast.AST]:
    """Returns all nodes of the tree of a source."""
    return [*ast.walk(parse(source))]


def dotted_name(node: ast.AST) -> str:
    """Returns the name `a.b.c` of an attribute of a name, or an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])

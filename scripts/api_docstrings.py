"""A griffe extension: turns the plain docstrings of the package into Markdown for the API pages.

Docstrings describe arguments in a section `Args:` or in running text, `seed: of initial values.
dtype: of weights.`, and communication in a line `Communicates: ...`. The pages show arguments as a
list, communication as a paragraph, and an example as code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTIONS = ("Args:\n", "Returns:\n", "Raises:\n", "Yields:\n", "Attributes:\n")
"""Sections that griffe reads itself."""


def format_docstring(text: str, arguments: list[str]) -> str:
    """Returns a docstring as Markdown, with the descriptions of arguments as a list."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    head, examples, tail = text.partition("\nExamples:\n")
    head = re.sub(r"\n(?=Communicates:)", "\n\n", head)
    head = re.sub(r"(?<=[.;]) (?=Communicates: )", "\n\n", head)
    head = re.sub(r"^Communicates: ", "**Communicates:** ", head, flags=re.MULTILINE)
    first, *others = head.strip().split("\n\n")
    formatted = [first, *(_list_arguments(one, arguments) for one in others)]
    if examples:
        formatted.append(f"Examples:\n{tail}")
    return "\n\n".join(formatted)


def _list_arguments(paragraph: str, arguments: list[str]) -> str:
    """Returns a paragraph with its descriptions of arguments as list items."""
    if not arguments or paragraph.startswith(("    ", "* ", "```", *SECTIONS)):
        return paragraph
    name = rf"(?:{'|'.join(map(re.escape, arguments))})(?:=[\w'\"]+)?"
    start = re.compile(rf"(?:^|(?<=[.;] ))({name}(?:, {name})*): ")
    line = " ".join(paragraph.split())
    found = list(start.finditer(line))
    ends = [one.start() for one in found[1:]] + [len(line)]
    items = [
        f"* `{one[1]}`: {line[one.end() : end].strip()}"
        for one, end in zip(found, ends, strict=False)
    ]
    before = line[: found[0].start()].strip() if found else line
    return "\n\n".join(filter(None, (before, "\n".join(items))))


class DocstringFormat(griffe.Extension):
    """Changes the docstrings of classes, functions and methods as they are read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Formats a docstring."""
        if obj.docstring is None:
            return
        arguments = [one.name for one in obj.parameters] if obj.is_function else []
        obj.docstring.value = format_docstring(obj.docstring.value, arguments)

"""The README is true: the two commands come first, its Python runs, its options exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import ranvier.parallel

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_two_commands_come_first() -> None:
    first, second, *_ = blocks("bash")
    assert first == "pip install -e . && ranvier train\n"
    assert second == "pip install -e '.[test]' && pytest\n"
    assert (
        README.index(first) < README.index(second) < README.index("Ranvier is a PyTorch framework")
    )


def test_its_python_runs() -> None:
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})


def test_its_links_exist() -> None:
    root = Path(__file__).parent.parent
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / link).exists(), link


def test_examples_in_docstrings_run() -> None:
    result = doctest.testmod(ranvier.parallel)
    assert result.attempted and not result.failed

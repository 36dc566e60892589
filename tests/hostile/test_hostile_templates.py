"""Chat templates of strangers: see README.md beside this file."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from hostile.cases import rows, within
from ranvier.data.chat.sandbox import SandboxedTemplate, TemplateWorker
from ranvier.errors import DataError, UnsafeInputError

TEMPLATES = rows("templates.txt")
MESSAGES = [{"role": "user", "content": "hello"}]
GROWTH = 64 << 20
"""Bytes that this process may grow by."""


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    """With less time and memory than usual: the limits are the same kind."""
    with TemplateWorker(seconds=0.1, memory=192 << 20) as made:
        yield made


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_ends_as_its_line_says(name: str, worker: TemplateWorker) -> None:
    outcome, _, text = TEMPLATES[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def rendered() -> str:
        return SandboxedTemplate(text, "theirs", worker)({"messages": MESSAGES})

    with within(240):
        if outcome.startswith("ok "):
            assert rendered() == outcome.removeprefix("ok ")
            return
        error = UnsafeInputError if outcome == "refused" else DataError
        with pytest.raises(error) as found:
            rendered()
    said = {
        "refused": "theirs was stopped",
        "failed": "rejects this conversation",
        "syntax": "theirs:1",
    }
    assert said[outcome] in str(found.value)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 <= GROWTH, f"this process grew by {grown} KiB"

"""README, docs, docstrings, comments, help and errors avoid phrases that read as translated."""

from __future__ import annotations

from pathlib import Path

import pytest

import prose


def test_no_phrase_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0, capsys.readouterr().out


WRONG = (
    "A step was foretold to take 3 s.",
    "x.toml is no TOML.",
    "Mend that line.",
    "The run goes on.",
    "15.9 thousand million parameters",
    "It needs 12 bytes a parameter.",
    "The weights lie on the host.",
    "All ranks are told.",
    "It is not worth the time.",
    "Nobody asked for it.",
)
RIGHT = (
    "There is no checkpoint in this directory.",
    "It is no longer supported.",
    "A step takes a rank 3 ms.",
    "The remaining ranks wait.",
)


@pytest.mark.parametrize(
    ("suffix", "line"),
    [(".md", "{}"), (".py", '"""{}"""'), (".py", "x = 1  # {}"), (".toml", "# {}")],
)
def test_phrases_are_found_in_every_kind_of_text(tmp_path: Path, suffix: str, line: str) -> None:
    path = tmp_path / f"text{suffix}"
    for text in WRONG:
        path.write_text(line.format(text) + "\n")
        assert list(prose.find_phrases(path)), text
    for text in RIGHT:
        path.write_text(line.format(text) + "\n")
        assert not list(prose.find_phrases(path)), text


def test_code_is_not_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nmend = 1\n```\n\nThe option `mend` is old.\n")
    assert not list(prose.find_phrases(page))

"""The README is true: the two commands come first, its Python runs, its options exist."""

from __future__ import annotations

import doctest
import math
import re
import shlex
from pathlib import Path

import pytest

import ranvier.parallel
from commands import SMALL, call
from ranvier.cli import parse

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


def commands() -> list[list[str]]:
    """The words after `ranvier` of each command in the tour."""
    (tour,) = blocks("console")
    lines = [line.partition(" # ")[0] for line in tour.splitlines() if line.startswith("$ ")]
    return [shlex.split(line.partition("ranvier ")[2]) for line in lines]


def test_the_tour_runs_from_its_first_command_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is written, on a smaller model; what needs several ranks is checked for them."""
    root = Path(__file__).parent.parent
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"text": "some words of mine"}\n' * 50)
    (tmp_path / "recipes").symlink_to(root / "recipes")
    tokenizer = SMALL.index("--data.tokenizer")
    small = [*SMALL[:tokenizer], *SMALL[tokenizer + 2 :], "--model.vocab", "4096"]
    small += ["--nproc", "1", "--train.steps"]
    done = []
    for words in commands():
        if words[0] == "train" and any("runs/" in word for word in words):
            grown = str(4 + len(done))  # each goes on after the one before
            assert call(*words[:2], "--train.steps", grown, "--nproc", "1") == 0
        elif words[0] == "verify" or any("plan." in word or "recipes" in word for word in words):
            arguments = parse(words[0], words[1:])
            plan = arguments.plan
            world = 512 if "recipes" in words[-1] else math.prod(map(abs, plan.degrees.values()))
            assert arguments.check(world).plan.world == world
        elif words[0] == "train":
            assert call(*words, *small, "2") == 0
        else:
            assert call(*words) == 0, words
        done.append(words[0])
    assert done.count("train") == 6
    assert {"generate", "data", "verify", "plan", "doctor", "checkpoint"} <= {*done}
    assert "Ready to run" in capsys.readouterr().out

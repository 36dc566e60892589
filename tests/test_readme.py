"""The README is true: the two commands come first, its Python runs, its options exist."""

from __future__ import annotations

import doctest
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from commands import SMALL, call, started
from ranvier.cli.main import parse_train_options
from ranvier.config import run as runs
from ranvier.models import decoder
from ranvier.nn import autotune
from ranvier.parallel import parallelize
from ranvier.train.resume import run_directory as folders

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
    for module in (parallelize, decoder, autotune):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed, module


def commands(*languages: str) -> list[list[str]]:
    """The words after `ranvier` of each command in blocks of these languages, in order."""
    texts = re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", README, re.DOTALL)
    lines = [line.removeprefix("$ ").partition(" # ")[0] for t in texts for line in t.splitlines()]
    starts = ("ranvier ", "srun ranvier ", "pip install -e . && ranvier ")
    found = [line for line in lines if line.startswith(starts)]
    return [shlex.split(line.partition("ranvier ")[2]) for line in found]


def write_inputs(folder: Path) -> None:
    """What the commands of the README read: texts, chats, TOML files."""
    (folder / "my.jsonl").write_text('{"text": "some words of mine"}\n' * 500)
    talk = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A gap. " * 9}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 200)
    (folder / "run.toml").write_text("[plan]\nrow = 2\n")
    (folder / "recipes").symlink_to(Path(__file__).parent.parent / "recipes")


def write_model(folder: Path) -> None:
    """A published model."""
    from published_models import BASE, save, theirs
    from ranvier.data.tokenizer import ByteTokenizer

    shape = BASE | {"vocab_size": 257, "max_position_embeddings": 512}
    model = save(theirs("llama", shape), folder / "path" / "to" / "model")
    ByteTokenizer().save(model / "tokenizer.json")


def check_only(words: list[str]) -> None:
    """Check a command for the ranks it needs, without running it."""
    arguments = parse_train_options(words[1:])
    degrees = arguments.plan.degrees.values()
    world = 512 if "recipes" in words[-1] else math.prod(map(abs, degrees))
    assert arguments.check_and_resolve(world).plan.world_size == world


def test_the_tour_runs_from_its_first_command_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is written, on a smaller model; what needs several ranks is checked for them.

    A run that goes on on another grid is on that grid for the commands after it.
    """
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    tokenizer = SMALL.index("--data.tokenizer")
    small = [*SMALL[:tokenizer], *SMALL[tokenizer + 2 :], "--model.vocab", "4096"]
    small += ["--nproc", "1", "--train.steps"]
    done = []
    for words in commands("console"):
        if words[0] == "train" and any("runs/" in word for word in words):
            grown = str(4 + len(done))  # each goes on after the one before
            assert call(*words[:2], "--train.steps", grown, "--nproc", "1") == 0
            if any("plan." in word for word in words):
                moved = parse_train_options([*words[1:], "--plan.micro-batch", "-1"])
                folders.write_text_atomically(
                    Path(words[1]) / "config.toml", runs.to_toml(moved.check_and_resolve(4))
                )
        elif words[0] == "profile":
            assert call(*words, "--steps", "1", "--warmup-steps", "1") == 0
        elif words[0] == "verify" or any("plan." in word or "recipes" in word for word in words):
            check_only(words)
        elif words[0] == "train":
            assert call(*words, *small, "2") == 0
        else:
            assert call(*words) == 0, words
        done.append(words[0])
    assert done.count("train") == 6
    assert {"generate", "data", "verify", "plan", "doctor", "checkpoint", "profile"} <= {*done}
    assert "Ready to run" in capsys.readouterr().out


SMALLER = """
import dataclasses

for _name, _more in (("tiny", {}), ("moe-tiny", {"expert_mlp": 32})):
    MODEL_SIZES[_name] = dataclasses.replace(
        MODEL_SIZES[_name], layers=2, embed=32, head_dim=8, mlp=64, **_more
    )
"""
"""What every process does to the sizes of models: the commands stay as they are written."""


@pytest.mark.full
def test_every_command_runs_in_its_order_in_one_directory(tmp_path: Path) -> None:
    """All blocks of the README with their ranks and steps, on smaller models."""
    write_inputs(tmp_path)
    write_model(tmp_path)
    failed = []
    for words in commands("bash", "console"):
        if words[-1].startswith("recipes/"):
            continue  # of 512 ranks; checked above
        if "hellaswag" in words:
            continue  # its data would be downloaded; tests/eval has tasks of its own
        process = started(tmp_path, *words, patch=("ranvier.models.config", SMALLER))
        out, errors = process.communicate(timeout=500)
        if process.returncode != 0:
            failed.append(
                f"{shlex.join(words)}: {process.returncode}\n{out[-500:]}{errors[-1500:]}"
            )
    assert not failed, "\n".join(failed)

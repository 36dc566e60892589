"""Every command of the README and the docs runs as it is written.

The commands of a page run from top to bottom in one new directory, with small sizes from
RANVIER_ADDOPTS. The suite runs the first blocks of one page and checks all other commands without
running them; `--full` runs every page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import call
from doc_blocks import Block, check_command, ranvier_commands, read_blocks, write_inputs
from ranvier.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
SAMPLE_PAGE = "docs/get-started/quickstart.md"
SAMPLE_BLOCKS = 2
BLOCKS = {
    name: list(read_blocks(name, path.read_text(encoding="utf-8"))) for name, path in PAGES.items()
}
LIMIT_SECONDS = 300

WORKER = """
import json, sys
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    exec(compile(*json.loads(line), "exec"), namespace)
    print("\\0done", flush=True)
"""
"""Runs Python blocks of a page one after the other, in one namespace."""


class PageRunner:
    """Runs the blocks of one page in one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.python: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> str:
        """Returns what went wrong; empty if nothing did."""
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.reason:
            pass  # checked by test_commands_that_are_not_run_are_right
        elif block.is_command:
            return self._run_shell(block)
        elif block.language == "python":
            return self._run_python(block)
        return ""

    def _run_shell(self, block: Block) -> str:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.script],
            cwd=self.folder,
            env={**self.environment, "RANVIER_ADDOPTS": block.addopts},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        if result.returncode == 0:
            return ""
        return f"{block.place}: exit code {result.returncode}\n{block.script}" + (
            f"{result.stdout[-1000:]}\n{result.stderr[-2000:]}"
        )

    def _run_python(self, block: Block) -> str:
        if self.python is None:
            self.python = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        assert self.python.stdin and self.python.stdout
        self.python.stdin.write(json.dumps([block.text, block.place]) + "\n")
        self.python.stdin.flush()
        output = ""
        for line in self.python.stdout:
            if line.endswith("\0done\n"):
                return ""
            output += line
        self.close()
        return f"{block.place}:\n{block.text}\n{output[-3000:]}"

    def close(self) -> None:
        """Ends the Python process of the page."""
        if self.python is not None:
            self.python.communicate(timeout=60)
            self.python = None


def run_page(blocks: list[Block], folder: Path) -> list[str]:
    """Returns the problems of a page."""
    write_inputs(folder, ROOT)
    runner = PageRunner(folder)
    try:
        return [problem for block in blocks if (problem := runner.run(block))]
    finally:
        runner.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [
        name
        for name in PAGES
        if any(block.is_command or block.language == "python" for block in BLOCKS[name])
    ],
)
def test_every_command_of_a_page_runs(page: str, tmp_path: Path) -> None:
    problems = run_page(BLOCKS[page], tmp_path)
    assert not problems, "\n".join(problems)


def test_the_first_commands_of_the_quickstart_run(tmp_path: Path) -> None:
    problems = run_page(BLOCKS[SAMPLE_PAGE][:SAMPLE_BLOCKS], tmp_path)
    assert not problems, "\n".join(problems)


@pytest.mark.sample(40)
@pytest.mark.parametrize("page", PAGES)
def test_commands_parse_and_plans_are_valid(
    page: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all blocks, also of those that need a GPU, a network, Slurm or a second node."""
    folder = tmp_path_factory.getbasetemp() / "doc-inputs"
    if not folder.exists():
        folder.mkdir()
        write_inputs(folder, ROOT)
    monkeypatch.chdir(folder)
    for block in BLOCKS[page]:
        if block.is_command:
            for words in ranvier_commands(block.script):
                check_command(words, block.ranks)
        elif block.language == "python":
            compile(block.text, block.place, "exec")


def test_mistakes_are_found(tmp_path: Path) -> None:
    text = (
        '```python title="a.py"\nimport sys\nsys.exit(3)\n```\n\n```console\n$ python a.py\nout\n'
        "```\n\n<!-- not run: network: installs -->\n```bash\npip install x\n```\n\n```python\n"
        'x = 1\n```\n\n```python\nassert x == 2, "other"\n```\n'
    )
    blocks = list(read_blocks("page.md", text))
    assert [block.reason for block in blocks] == ["", "", "network", "", ""]
    problems = run_page(blocks, tmp_path)
    assert len(problems) == 2 and "exit code 3" in problems[0] and "other" in problems[1]
    with pytest.raises(SystemExit):
        check_command(["train", "--train.stepz", "3"], 0)
    with pytest.raises(Exception, match="row"):
        check_command(["train", "--plan.row", "3"], 3)
    with pytest.raises(AssertionError, match="directly before"):
        list(read_blocks("page.md", "<!-- addopts: --train.steps 3 -->\nText.\n```bash\nls\n```"))
    with pytest.raises(AssertionError, match="too slow"):
        list(read_blocks("page.md", "<!-- not run: too slow -->\n```bash\nls\n```"))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_options_are_added_to_commands_that_run_a_model(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[str]] = []

    def record(words: Sequence[str]) -> int:
        seen.append(words)
        return 0

    monkeypatch.setenv("RANVIER_ADDOPTS", "--train.sample-prompt 'a b'")
    monkeypatch.setitem(COMMANDS, command, record)
    assert call(command, "--plan.row", "2") == 0
    added = ["--train.sample-prompt", "a b"] * (command in ("train", "verify", "profile"))
    assert seen == [["--plan.row", "2", *added]]


def test_added_options_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANVIER_ADDOPTS", "--train.steps 7 --plan.row 1")
    assert call("train", "--dry-run", "--plan.row", "3") == 0
    monkeypatch.setenv("RANVIER_ADDOPTS", "--train.steps 'x")
    assert call("train", "--dry-run") == 64
    assert "RANVIER_ADDOPTS" in capsys.readouterr().err
    assert call("train", "--help") == 0

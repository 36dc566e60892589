"""Every script under benchmarks/ prints its help, and runs at a toy shape with `--smoke`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import script_parser

from sampling import covering_sample

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
LIMIT_SECONDS = 120
"""Ends a smoke that hangs. It takes at most 10 s, but the machine may be busy."""
NUM_DRAWN = 6
"""Number of smokes that run without `--full`."""
NUM_PARALLEL = 2
"""Number of smokes that run at the same time."""

PRINT_HELP = """
import contextlib, io, runpy, sys, traceback

for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    printed = io.StringIO()
    code = "none"
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = traceback.format_exc()
    if code != 0 or "--smoke" not in printed.getvalue():
        print(f"{path}: exit code {code}, {printed.getvalue()[-500:]!r}")
"""
"""Prints the paths whose `--help` does not end with exit code 0, or does not have `--smoke`."""


def is_script(path: Path) -> bool:
    """Whether a file runs something when it is started: others are modules of scripts."""
    return any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if is_script(path)]


def list_outputs() -> dict[Path, int]:
    """Files that a smoke must not write, and the times of their last change."""
    folders = (FOLDER, ROOT / "docs", ROOT / "src")
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in paths if "__pycache__" not in path.parts}


def run_python(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a directory, on the CPU, with one thread."""
    paths = [str(ROOT / "src"), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def test_all_print_their_help(tmp_path: Path) -> None:
    result = run_python("-c", PRINT_HELP, *SCRIPTS, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "")


def run_smoke(path: Path, folder: Path) -> str:
    """Runs the smoke of a script in a directory; returns what is wrong, empty if nothing is."""
    folder.mkdir()
    result = run_python(path, "--smoke", cwd=folder)
    if result.returncode != 0:
        return f"{path.stem}: exit code {result.returncode}, {result.stdout[-3000:]}"
    written = [file.name for file in folder.iterdir()]
    return f"{path.stem} writes {written}" if written else ""


def test_drawn_smokes_run_and_write_no_data(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if pytestconfig.getoption("--full"):
        pytest.skip("the smokes of all scripts run")
    by_name = {path.stem: path for path in SCRIPTS}
    names = covering_sample("smokes", [*by_name], NUM_DRAWN)
    before = list_outputs()
    # Side by side, as most of the time of a smoke is that of imports in one thread.
    with ThreadPoolExecutor(NUM_PARALLEL) as threads:
        problems = threads.map(lambda name: run_smoke(by_name[name], tmp_path / name), names)
        assert [*filter(None, problems)] == []
    assert list_outputs() == before


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_smoke_runs_and_writes_no_data(path: Path, tmp_path: Path) -> None:
    before = list_outputs()
    assert run_smoke(path, tmp_path / "run") == ""
    assert list_outputs() == before


def test_scripts_that_do_not_print_help_are_found(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("if __name__ == '__main__':\n    print('runs')\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    result = run_python("-c", PRINT_HELP, *sorted(tmp_path.glob("*.py")), cwd=tmp_path)
    lines = [line for line in result.stdout.splitlines() if "exit code" in line]
    assert [name in line for name, line in zip(("broken", "silent"), lines, strict=True)] == [
        True,
        True,
    ]


def test_options_of_a_smoke_come_before_those_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    parser = script_parser.ScriptParser(
        "Times.", smoke="--steps 2 --csv {folder}/x", skipped="GPUs"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--csv", type=Path)
    assert parser.parse_args([]).steps == 100 and os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    options = parser.parse_args(["--smoke", "--steps", "3"])
    assert options.smoke and options.steps == 3 and options.csv.parent.is_dir()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    printed = capsys.readouterr().out
    assert "--steps 2" in printed and "Skipped: GPUs" in printed

"""The examples of use from other frameworks run, alone and on a grid, with the same losses."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integrations.test_training_loop import fabric_of
from pool import Pool
from ranvier import Accelerator
from ranvier.grid import Grid

HERE = Path(__file__).parent.parent / "examples"
FULL = pytest.mark.full
NAMES = ("from_pretrained", "huggingface", "own_module", "fabric", "accelerate_loop")
QUICK = ("huggingface", "own_module")


def ran(grid: Grid, name: str, folder: str) -> list[float]:
    """The losses of an example."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    example: Any = importlib.import_module(name)
    if name == "from_pretrained":
        losses = example.main(f"{folder}/model", Path(folder), grid=grid)
    elif name in QUICK:
        losses = example.main(grid)
    elif name == "fabric":
        losses = example.main(fabric_of(grid))
    else:
        losses = example.main(Accelerator(grid=grid))
    return [float(x) for x in losses]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=FULL) for n in NAMES],
)
def test_an_example_learns_the_same_on_a_grid(pool: Pool, name: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "four"):
        if name == "from_pretrained":
            sys.path.insert(0, str(HERE))
            importlib.import_module(name).published(folder / "model")
    want = ran(Grid({}), name, str(tmp_path / "one"))
    assert want[-1] < 0.8 * want[0]
    for losses in pool.on_grid({"row": 2, "depth": 2}, ran, name, str(tmp_path / "four")):
        assert losses == pytest.approx(want, rel=1e-4)


def started(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=HERE.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
def test_an_example_is_started_by_torchrun() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = started([*words, "examples/accelerate_loop.py", "--row", "2"])
    assert said.startswith("2 process(es): loss 5.6")


@pytest.mark.full
def test_fabric_starts_its_processes_itself() -> None:
    said = started(["examples/fabric.py", "--devices", "2", "--row", "2"])
    assert "2 process(es): loss" in said


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_alone(name: str) -> None:
    assert "loss" in started([f"examples/{name}.py"])

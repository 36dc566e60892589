"""A save killed at any call (A8, A9, A10), any bit flipped (D1): samples of the two benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.scripts import script


def killed(*options: str) -> tuple[int, str]:
    """Exit code and words of the script: it forks, which a process with threads should not."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, str(path), *options], capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def test_a_save_killed_at_any_call_leaves_a_checkpoint(request: pytest.FixtureRequest) -> None:
    count = "0" if request.config.getoption("--full") else "14"
    code, text = killed("--trials", count)
    assert code == 0 and "all loadable" in text, text
    assert (
        len(
            [
                name
                for name in ("fsync", "unlink", "open", "pwrite", "mkdir", "replace")
                if f"{name} " in text
            ]
        )
        >= 5
    ), text


@pytest.mark.full
def test_the_trial_fails_for_a_save_that_overwrites() -> None:
    """The control: a checkpoint that is removed for its successor is lost at some call."""
    code, text = killed("--control")
    assert code == 1 and "nothing can be loaded" in text


def test_no_flipped_bit_passes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kills, flips = script("kills"), script("flips")
    kills.saved(tmp_path, 1, 1.0, kills.Kind("two ranks", ranks=2), "aaaa")
    path = tmp_path / "step-00000001"
    assert flips.noticed(path) == (False, False)
    count = 10_000 if request.config.getoption("--full") else 150
    found = list(flips.flips(path, count, seed=1))
    assert [one for one in found if one[2:] != (True, True)] == []
    assert {name for name, *_ in found} == {p.name for p in path.iterdir()}

"""The distributions: the source distribution is complete, and the wheel runs anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from doc_blocks import SMALL_ADDOPTS

ROOT = Path(__file__).parents[2]


def tracked_files() -> set[str]:
    """The files that git tracks; of an unpacked source distribution those that are there."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    pytest.skip("needs a clone: git lists the files")


def build(kind: str, source: Path, output: Path) -> Path:
    """Builds a distribution with the declared backend; returns its path."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(output)!r}))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return output / result.stdout.split()[-1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks, in another place: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("sources")
    for name in sorted(tracked_files()):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.mark.full
def test_the_source_distribution_is_complete_and_the_wheel_runs_outside_of_the_repository(
    sources: Path, tmp_path: Path
) -> None:
    """The wheel is built from the source distribution, so that one lacks nothing."""
    archive = build("sdist", sources, tmp_path)
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert tracked_files() - packed == set()
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = build("wheel", unpacked, tmp_path)
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as zipped:
        zipped.extractall(installed)
    package = {name.removeprefix("src/") for name in tracked_files() if name.startswith("src/")}
    assert {name for name in package if not (installed / name).is_file()} == set()
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed), "RANVIER_ADDOPTS": SMALL_ADDOPTS}
    where = "import ranvier; print(ranvier.__file__)"
    for words in (["-c", where], ["-m", "ranvier", "train", "--nproc", "1"]):
        result = subprocess.run(
            [sys.executable, *words], cwd=work, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr[-2000:]
        if words[0] == "-c":
            assert result.stdout.startswith(str(installed))
    assert list(work.glob("runs/*/report.html"))

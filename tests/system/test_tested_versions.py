"""Tested versions: one record, constraints that agree with it, and a warning beyond them."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torch_record
from ranvier.cli.doctor import meets_version
from ranvier.grid import Grid
from ranvier.models import EXAMPLES
from ranvier.parallel.parallelize import parallelize
from ranvier.system import tested_versions
from ranvier.system.tested_versions import (
    NEWEST_TESTED,
    describe_untested,
    version_numbers,
    warn_if_untested,
)
from source_hashes import SOURCE, source_hashes

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD_TOOLS = {"setuptools"}
"""Not constrained, as each torch has its own bound."""


def requirements(lines: list[str]) -> dict[str, str]:
    """Returns specifiers by package, with those of the extras that are named."""
    found: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?(.*)", line)
        assert match, line
        name, extras, specifiers = match.groups()
        if name != "ranvier":
            found[name] = specifiers
            continue
        for extra in extras.split(","):
            found |= requirements(PROJECT["optional-dependencies"][extra])
    return found


def constraints() -> dict[str, str]:
    """Returns the tested versions by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_constraints_have_a_version_of_every_requirement() -> None:
    wanted = requirements(PROJECT["dependencies"])
    wanted |= requirements(PROJECT["optional-dependencies"]["test"])
    versions = constraints()
    assert wanted.keys() - BUILD_TOOLS <= versions.keys()
    wrong = [
        f"{name}=={versions[name]}, but {specifiers}"
        for name, specifiers in wanted.items()
        if name in versions and not meets_version(versions[name], specifiers)
    ]
    assert wrong == []


def test_requirements_of_a_run_have_no_upper_bounds() -> None:
    assert [line for line in PROJECT["dependencies"] if re.search(r"<|==|~", line)] == []


def test_the_newest_tested_versions_are_those_of_the_record() -> None:
    with torch_record.RECORD.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    # The suite has the constraints; a selection of the tests is not enough for a newer version.
    passed = [row for row in rows if row["failed"] == "0" and not row["selection"]]
    for package, newest in NEWEST_TESTED.items():
        versions = [row[package].partition("+")[0] for row in passed]
        assert newest == max([constraints()[package], *versions], key=version_numbers)


@pytest.fixture
def no_warning_yet() -> Iterator[None]:
    """Warnings are given once per process: the test sees them, and so does the process after it."""
    tested_versions._warn_once.cache_clear()
    yield
    tested_versions._warn_once.cache_clear()


@pytest.mark.usefixtures("no_warning_yet")
def test_a_newer_version_is_a_warning_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, _ = version_numbers(NEWEST_TESTED["torch"])
    newer = f"{major}.{minor + 1}.0.dev20270101+cu140"
    for version in (NEWEST_TESTED["torch"], f"{major}.{minor}.9+cpu", "2.11.0", "unknown"):
        assert describe_untested("torch", version) == ""
    assert describe_untested("numpy", "99.0") == ""
    monkeypatch.setattr(metadata, "version", lambda package: newer)
    remedy = f"pip install 'torch=={NEWEST_TESTED['torch']}'"
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.warns(UserWarning, match=re.escape(remedy)) as noted:
        parallelize(EXAMPLES["llama"](), Grid({}))
        # Another line: Python itself would repeat the warning here.
        parallelize(EXAMPLES["llama"](), Grid({}))
    assert [Path(warning.filename) for warning in noted] == [Path(__file__)]
    # A package that is imported later is looked at later.
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(metadata, "version", lambda package: "99.0")
    with pytest.warns(UserWarning, match=r"transformers 99\.0 is newer than"):
        warn_if_untested()


@pytest.mark.usefixtures("no_warning_yet")
def test_no_warning_within_the_tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", NEWEST_TESTED.__getitem__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()
    # A package that nobody imported is not looked at.
    monkeypatch.setattr(tested_versions, "NEWEST_TESTED", {"nobody_imported": "1.0"})
    monkeypatch.setattr(metadata, "version", lambda package: "2.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()


@pytest.mark.skipif(
    not shutil.which("git") or not (ROOT / ".git").exists(), reason="not a clone of git"
)
def test_hashes_of_sources_are_those_of_git(tmp_path: Path) -> None:
    folder = shutil.copytree(SOURCE, tmp_path / "ranvier")
    (folder / "grid" / "inner").mkdir(parents=True)
    (folder / "grid" / "inner" / "file").write_bytes(b"\x00")
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("run")

    def git(*arguments: str) -> str:
        command = ["git", "-c", "core.excludesFile=/dev/null", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "--quiet")
    (folder / ".git" / "info" / "exclude").write_text("__pycache__\n*.pyc\n")
    git("add", "--all")
    tree = git("ls-tree", git("write-tree").strip())
    want = dict(reversed(line.split()[2:]) for line in tree.splitlines())
    shutil.rmtree(folder / ".git")
    assert source_hashes(folder) == want


def test_a_row_of_the_record(tmp_path: Path) -> None:
    report, record = tmp_path / "report.xml", tmp_path / "record.csv"
    report.write_text(
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="1"/></testsuites>'
    )
    results = torch_record.count_results(report)
    assert results == {"passed": 5, "failed": 3, "skipped": 1}
    for seconds in (1, 2):
        torch_record.append_row(record, results, seconds, "-k llama")
    with record.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seconds"] for row in rows] == ["1", "2"]
    pairs = [pair.split(":") for pair in rows[0]["sources"].split(" ")]
    assert dict(pairs) == source_hashes(SOURCE)

"""The GPU check: its hashes are git's, its rows are read again, and it sees what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

import gpu_breaks
import gpu_check
import gpu_check_parts
import source_hashes
from ranvier.models.segment_attention import SegmentAttention

ROOT = Path(__file__).parent.parent
WORKER = """\
import json, sys, time

parts = [
    {"name": name, "seconds": 1.0, "limit": limit, "skipped": skipped}
    for name, limit, skipped in (
        ("good", 30.0, ""), ("wrong", 30.0, ""), ("dies", 30.0, ""), ("hangs", 0.5, ""),
        ("other", 30.0, "needs a GPU"),
    )
]
print(json.dumps({"parts": parts, "versions": {"device": sys.argv[1]}}), flush=True)
for line in sys.stdin:
    name = line.strip()
    print("in", name, file=sys.stderr)
    if name == "dies":
        sys.exit(3)
    if name == "hangs":
        time.sleep(60)
    failures = ["loss: 2e-1 of 1e-3 at most"] if name == "wrong" else []
    answer = {"worst": 0.5, "where": "loss: 5e-4 of 1e-3", "failures": failures}
    print(json.dumps(answer), flush=True)
"""
"""A worker without torch."""


def git(folder: Path, *words: str) -> str:
    """What a git command prints, without the settings of the user."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *words],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A repository with this package, and with a folder of names that are hard to sort."""
    root = tmp_path / "clone"
    package = root / "src" / "ranvier"
    shutil.copytree(ROOT / "src" / "ranvier", package)
    shutil.copy(ROOT / ".gitignore", root)
    odd = package / "odd"
    (odd / "a" / "empty").mkdir(parents=True)
    for name in ("a/b.py", "a.py", "a-b", "a0", "run.sh", "ä"):
        (odd / name).write_text(name)
    (odd / "run.sh").chmod(0o755)
    (odd / "link").symlink_to("a/b.py")
    (odd / "a" / "__pycache__").mkdir()
    for name in ("a/__pycache__/b.pyc", "b.pyc", "a/.DS_Store"):
        (odd / name).write_bytes(b"\0")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")
    yield root


def test_hashes_are_those_of_git(clone: Path) -> None:
    package = clone / "src" / "ranvier"
    names = git(clone, "ls-tree", "--name-only", "HEAD:src/ranvier").splitlines()
    found = gpu_check.source_hashes(package)
    assert sorted(found) == sorted(names) and "odd" in names
    wanted = git(clone, "rev-parse", *(f"HEAD:src/ranvier/{name}" for name in found))
    assert list(found.values()) == wanted.splitlines()
    assert all(len(value) == 40 for value in found.values())
    assert source_hashes.tree_hash(package) == git(clone, "rev-parse", "HEAD:src/ranvier").strip()
    # The control: each of these is a part of a hash.
    (package / "odd" / "run.sh").chmod(0o644)
    assert gpu_check.source_hashes(package)["odd"] != found["odd"]


def test_rows_are_read_again_and_name_what_differs(clone: Path, tmp_path: Path) -> None:
    package, table = clone / "src" / "ranvier", tmp_path / "rows.csv"
    assert "No GPU check is recorded" in gpu_check.describe_differing(table, package)
    run = gpu_check.Run("cuda", (), 1, tmp_path, gpu_check.WORKER_PROGRAM)
    run.versions = dict.fromkeys(("device", "torch", "triton", "cuda"), "x, y")
    run.versions |= {"python": "3.12", "transformers": "5"}
    run.results = [gpu_check.PartResult("serve", 3.0, 0.25, "loss: 1e-3 of 4e-3")]
    for _ in range(2):
        hashes = gpu_check.source_hashes(package)
        packed = " ".join(f"{name}={value}" for name, value in hashes.items())
        gpu_check.append_row(table, {**run.row(7.0), "hashes": packed})
    assert len(table.read_text().splitlines()) == 3
    row = gpu_check.read_last_row(table)
    assert tuple(row) == gpu_check.COLUMNS
    assert row["results"] == "serve=0.25:3.0" and row["device"] == "x, y"
    assert (row["passed"], row["failed"], row["seconds"]) == ("1", "0", "7")
    assert table.read_text().splitlines()[-1].count(hashes["odd"]) == 1
    assert "is what the GPU check of" in gpu_check.describe_differing(table, package)
    (package / "odd" / "a0").write_text("b")
    (package / "trace.py").unlink()
    (package / "new.py").write_text("")
    assert gpu_check.find_differing(table, package) == ["new.py", "odd", "trace.py"]
    assert gpu_check.describe_differing(table, package).endswith(": new.py, odd, trace.py")


def test_the_page_has_the_last_row() -> None:
    text = gpu_check.PAGE.read_text("utf-8")
    row = gpu_check.read_last_row(gpu_check.ROWS)
    assert gpu_check.page_with_row(text, row) == text, "Run: python scripts/gpu_check.py --page"
    row = dict.fromkeys(gpu_check.COLUMNS, "1") | {"results": "serve=0.25:3.0 lora=failed:2.0"}
    page = gpu_check.page_with_row(text, row)
    assert "| serve | 0.25 | 3.0 |" in page and page != text
    assert gpu_check.page_with_row(page, row) == page


def test_parts_that_fail_die_or_hang_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    run = gpu_check.Run("cpu", (), 2, tmp_path, program)
    results = {result.part: result for result in run.run()}
    assert not run.workers and len(results) == 5
    failures = {name: result.failures for name, result in results.items() if result.failures}
    assert failures == {
        "wrong": ["loss: 2e-1 of 1e-3 at most"],
        "dies": ["the process ended with exit status 3"],
        "hangs": ["not finished after 0 s"],
    }
    assert results["other"].skipped and "in dies" in results["dies"].log
    row = run.row(1.0)
    assert (row["passed"], row["failed"]) == ("1", "3")
    assert "wrong=failed:" in row["results"] and "other" not in row["results"]
    assert "[ 5/5]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("only", "status", "text"),
    [
        ("", 1, "1 passed, 3 failed, 1 skipped, 0 not run"),
        ("good", 0, "A row is written only if all parts run."),
        ("absent", 1, "--only absent is unknown. Known parts are good, wrong"),
    ],
)
def test_the_exit_status_is_that_of_the_parts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    only: str,
    status: int,
    text: str,
) -> None:
    program, table = tmp_path / "worker.py", tmp_path / "rows.csv"
    program.write_text(WORKER)
    monkeypatch.setattr(gpu_check, "WORKER_PROGRAM", program)
    words = ["--device", "cpu", "--only", only, "--workers", "2", "--output", str(table)]
    assert gpu_check.main(words) == status
    assert text in capsys.readouterr().out
    assert table.is_file() == (only == "")


def test_missing_packages_are_one_line_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED_PACKAGES", ("torch", "no_such_package"))
    monkeypatch.setattr(gpu_check, "check", lambda *_: 7)
    assert gpu_check.main(["--device", "cpu"]) == 64
    assert capsys.readouterr().out.startswith("no_such_package: not installed.")
    assert gpu_check.main(["--device", "cpu", "--only", "generate"]) == 7


def test_relative_paths_hold_in_other_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "/opt/site"]))
    assert gpu_check.python_path() == os.pathsep.join(
        [os.path.abspath("src"), "/opt/site", str(ROOT / "src")]
    )


def run_part(name: str) -> dict[str, Any]:
    return gpu_check_parts.run_part(name, "cpu")


@pytest.mark.parametrize("name", ["prefix-kernels", "context-kernels"])
def test_a_part_passes_on_the_cpu(name: str) -> None:
    result = run_part(name)
    assert result["failures"] == [] and 0.0 < result["worst"] < 1.0 and result["where"]


def test_a_planted_break_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SegmentAttention.forward

    def scaled(self: SegmentAttention, q: torch.Tensor, *rest: Any) -> Any:
        return forward(self, q * 1.05, *rest)

    monkeypatch.setattr(SegmentAttention, "forward", scaled)
    assert any("zigzag y" in failure for failure in run_part("context-kernels")["failures"])


def test_an_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(check: gpu_check_parts.Check) -> None:
        raise ValueError("no such\nthing")

    part = gpu_check_parts.Part("fails", fails, 1.0, 1.0, "")
    monkeypatch.setitem(gpu_check_parts.PARTS, "fails", part)
    assert run_part("fails")["failures"] == ["ValueError: no such"]


def test_comparisons_see_scale_place_and_nan(tmp_path: Path) -> None:
    want = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    place = want.clone()
    place[3] += 3.0
    for found in (want * 1.01, place, want * torch.nan, want[:-1], torch.zeros_like(want)):
        check = gpu_check_parts.Check(torch.device("cpu"), tmp_path)
        check.close("x", found, want, 5e-2, 5e-3)
        assert check.failures, found[:3]
    check.failures.clear()
    check.close("x", want.bfloat16(), want, 5e-3, 5e-4)
    check.close("zero", torch.zeros(3), torch.zeros(3), 5e-3, 5e-4)
    assert check.failures == []


def test_breaks_apply_and_have_parts(tmp_path: Path) -> None:
    assert len({one.name for one in gpu_breaks.BREAKS}) == len(gpu_breaks.BREAKS) >= 10
    for one in gpu_breaks.BREAKS:
        assert one.part in gpu_check_parts.PARTS, one
        path = tmp_path / "ranvier" / one.file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src" / "ranvier" / one.file, path)
        assert one.apply(tmp_path) == "", one.name
        compile(path.read_text("utf-8"), one.file, "exec")
        assert one.after in path.read_text("utf-8")
        shutil.copy(ROOT / "src" / "ranvier" / one.file, path)


def test_breaks_of_gpu_code_are_skipped_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only = ["--only", "attention-scale,float8-scale"]
    assert gpu_breaks.main([*only, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("skipped      only a GPU runs this code" in line for line in lines[:2]), lines
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_breaks.main(only)
    assert "--device cuda needs a GPU, and torch sees none" in capsys.readouterr().err


def test_red_says_nothing_if_a_part_fails_without_a_break(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[Path] = []

    def run_part(source: Path, part: str, device: str) -> subprocess.CompletedProcess[str]:
        sources.append(source)
        return subprocess.CompletedProcess([], 1, f"{part} failed\n        exit status 70\n", "")

    run_part = create_autospec(gpu_breaks.run_part, side_effect=run_part)
    monkeypatch.setattr(gpu_breaks, "run_part", run_part)
    assert gpu_breaks.main(["--only", "lora-alpha,muon-rate", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "2 of 2 breaks turn the check red." in out
    assert "Without a break these parts fail" in out and "lora failed" in out
    assert sources.count(ROOT / "src") == 2 and len(sources) == 4


def test_parts_of_a_broken_package_find_its_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    run = create_autospec(subprocess.run)
    monkeypatch.setattr(gpu_breaks.subprocess, "run", run)
    gpu_breaks.run_part(tmp_path, "lora", "cpu")
    path = run.call_args.kwargs["env"]["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(tmp_path), "/elsewhere"]


def test_what_differs_needs_no_torch() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import gpu_check; "
        "assert gpu_check.main(['--differing']) == 0; "
        "assert not {'torch', 'ranvier', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Directories of runs that strangers made: see README.md beside this file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hostile.cases import SECRET, change, rows, tells_secret, within
from hostile.test_hostile_models import published
from ranvier.errors import RanvierError
from ranvier.infer.load import load_config_from_dir
from ranvier.train import import_export
from ranvier.train.report import pipeline, report
from ranvier.train.resume import run_directory as folders

RUNS = rows("runs.txt")


def carry(run: Path, out: Path) -> None:
    out.mkdir()
    import_export.copy_origin_files(str(run), out)


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "report": lambda run, out: report.write_report(run),
    "export": import_export.export_model,
    "settings": lambda run, out: load_config_from_dir(run),
    "record": lambda run, out: folders.update_run_json(run, status="finished"),
    "continue": lambda run, out: folders.write_header(run, load_config_from_dir(run), 1),
    "lock": lambda run, out: folders.lock_dir(run).close(),
    "timeline": lambda run, out: pipeline.read_timeline(run),
    "carry": carry,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an imported model that has taken a step."""
    folder = tmp_path_factory.mktemp("good")
    import_export.import_model(str(published(folder / "model")), folder / "run")
    row = {"step": 0, "loss": 1.0, "step_seconds": 0.1, "tokens": 8}
    (folder / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "run" / "run.json").write_text('{"status": "running"}')
    return folder / "run"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_as_its_line_says(name: str, run: Path, tmp_path: Path) -> None:
    outcome, _, command, changes = RUNS[name]
    folder, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, folder)
    change(folder, tmp_path / "outside", changes)
    with within(240):
        if outcome == "ok":
            COMMANDS[command](folder, out)
        else:
            with pytest.raises(RanvierError) as found:
                COMMANDS[command](folder, out)
            assert str(found.value.exit_code) == outcome, str(found.value)
    assert (tmp_path / "outside" / "secret.txt").read_text() == SECRET, "it was overwritten"
    assert not tells_secret(out), "it was published"
    assert not any(SECRET in page.read_text() for page in folder.glob("report.html"))

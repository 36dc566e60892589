"""A kind of model that is one row and its own file: it trains, resumes, is verified and planned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commands import call, losses, metrics
from kinds.vectors import VECTORS, VectorBatch, VectorSource
from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.config.kinds import MODEL_KINDS
from ranvier.config.plan import Plan
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig, load_run_config, run_from_tables
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.planner.comm_volume import step_comm_volume
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.tools.dry_run import dry_run, resolve_dry_run
from ranvier.tools.verify import compare_with_serial, shrink_run
from ranvier.tools.verify_run import train_and_judge
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

CPU = torch.device("cpu")
GRIDS: list[dict[str, Any]] = [
    {"pipe": 2, "data": 2},
    {"row": 2, "col": 2},
    {"row": 2, "col": 2, "col_splits": "features"},
    {"depth": 2, "data": 2},
    {"pipe": 2, "row": 2, "col": 2},
]
SMALL = ("--model.kind", "vectors", "--data.seq-len", "4", "--train.steps", "4")

with_vectors = mock.patch.dict(MODEL_KINDS, {VECTORS.name: VECTORS})
"""The table with one row more, also in workers."""


@pytest.fixture(autouse=True)
def second_kind() -> Iterator[None]:
    with with_vectors:
        yield


def run_of(plan: dict[str, Any], out: str = "", steps: int = 4) -> ResolvedRun:
    """A run of the second kind in float64."""
    tables: dict[str, Any] = {
        "model": {"kind": "vectors", "layers": 3, "classes": 11, "max_seq": 8},
        "data": {"seq_len": 8},
        "plan": {"data": 1, "global_batch": 16, **plan},
        "optim": {"lr": 1e-2},
        "train": {"steps": steps, "dtype": "fp64", "output_dir": out, "eval_interval": 2},
        "checkpoint": {"interval": 2, "keep_latest": 0},
    }
    run = run_from_tables(tables)
    return resolve_run(run, ResolveContext(world_size=run.plan.world_size))


@with_vectors
def trained(grid: Grid, plan: dict[str, Any], out: str, resume: str = "") -> dict[str, Any]:
    """Losses, norms and full weights of a run; resume: a checkpoint to go on from."""
    run = run_of(plan, out)
    trainer = Trainer.from_run(run, grid, CPU, VectorSource().open(run, []))
    if resume:
        trainer.checkpointer.resume_from(Path(resume))
    rows = [*trainer.run_steps()]
    trainer.save_checkpoint()
    names = ("loss", "grad_norm", "val_loss")
    return {name: [row[name] for row in rows if row[name] is not None] for name in names}


@with_vectors
def compared(grid: Grid, plan: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """What differs from plain PyTorch, what was not predicted, and how much was compared."""
    run = shrink_run(run_of(plan))
    torch.manual_seed(run.train.seed)
    serial = run.model_kind.build_model(run.model, run.lora).double()
    findings, lines, _ = compare_with_serial(run, grid, serial)
    wrong = [one.quantity for one in findings if not one.is_within_limit]
    return wrong, lines, len(findings)


@with_vectors
def compared_with_fault(grid: Grid, plan: dict[str, Any]) -> tuple[list[str], list[str], int]:
    with mock.patch.object(VectorBatch, "local_inputs", wrong_part):
        return compared(grid, plan)


LOCAL_INPUTS = VectorBatch.local_inputs


def wrong_part(batch: VectorBatch, grid: Grid, table: Any) -> dict[str, Any]:
    """The fault: ranks of row have the part of their neighbour."""
    swapped = replace(batch, vectors=batch.vectors.roll(batch.vectors.shape[1] // 2, 1))
    return LOCAL_INPUTS(swapped, grid, table)


def ranks_of(plan: dict[str, Any]) -> dict[str, int]:
    return {axis: size for axis, size in plan.items() if isinstance(size, int)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("plan", GRIDS, ids=str)
def test_it_equals_plain_pytorch_on_grids(pool: Pool, plan: dict[str, Any]) -> None:
    """Losses, gradients, norms, weights after steps, and communication as predicted."""
    for wrong, lines, count in pool.on_grid(ranks_of(plan), compared, plan):
        assert (wrong, lines) == ([], []) and count > 20


def test_a_wrong_part_of_a_batch_is_found(pool: Pool) -> None:
    for wrong, _, _ in pool.on_grid({"row": 2}, compared_with_fault, {"row": 2}):
        assert "loss of step 0" in wrong and "gradient of head.weight" in wrong


@pytest.mark.full
def test_it_resumes_on_the_same_and_on_another_grid(pool: Pool, tmp_path: Path) -> None:
    whole = pool.on_grid({}, trained, {}, str(tmp_path / "one"))[0]
    first: dict[str, Any] = {"row": 2, "col": 2}
    found = pool.on_grid(first, trained, first, str(tmp_path / "first"))
    assert all(one == found[0] for one in found)
    for name, numbers in found[0].items():
        assert numbers == pytest.approx(whole[name], rel=1e-11), name
    saved = find_checkpoints(tmp_path / "first" / "checkpoints")[0]
    assert saved.name == "step-00000002"
    again = pool.on_grid(first, trained, first, str(tmp_path / "again"), str(saved))
    assert again[0]["loss"] == found[0]["loss"][2:], "bit by bit"
    other: dict[str, Any] = {"pipe": 2, "data": 2}
    moved = pool.on_grid(other, trained, other, str(tmp_path / "moved"), str(saved))
    assert moved[0]["loss"] == pytest.approx(whole["loss"][2:], rel=1e-11)


def test_a_run_of_it_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", *SMALL, "--nproc", "1") == 0
    said = capsys.readouterr().out
    assert "embed 16, mlp 24, vocab 24, 8 vectors" in said
    assert "verified: the grid equals one process" in said


def test_a_fault_in_a_run_of_it_is_found() -> None:
    """Of training only: what is compared with it reads the samples in their order."""
    run = shrink_run(run_of({}))
    read = Trainer._batch_maker

    def from_the_next_sample(trainer: Trainer) -> Any:
        make = read(trainer)
        return lambda step: make(step + 1)

    with mock.patch.object(Trainer, "_batch_maker", from_the_next_sample):
        report = train_and_judge(run, ProcessInfo(), Grid({}), CPU)
    assert report.differences["loss of step 1"][0] > 1e-3


def test_a_rank_of_it_says_what_is_predicted() -> None:
    run = run_of({"pipe": 2, "row": 2, "col": 2, "data": 2})
    run = replace(run, train=replace(run.train, dtype="bf16"))
    found = dry_run(run, world=16, rank=5)
    run = resolve_dry_run(run, world=16, rank=5)
    flow = ActivationShape(run.plan.micro_batch, run.data.seq_len, 2, statistics_itemsize=4)
    predicted = step_comm_volume(resolve_model_spec(run), run.plan, flow, stage=found.index["pipe"])
    assert found.comm_bytes() == predicted.bytes_by_axis()
    assert found.shards["blocks.0.up.weight"] == ((12, 8), (24, 16))


def test_predicted_memory_of_it_is_what_a_rank_holds() -> None:
    tables: dict[str, Any] = {
        "model": {"size": "vectors-1b", "layers": 3, "max_seq": 512},
        "data": {"seq_len": 512},
        "plan": {"data": 1, "row": 2, "global_batch": 32, "micro_batch": 4},
        "train": {"dtype": "bf16"},
    }
    run = resolve_dry_run(run_from_tables(tables), world=2, rank=1)
    found = dry_run(run, world=2, rank=1).memory
    flow = ActivationShape(4, 512, 2, statistics_itemsize=4)
    predicted = peak_memory(resolve_model_spec(run), run.plan, flow, stage=0)
    for name in ("weights", "master", "moments"):
        assert predicted.device[name] == found.device[name], name
    assert predicted.allocated_bytes == pytest.approx(found.allocated_bytes, rel=0.05)


def test_layouts_of_it_are_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model.size", "vectors-1b", "--cluster", "dgx-h100", "--devices", "2")
    file = tmp_path / "plans.json"
    assert call("plan", *words, "--plan.pipe", "1", "--json", str(file)) == 0
    capsys.readouterr()
    found = json.loads(file.read_text())
    assert "--model.size vectors-1b" in found["command"]
    weights = 2.0 * run_from_tables({"model": {"size": "vectors-1b"}}).model.num_parameters
    assert found["best"]["memory_bytes"] > weights / 2


def test_the_command_trains_and_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("train", *SMALL, "--nproc", "1", "--train.output-dir", "run") == 0
    assert "8 x 4 vectors per step" in capsys.readouterr().out
    config = load_run_config(tmp_path / "run" / "config.toml", in_run=True)
    assert (config.model.kind, config.model.size) == ("vectors", "vectors-tiny")
    assert call("train", "run", "--nproc", "1", "--train.steps", "8") == 0
    said = capsys.readouterr().out
    assert len(losses(tmp_path / "run")) == 8 and "ranvier generate" not in said
    assert "YOUR.txt" not in said
    assert metrics(tmp_path / "run")[-1]["vectors"] == 8 * 8 * 4
    assert "vectors/s" in said and "tokens/s" not in said
    assert call("generate", "run") == 64
    assert "model.kind='vectors' is not a decoder." in capsys.readouterr().err


def test_help_shows_the_settings_of_the_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", "--model.kind", "vectors", "--help", "model") == 0
    said = capsys.readouterr().out
    assert "--model.classes 10   (integer, 2 to 1,048,576)" in said
    assert "--model.heads" not in said


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"kind": "vector"}, "model.kind='vector' is unknown. Did you mean 'vectors'?"),
        ({"size": "vectors-tin"}, "model.size='vectors-tin' is unknown. Did you mean"),
        (
            {"kind": "decoder", "size": "vectors-tiny"},
            "model.kind='decoder' has no model.size='vectors-tiny', which belongs to kind",
        ),
        ({"kind": "vectors", "heads": 4}, "model.heads is not a setting."),
    ],
)
def test_mistakes_are_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        run_from_tables({"model": model})
    assert str(caught.value).startswith(words)


def test_the_kind_follows_from_the_size() -> None:
    assert run_from_tables({"model": {"size": "vectors-1b"}}).model.kind == "vectors"
    assert run_from_tables({"model": {"size": "gpt2"}}).model.kind == "decoder"
    assert run_from_tables({"format": 2, "model": {"embed": 64}}).model.kind == "decoder"
    assert RunConfig(plan=Plan()).model == run_from_tables({}).model


def test_sizes_of_kinds_have_distinct_names() -> None:
    names = [name for kind in MODEL_KINDS.values() for name in kind.sizes]
    assert len(names) == len({*names})


def test_the_page_shows_this_file() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "contributing" / "extending.md").read_text(encoding="utf-8")
    section = page.partition("## A kind of model")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", section, re.DOTALL)
    source = (root / "tests" / "kinds" / "vectors.py").read_text(encoding="utf-8")
    assert len(blocks) == 2 and all(block in source for block in blocks)

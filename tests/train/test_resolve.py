"""From what a user wrote to the settings that train: resolvers in one list, with reasons."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import training
from commands import SMALL_OPTIONS, call
from machines import machine
from pool import Pool
from ranvier.cli.main import main
from ranvier.config.plan import Plan
from ranvier.config.resolved_run import ResolvedRun, decision_lines
from ranvier.config.run import RunConfig, run_from_tables, to_toml
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.tools.local_cluster import resize_cluster
from ranvier.train import resolve
from ranvier.train.resolve import RESOLVERS, ResolveContext, resolve_run
from ranvier.train.resume import checkpointing
from ranvier.train.trainer import Trainer

CPU = torch.device("cpu")


def here(world: int = 1, **facts: Any) -> ResolveContext:
    return ResolveContext(world_size=world, device=CPU, **facts)


def settings_of(seed: int) -> tuple[RunConfig, ResolveContext]:
    """Settings with some left open, on some number of ranks."""
    drawn = random.Random(seed)
    world = drawn.choice([1, 2, 4, 8])
    axes = drawn.choice([{}, {"row": 2}, {"depth": 2}, {"pipe": 2}, {"row": 2, "col": 1}])
    plan: dict[str, Any] = axes if world > 1 else {}
    plan["global_batch"] = drawn.choice([16, 32])
    tables: dict[str, Any] = {"plan": plan, "train": {"device": "cpu"}}
    if drawn.random() < 0.5:
        tables["train"]["dtype"] = drawn.choice(["fp32", "fp64"])
    if drawn.random() < 0.5:
        tables["optim"] = {"warmup_steps": 3}
    known = drawn.random() < 0.5
    find = (lambda: resize_cluster(machine(), world, 1)) if known else None
    return run_from_tables(tables), here(world, find_cluster=find)


@pytest.mark.parametrize("seed", range(12))
def test_every_change_of_a_setting_is_a_decision_and_a_second_pass_changes_nothing(
    seed: int,
) -> None:
    settings, context = settings_of(seed)
    run = resolve_run(settings, context)
    replayed: RunConfig = settings
    for one in run.decisions:
        section, _, name = one.setting.partition(".")
        assert getattr(getattr(replayed, section), name) == one.before
        part = replace(getattr(replayed, section), **{name: one.value})
        replayed = replace(replayed, **{section: part})
        assert one.reason and one.resolver
    assert replayed == run.settings
    again = resolve_run(run, context)
    assert again == run and again.decisions == run.decisions
    assert resolve_run(run.settings, context).settings == run.settings


def test_resolvers_run_in_the_order_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def record(name: str) -> resolve.Resolver:
        def resolver(run: ResolvedRun, _: ResolveContext) -> ResolvedRun:
            called.append(name)
            return run.decide(name, {"train.seed": len(called)}, f"call {len(called)}")

        return resolver

    monkeypatch.setattr(resolve, "RESOLVERS", tuple(map(record, "abc")))
    run = resolve_run(RunConfig(), here())
    assert called == ["a", "b", "c"] and run.train.seed == 3
    assert [one.reason for one in run.decisions] == ["call 1", "call 2", "call 3"]
    names = [resolver.__name__ for resolver in RESOLVERS]
    assert names.index("resolve_layout") < names.index("resolve_ranks")
    assert names.index("resolve_ranks") < names.index("resolve_device_settings")


def test_what_the_user_gave_is_not_decided() -> None:
    tables = {
        "plan": {"data": 1, "micro_batch": 4, "compile": "off", "auto": False},
        "optim": {"lr": 1e-3, "warmup_steps": 5},
        "train": {"device": "cpu", "backend": "gloo", "dtype": "fp64"},
        "data": {"balance": "none", "packing": "full"},
    }
    run = resolve_run(run_from_tables(tables), here())
    assert run.decisions == () and decision_lines(run) == [
        "nothing to resolve: all settings are given"
    ]


def test_what_the_context_does_not_know_stays_open() -> None:
    run = resolve_run(RunConfig(), ResolveContext(world_size=1))
    assert (run.train.device, run.train.dtype, run.train.output_dir) == ("auto", "auto", "")
    run = resolve_run(run, here(output_dir=Path("runs/x")))
    assert (run.train.device, run.train.dtype, run.train.output_dir) == ("cpu", "fp32", "runs/x")
    (named,) = run.decisions_by("output directory")
    assert (named.before, named.value) == ("", "runs/x")


def test_a_restart_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    launches = [{"began": 5.0}]
    (tmp_path / "run.json").write_text(json.dumps({"launches": launches}))
    tables = {"train": {"output_dir": str(tmp_path)}, "checkpoint": {"resume": "never"}}
    run = run_from_tables(tables)
    first = here(process=ProcessInfo(start_time=5.0))
    assert resolve_run(run, first).checkpoint.resume == "never"
    later = here(process=ProcessInfo(start_time=5.0, attempt=1))
    found = resolve_run(run, later)
    assert found.checkpoint.resume == "auto" and found.decisions_by("restart")
    other = here(process=ProcessInfo(start_time=6.0, attempt=1))
    assert resolve_run(run, other).checkpoint.resume == "never", "not its own launch"


def received(grid: Grid, run: ResolvedRun) -> tuple[ResolvedRun, Any]:
    """Returns the run as it arrives on a rank; decisions separately, as == ignores them."""
    return run, run.decisions


def test_decisions_travel_to_ranks_but_not_into_files(pool: Pool) -> None:
    run = resolve_run(RunConfig(), here())
    assert run.decisions
    assert pool.on_grid({"data": 2}, received, run) == [(run, run.decisions)] * 2
    assert "decisions" not in to_toml(run) and to_toml(run) == to_toml(run.settings)
    assert "decisions" not in checkpointing.run_to_dict(run)


def test_a_setting_is_reopened_to_what_the_user_wrote() -> None:
    run = resolve_run(RunConfig(), here())
    assert run.reopen("plan.compile").plan.compile == "auto"
    assert run.reopen("plan.row") == run
    assert resolve_run(run.reopen("plan.compile"), here()) == run


def test_a_trainer_takes_nothing_but_a_resolved_run(tmp_path: Path) -> None:
    settings: Any = training.run_of(str(tmp_path), {}, 1).settings
    nothing: Any = None
    with pytest.raises(TypeError, match="resolve_run"):
        Trainer.from_run(settings, Grid({}), CPU, nothing)


def test_a_dry_run_of_training_says_what_is_decided_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--dry-run", "--train.device", "cpu", "--plan.row", "2"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and not any(tmp_path.iterdir()), "nothing is written"
    for words in (
        "ranks",
        "plan.micro_batch = 8 (was -1): all samples of a rank",
        "the degrees are set",
    ):
        assert words in said
    with pytest.raises(SystemExit) as ended:
        main(["dry-run", "--plan.row", "2", "--output", "found.json"])
    said = capsys.readouterr().out
    assert "plan.micro_batch = 8 (was -1)" in said and "train.dtype = bf16 (was auto)" in said
    found = json.loads(Path("found.json").read_text())["decisions"]
    assert {"resolver", "setting", "before", "value", "reason"} == set(found[0])


def test_a_continued_run_keeps_the_decisions_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("--nproc", "1", "--train.output-dir", "run", "--train.steps")
    assert call("train", *SMALL_OPTIONS, *few, "1") == 0
    first = json.loads(Path("run/run.json").read_text())["decisions"]
    assert any(one["setting"] == "plan.micro_batch" for one in first)
    assert call("train", "run", "--nproc", "1", "--train.steps", "2") == 0
    assert json.loads(Path("run/run.json").read_text())["decisions"][: len(first)] == first


def test_a_missing_device_does_not_hide_other_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call("train", "--train.device", "cuda", "--optim.lr", "0") == 64
    assert "optim.lr=0" in capsys.readouterr().err
    assert call("train", "--train.device", "cuda") == 64
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_one_reason_for_several_settings_is_printed_once() -> None:
    run = ResolvedRun.from_config(RunConfig()).decide(
        "layout", {"plan.row": 2, "plan.col": 4}, "the planner says so"
    )
    assert decision_lines(run) == [
        "layout",
        "  the planner says so",
        "    plan.row = 2 (was 1)",
        "    plan.col = 4 (was 1)",
    ]
    assert run.plan == Plan(row=2, col=4)

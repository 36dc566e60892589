"""The layout of a run that leaves it open, and how near its prediction was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import machine
from ranvier.cli import main
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig, run_from_tables, to_toml
from ranvier.config.sections import MemoryConfig
from ranvier.errors import PlanError
from ranvier.planner import cluster
from ranvier.tools import auto_plan
from ranvier.train import prediction
from ranvier.train.prediction import PredictionCheck, StepPrediction

SAID = StepPrediction("because", "here", 0.1, 0.09, 0.11, 2**30, {"compute": 0.08, "row": 0.02})


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of round numbers in place of this one."""
    monkeypatch.setattr(auto_plan, "detect_cluster", lambda *_: machine())


def on_cpu(**plan: Any) -> RunConfig:
    run = RunConfig(plan=Plan(**plan))
    return replace(run, train=replace(run.train, device="cpu"))


@pytest.mark.parametrize(
    ("plan", "world", "open_"),
    [
        ({}, 4, True),
        ({"global_batch": 16, "micro_batch": 1}, 4, True),
        ({}, 1, False),
        ({"row": 2}, 4, False),
        ({"data": 4}, 4, False),
        ({"auto": False}, 4, False),
    ],
)
def test_a_layout_is_open_where_nobody_gave_a_degree(
    plan: dict[str, Any], world: int, open_: bool
) -> None:
    assert auto_plan.needs_planning(RunConfig(plan=Plan(**plan)), world) == open_


def test_the_planner_fills_all_ranks_and_keeps_what_was_given() -> None:
    run, said = auto_plan.plan_run(on_cpu(micro_batch=1, overlap=("dx",)), 4)
    assert said is not None and said.low < said.seconds < said.high
    plan = run.check_and_resolve(4).plan
    assert plan.world_size == 4 and not plan.auto
    assert plan.micro_batch == 1 and plan.overlap == ("dx",)
    assert "ms a step" in said.why


def test_a_fit_keeps_its_own_choices() -> None:
    """memory.auto measures whole models: no pipeline, and what it finds stays open."""
    run, _ = auto_plan.plan_run(replace(on_cpu(), memory=MemoryConfig(auto=True)), 4)
    assert run.plan.pipe == 1 and run.plan.world_size == 4
    assert (run.plan.micro_batch, run.plan.recompute) == (-1, "none")


def test_what_is_wrong_is_left_to_the_check() -> None:
    run, said = auto_plan.plan_run(on_cpu(global_batch=0), 4)
    assert said is None and run.plan.degrees == Plan().degrees


def test_what_no_layout_can_divide_is_refused() -> None:
    with pytest.raises(PlanError, match="batch"):
        auto_plan.plan_run(on_cpu(), 7)


def test_an_unknown_machine_leaves_all_ranks_on_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto_plan, "detect_cluster", lambda *_: cluster.find_device("abacus"))
    run, said = auto_plan.plan_run(on_cpu(), 4)
    assert said is None and run.check_and_resolve(4).plan.data == 4
    assert "abacus" in capsys.readouterr().out


def test_auto_is_a_word_in_files_and_options(tmp_path: Path) -> None:
    assert run_from_tables({"plan": "auto"}) == RunConfig()
    with pytest.raises(PlanError):
        run_from_tables({"plan": "best"})
    path = tmp_path / "run.toml"
    path.write_text('plan = "auto"\n')
    for words in ([str(path)], ["--plan", "auto"], ["--plan=auto"]):
        assert main.parse_run_options("train", words).plan == Plan()


def test_a_run_that_goes_on_keeps_its_layout(tmp_path: Path) -> None:
    """Its file says all degrees; with --nproc alone it goes on as before, all else on data."""
    (tmp_path / "config.toml").write_text(to_toml(on_cpu(data=2, row=2)))
    words = [str(tmp_path), "--nproc", "8"]
    run = main._run_config(main.parse_run_options("train", words))
    kept, said = main._plan_layout(words, run, 8, None, None)
    assert said is None and kept.check_and_resolve(8).plan.degrees == Plan(data=4, row=2).degrees


def test_simple_layouts_come_before_equal_ones() -> None:
    """On shared cores a pipeline would hide its bubble; data alone is as good, and plainer."""
    run, _ = auto_plan.plan_run(on_cpu(), 2)
    assert run.plan.degrees == Plan(data=2).degrees


def test_steps_are_held_against_the_prediction() -> None:
    seen = PredictionCheck(SAID)
    rows = [
        {"step_seconds": t, "peak_memory_bytes": 2**30}
        for t in (9.0, 9.0, *[0.12] * (prediction.CHECK_AFTER_STEPS - 2))
    ]
    lines = [seen.add_step(row, counted=True) for row in rows]
    assert not any(lines[:-1])
    assert "100 ms" in lines[-1] and "120 ms (+20%)" in lines[-1] and "calibrate" in lines[-1]
    assert "predicted 1.00, measured 1.00 GiB" in lines[-1]
    page = prediction.prediction_section(seen.to_dict())
    assert "Prediction" in page and "because" in page and "-16.7%" in page
    assert (
        prediction.prediction_section(None)
        == prediction.prediction_section({"predicted": {}})
        == ""
    )

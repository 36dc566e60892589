"""The layout of a run that leaves it open, and how near its prediction was."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from machines import machine
from ranvier.cli import main
from ranvier.config.plan import Plan
from ranvier.config.resolved_run import ResolvedRun, StepPrediction
from ranvier.config.run import RunConfig, run_from_tables, to_toml
from ranvier.config.sections import MemoryConfig
from ranvier.errors import PlanError
from ranvier.planner import cluster
from ranvier.planner.cluster import Cluster
from ranvier.tools.local_cluster import resize_cluster
from ranvier.train import prediction
from ranvier.train.layout import needs_planning
from ranvier.train.prediction import PredictionCheck
from ranvier.train.resolve import ResolveContext, resolve_run

SAID = StepPrediction("because", "here", 0.1, 0.09, 0.11, 2**30, {"compute": 0.08, "row": 0.02})


def planned(run: RunConfig, world: int, find: Callable[[], Cluster] | None = None) -> ResolvedRun:
    """The run as it is resolved on a machine of round numbers."""
    context = ResolveContext(
        world_size=world,
        device=torch.device("cpu"),
        find_cluster=find or (lambda: resize_cluster(machine(), world, 1)),
    )
    return resolve_run(run, context)


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
    assert needs_planning(RunConfig(plan=Plan(**plan)), world) == open_


def test_the_planner_fills_all_ranks_and_keeps_what_was_given() -> None:
    run = planned(on_cpu(micro_batch=1, overlap=("dx",)), 4)
    said = run.prediction
    assert said is not None and said.low < said.seconds < said.high
    plan = run.plan
    assert plan.world_size == 4 and not plan.auto
    assert plan.micro_batch == 1 and plan.overlap == ("dx",)
    assert "ms per step" in said.why
    assert all(said.why in one.reason for one in run.decisions_by("layout"))
    assert resolve_run(run, ResolveContext(world_size=4)) == run, "it is not planned again"


def test_a_fit_keeps_its_own_choices() -> None:
    """With memory.auto the layout has no pipeline, and micro-batch and recomputation stay open.

    The planner's closed form chooses them after the layout, and trial steps verify the choice.
    """
    run = planned(replace(on_cpu(), memory=MemoryConfig(auto=True)), 4)
    assert run.plan.pipe == 1 and run.plan.world_size == 4
    assert (run.plan.micro_batch, run.plan.recompute) == (-1, "none")


def test_what_is_wrong_is_left_to_the_check() -> None:
    with pytest.raises(PlanError, match="global_batch=0 cannot be split"):
        planned(on_cpu(global_batch=0), 4, lambda: pytest.fail("nothing is planned"))


def test_what_no_layout_can_divide_is_refused() -> None:
    with pytest.raises(PlanError, match="batch"):
        planned(on_cpu(), 7)


def test_an_unknown_machine_leaves_all_ranks_on_data(capsys: pytest.CaptureFixture[str]) -> None:
    run = planned(on_cpu(), 4, lambda: cluster.find_device("abacus"))  # type: ignore[arg-type, return-value]
    assert run.prediction is None and run.plan.data == 4
    assert "abacus" in capsys.readouterr().out
    assert "abacus" in run.decisions_by("layout")[0].reason


def test_auto_is_a_word_in_files_and_options(tmp_path: Path) -> None:
    assert run_from_tables({"plan": "auto"}) == RunConfig()
    with pytest.raises(PlanError):
        run_from_tables({"plan": "best"})
    path = tmp_path / "run.toml"
    path.write_text('plan = "auto"\n')
    for words in ([str(path)], ["--plan", "auto"], ["--plan=auto"]):
        assert main.parse_train_options(words).plan == Plan()


def test_a_run_that_goes_on_keeps_its_layout(tmp_path: Path) -> None:
    """Its file says all degrees; with --nproc alone it goes on as before, all else on data."""
    (tmp_path / "config.toml").write_text(to_toml(on_cpu(data=2, row=2)))
    words = [str(tmp_path), "--nproc", "8"]
    settings = main.parse_train_options(words).settings
    kept = resolve_run(settings, main._launch_context(words, settings, 8, None, None))
    assert kept.prediction is None and kept.plan.degrees == Plan(data=4, row=2).degrees


def test_simple_layouts_come_before_equal_ones() -> None:
    """On shared cores a pipeline would hide its bubble; data alone is as good, and plainer."""
    run = planned(on_cpu(), 2)
    assert run.plan.degrees == Plan(data=2).degrees


def test_steps_are_held_against_the_prediction() -> None:
    seen = PredictionCheck(SAID)
    rows = [
        {"step_seconds": t, "peak_memory_bytes": 3 * 2**28}
        for t in (9.0, 9.0, *[0.12] * (prediction.CHECK_AFTER_STEPS - 2))
    ]
    lines = [seen.add_step(row, counted=True) for row in rows]
    assert not any(lines[:-1])
    assert "100 ms" in lines[-1] and "120 ms (+20%)" in lines[-1] and "calibrate" in lines[-1]
    assert "predicted 1.00 GiB, measured 0.75 GiB" in lines[-1]
    page = prediction.prediction_section(seen.to_dict())
    assert "Prediction" in page and "because" in page
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", page)
    assert cells[:4] == ["", "predicted", "measured", "measured vs. predicted"]
    assert cells[4:8] == ["seconds per step", "0.1", "0.12", "+20.0%"]
    assert cells[8:12] == ["GiB of tensors per device", "1", "0.75", "-25.0%"]
    assert (
        prediction.prediction_section(None)
        == prediction.prediction_section({"predicted": {}})
        == ""
    )

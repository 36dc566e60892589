"""`ranvier simulate pipeline` and the pipeline in a report: times, and mistakes in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commands import call
from ranvier.config import run as runs
from ranvier.config.arguments import SimulateOptions
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.pipeline import timeline_svg
from ranvier.pipeline.policy import PipelineShape
from ranvier.pipeline.policy_search import choose_policy
from ranvier.pipeline.simulator import JobTimes, simulate_step
from ranvier.tools.simulate import simulate_run as command
from ranvier.tools.simulate import times_from_run, times_from_toml, times_from_work
from ranvier.train.report import pipeline, report

FILES = ("timeline.svg", "timeline.html", "timeline-trace.json")
FOUR = {"plan": {"pipe": 4, "global_batch": 8, "micro_batch": 1}}
TABLE = """
forward = [1, 1, 1, 1.0]
backward = 1.0
weight = [1, 1, 1, 1]
link = 0.5
[stragglers]
3 = 2.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def four(**plan: Any) -> RunConfig:
    return runs.run_from_tables({"plan": {**FOUR["plan"], **plan}})


def recorded(folder: Path, shape: PipelineShape, times: JobTimes, **more: Any) -> dict[str, Any]:
    """The timeline that a run of 1F1B leaves."""
    step = simulate_step(shape, choose_policy("1f1b", shape, times), times)
    stages: list[list[Any]] = [[] for _ in range(shape.stages)]
    for stage, *job in step.spans:
        stages[stage].append(job)
    table = {
        "policy": "1f1b",
        "step": 99,
        "micro_batches": shape.micro_batches,
        "chunks": 1,
        "seconds": step.seconds,
        "stages": stages,
        **more,
    }
    folder.mkdir(exist_ok=True)
    (folder / "timeline.json").write_text(json.dumps(table))
    return table


def run_folder(folder: Path, shape: PipelineShape, times: JobTimes, **more: Any) -> Path:
    """The directory of a run with a timeline and a step."""
    recorded(folder, shape, times, **more)
    (folder / "config.toml").write_text(runs.to_toml(four()))
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0, "step_seconds": 1.0}\n')
    return folder


def drawn(folder: Path) -> list[str]:
    """Names of the steps in the trace; the drawings are whole."""
    root = ElementTree.fromstring((folder / FILES[0]).read_text())
    assert root.tag.endswith("svg")
    assert (folder / FILES[1]).read_text().startswith("<!doctype html>")
    assert all((folder / name).stat().st_size < 1_000_000 for name in FILES)
    events = json.loads((folder / FILES[2]).read_text())["traceEvents"]
    return [e["args"]["name"].split(":")[0] for e in events if e["name"] == "process_name"]


SHAPE = PipelineShape(4, 8)
UNEVEN = JobTimes((0.01, 0.02, 0.02, 0.03), (0.02, 0.04, 0.04, 0.06))


def test_the_command_plays_all_policies(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    words = [f"--plan.{key.replace('_', '-')}={value}" for key, value in FOUR["plan"].items()]
    assert call("simulate", "pipeline", *words, "--policies", "1f1b", "gpipe") == 0
    out = capsys.readouterr().out
    assert "stages: 4, chunks per stage: 1, micro-batches: 8" in out
    assert "stage 3: " in out and "% of the work" in out
    assert "with 1F1B" in out and "to best" in out and "mean forwards" in out
    assert drawn(here) == ["simulated, message_driven", "simulated, 1f1b", "simulated, gpipe"]


def test_a_file_is_read_and_a_policy_that_does_not_fit_says_why(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "run.toml").write_text(
        "[plan]\npipe = 2\nvirtual_stages = 2\nglobal_batch = 4\nmicro_batch = 1\n"
    )
    assert (
        call(
            "simulate",
            "pipeline",
            "run.toml",
            "--policies",
            "1f1b",
            "--output",
            "two",
            "--link",
            "0.1",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "1f1b           does not fit: 1f1b does not support virtual_stages=2." in out
    assert drawn(here / "two") == ["simulated, message_driven"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "1f2b"], "Did you mean '1f1b'"),
        (["--straggler", "9=2"], "straggler '9=2' is not valid"),
        (["--straggler", "slow"], "straggler 'slow' is not valid"),
        (["--jitter", "9"], "jitter=9.0 is out of range"),
        (["--link", "-1"], "link=-1.0 is not a valid time"),
        (["--times", "none.toml"], "none.toml cannot be read"),
        (["--times", "."], "timeline.json cannot be read"),
        (["--times", "times.toml"], "forward has 3 times"),
        (["--times", "times.toml", "--output", "times.toml"], "forward has 3 times"),
        (["--output", "times.toml", "--policies", "gpipe"], "cannot be used as a directory"),
    ],
)
def test_mistakes_are_told_without_traceback(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "times.toml").write_text("forward = [1, 2, 3]")
    options = ["--plan.pipe", "4", "--plan.schedule", "1f1b"]
    assert call("simulate", "pipeline", *options, *words) == PlanError.exit_code
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors


def test_times_come_from_a_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "times.toml").write_text(TABLE)
    times = times_from_toml(here / "times.toml", SHAPE)
    ones = (1.0,) * 4
    assert times == JobTimes(ones, ones, ones, link=(0.5,) * 3, stragglers={3: 2.0})
    wanted = SimulateOptions(times="times.toml", policies=("1f1b",), straggler=("3=1",), link=0.0)
    assert command(four(schedule="1f1b"), wanted) == 0
    # 1F1B of even stages: (micro-batches + stages - 1)(f + b)
    assert "1f1b: 33 s, bubble 27.3%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backward = [1]", "has no forward"),
        ("forwards = [1]", "Did you mean 'forward'"),
        ("forward = ['a']", "is not a list of numbers"),
        ("forward = 1\nstragglers = 3", "is not a table"),
        ("forward = 1\n[stragglers]\n7 = 2", "straggler '7=2'"),
        ("forward = [", "is not valid TOML"),
    ],
)
def test_a_broken_table_is_refused(text: str, message: str, here: Path) -> None:
    (here / "times.toml").write_text(text)
    with pytest.raises(PlanError, match=message):
        times_from_toml(here / "times.toml", SHAPE)


def test_times_come_from_a_run(here: Path) -> None:
    recorded(here / "run", SHAPE, UNEVEN)
    source = times_from_run(here / "run")
    assert source.times.forward == pytest.approx(UNEVEN.forward)
    # without weight gradients of their own they are half of backward
    assert source.times.backward == pytest.approx([b / 2 for b in UNEVEN.backward])
    assert source.times.weight == source.times.backward
    assert source.recorded_step is not None and source.recorded_step.seconds > 0.5


def test_the_run_is_drawn_above_what_is_simulated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(here / "run", SHAPE, UNEVEN)
    before = (folder / "timeline.json").read_text()
    assert (
        call("simulate", "pipeline", "run", "--plan.schedule", "1f1b", "--policies", "gpipe") == 0
    )
    assert drawn(folder) == ["run, step 99, 1f1b", "simulated, 1f1b", "simulated, gpipe"]
    assert (folder / "timeline.json").read_text() == before
    lines = [line for line in capsys.readouterr().out.splitlines() if "bubble " in line]
    real, played = (line.partition(": ")[2] for line in lines[:2])
    assert real == played
    # another grid than that of the run: its times are of no use
    call(
        "simulate",
        "pipeline",
        "run",
        "--plan.pipe",
        "2",
        "--plan.schedule",
        "1f1b",
        "--policies",
        "1f1b",
    )
    assert "timeline.json has 4 virtual stages and is ignored" in capsys.readouterr().out


def test_times_by_work_are_those_of_the_cut() -> None:
    run = four().check_and_resolve(4)
    source = times_from_work(run, SHAPE)
    assert sum(source.times.forward) == pytest.approx(4.0)
    assert source.times.forward == source.times.backward == source.times.weight
    assert sum("% of the work" in line for line in source.words) == 4
    assert times_from_work(run, PipelineShape(1, 8)).times.forward == (1.0,)


def test_one_stage_has_no_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(RunConfig(), SimulateOptions(policies=("1f1b",))) == 0
    assert "bubble 0.0%" in capsys.readouterr().out


def test_jitter_depends_on_the_seed_only(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (1, 1, 2):
        command(four(schedule="1f1b"), SimulateOptions(jitter=0.3, seed=seed, policies=("1f1b",)))
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_report_has_the_pipeline(here: Path) -> None:
    folder = run_folder(here / "run", SHAPE, UNEVEN)
    page = report.write_report(folder).read_text()
    assert "<h2>Pipeline</h2>" in page and "run, step 99, 1f1b: " in page
    assert "simulated, 1f1b: " in page and "waits: gradient" in page
    picture = timeline_svg.chart_of_run("run", pipeline.read_timeline(folder))
    assert (
        f"{timeline_svg.format_time(picture.seconds)}, bubble {picture.bubble_fraction:.1%}" in page
    )
    (folder / "timeline.json").unlink()
    assert "<h2>Pipeline</h2>" not in report.write_report(folder).read_text()


def test_a_report_draws_the_head_of_stages_that_share_the_vocabulary(here: Path) -> None:
    folder = run_folder(here / "run", SHAPE, UNEVEN)
    table = pipeline.read_timeline(folder)
    for stage in table["stages"]:
        stage.append(["H", 0, 0, table["seconds"], table["seconds"] + 0.01])
    (folder / "timeline.json").write_text(json.dumps(table))
    page = pipeline.pipeline_section(folder)
    assert "broken" not in page and "head 0, stage 0" in page


@pytest.mark.parametrize("text", ["{", "[]", '{"stages": 3}'])
def test_a_report_survives_a_broken_timeline(text: str, here: Path) -> None:
    folder = run_folder(here / "run", SHAPE, UNEVEN)
    (folder / "timeline.json").write_text(text)
    page = report.write_report(folder).read_text()
    assert "<h2>Pipeline</h2>" in page and 'class="note"' in page


def test_a_report_escapes_the_names_of_a_run(here: Path) -> None:
    folder = run_folder(here / "run", SHAPE, UNEVEN, policy="<script>alert(1)</script>")
    page = pipeline.pipeline_section(folder)
    assert "<script>" not in page and "is not a known schedule" in page
    assert "run, step 99" in page

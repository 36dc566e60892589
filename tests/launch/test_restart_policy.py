"""What follows from how ranks ended, without processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ranvier.config import run as runs
from ranvier.config.resolved_run import ResolvedRun
from ranvier.errors import PlanError
from ranvier.launch import ProcessInfo
from ranvier.launch.heartbeat import DONE, STEP, Heartbeat, HeartbeatState
from ranvier.launch.restart_policy import (
    AttemptResult,
    RankOutcome,
    RestartHistory,
    RestartPolicy,
    ResultKind,
    judge_attempt,
    largest_fitting_grid,
)
from ranvier.launch.watchdog import find_slowest_rank, silence_limit, warning_limit
from ranvier.train.resolve import ResolveContext, resolve_fallback_runs, resolve_run
from ranvier.train.resume import elastic

GRIDS = (("data=4", 4), ("data=2", 2), ("row=3", 3), ("data=1", 1))


def outcome(rank: int, code: int, section: str = STEP, **more: Any) -> RankOutcome:
    return RankOutcome(
        rank, code, HeartbeatState(section=section, step=7), notice_time=10.0, **more
    )


def report(code: int, *, secondary: bool = False, time: float = 10.0) -> dict[str, Any]:
    message = f"{'it lost a peer' if secondary else 'mine'} {code}"
    return {"message": message, "code": code, "secondary": secondary, "time": time}


LOST = report(71, secondary=True, time=9.9)


@pytest.mark.parametrize(
    ("outcomes", "told", "kind", "code", "says"),
    [
        ([outcome(0, 0, DONE), outcome(1, 0, DONE)], False, "done", 0, ""),
        ([outcome(0, 75), outcome(1, 75)], False, "stopped", 75, ""),
        ([outcome(0, 75), outcome(1, 71, report=LOST)], False, "stopped", 75, ""),
        ([outcome(0, -9, was_killed=True), outcome(1, -15)], True, "stopped", 75, ""),
        ([outcome(0, 71, report=LOST), outcome(1, -9)], False, "lost", 71, "Rank 1 was killed by"),
        ([outcome(0, 71, report=LOST), outcome(1, -1)], False, "lost", 71, "signal 1 (SIGHUP)"),
        ([outcome(0, -6), outcome(1, -9)], False, "lost", 71, "Rank 1 was killed by signal 9"),
        (
            [outcome(0, -9, was_killed=True), outcome(1, -11)],
            False,
            "fault",
            71,
            "11 (SIGSEGV) at step",
        ),
        (
            [outcome(0, 71, report=LOST), outcome(1, 0)],
            False,
            "fault",
            71,
            "exited with code 0",
        ),
        (
            [outcome(0, 70, report=report(70)), outcome(1, 71, report=LOST)],
            False,
            "fault",
            70,
            "mi",
        ),
        (
            [outcome(0, 65, report=report(65)), outcome(1, 71, report=LOST)],
            False,
            "error",
            65,
            "mi",
        ),
        ([outcome(0, 70, report=report(70)), outcome(1, -9)], False, "lost", 71, "Rank 1 was kill"),
        ([outcome(0, 71, report=LOST), outcome(1, 71, report=LOST)], False, "error", 71, "lost a"),
        ([outcome(0, 75), outcome(1, -9)], False, "error", 71, "Rank 1 was killed by signal 9"),
        ([outcome(0, 3), outcome(1, 0, DONE)], False, "error", 3, "Rank 0 exited with code 3"),
        ([outcome(0, 1, DONE), outcome(1, 1, DONE)], False, "error", 1, ""),
        ([outcome(0, 0, DONE), outcome(1, 0, DONE)], True, "done", 0, ""),
        ([outcome(0, 0, DONE), outcome(1, -9, DONE)], False, "done", 0, ""),
        ([outcome(0, 75, DONE), outcome(1, 75, DONE)], True, "stopped", 75, ""),
    ],
)
def test_the_rank_that_ended_first_and_by_itself_counts(
    outcomes: list[RankOutcome], told: bool, kind: ResultKind, code: int, says: str
) -> None:
    end = judge_attempt(outcomes, told=told)
    assert (end.kind, end.exit_code, end.step) == (kind, code, 7) and says in end.message
    assert bool(end.message) is bool(says)


def lost(step: int, rank: int = 1, kind: ResultKind = "lost") -> AttemptResult:
    return AttemptResult(kind, 71, f"Rank {rank} is gone.", rank, step)


def test_tries_without_a_new_step_are_counted() -> None:
    history = RestartHistory(RestartPolicy(max_restarts=2, grids=GRIDS[:1]))
    for step, count in ((5, 1), (5, 2), (6, 1), (4, 2)):
        then = history.decide_after(lost(step))
        assert then.restart and f"({count} of 2 without a new step)" in then.message
    then = history.decide_after(lost(6))
    assert (then.restart, then.exit_code) == (
        False,
        93,
    ) and "no progress beyond step 6" in then.message
    assert [failure.step for failure in history.failures] == [5, 5, 6, 4, 6]
    assert {failure.grid for failure in history.failures} == {"data=4"}


def test_what_is_not_tried_again() -> None:
    for kind, code in (("fault", 70), ("error", 65), ("hang", 72), ("stopped", 75), ("done", 0)):
        policy = RestartPolicy(max_restarts=3, grids=GRIDS)
        then = RestartHistory(policy).decide_after(AttemptResult(kind, code, "words"))  # type: ignore[arg-type]
        assert not then.restart and (then.exit_code, then.message) == (code, "words")
    then = RestartHistory(RestartPolicy(max_restarts=0, grids=GRIDS)).decide_after(lost(3))
    assert not then.restart and then.exit_code == 71
    assert (
        RestartHistory(RestartPolicy(max_restarts=1, restart_on_error=True, grids=GRIDS))
        .decide_after(lost(3, kind="fault"))
        .restart
    )


def test_the_largest_smaller_grid_is_taken_without_the_rank_that_failed() -> None:
    assert [largest_fitting_grid([4, 2, 3, 1], left) for left in (4, 3, 2, 1, 0)] == [
        0,
        2,
        1,
        3,
        None,
    ]
    history = RestartHistory(RestartPolicy(max_restarts=1, grids=GRIDS))
    assert history.decide_after(lost(5, rank=2)).restart
    then = history.decide_after(lost(5, rank=2))
    assert then.restart and "Continuing on the grid row=3 with 3 rank(s)" in then.message
    assert (history.grid_index, history.excluded_rank, history.idle_restarts) == (2, 2, 0)
    assert history.decide_after(lost(5, rank=0)).restart
    assert "the grid data=2" in history.decide_after(lost(5, rank=1)).message
    assert history.excluded_rank is None, "not always the same rank"
    for _ in range(2):
        assert history.decide_after(lost(5)).restart
    assert history.grid_index == 3
    assert history.decide_after(lost(5)).restart
    assert history.decide_after(lost(5)).exit_code == 93


FOUR = ResolveContext(world_size=4)


def test_grids_are_checked_before_anything_starts() -> None:
    def of(*grids: str) -> ResolvedRun:
        tables = {"plan": {"data": 2, "row": 2}, "launch": {"fallback_grids": list(grids)}}
        return resolve_run(runs.run_from_tables(tables), FOUR)

    assert elastic.format_grid(of().plan.degrees) == "data=2,row=2"
    one, two = resolve_fallback_runs(of("row=2", " data = 2"), FOUR)
    assert (one.plan.world_size, one.plan.row, one.plan.data) == (2, 2, 1)
    assert (two.plan.data, two.plan.row, two.plan.global_batch) == (2, 1, of().plan.global_batch)
    assert one.plan.micro_batch == of().plan.micro_batch, "it still divides"
    grids = ("dta=2", "row=x", "row=3", "data=4", "")
    with pytest.raises(PlanError) as error:
        resolve_fallback_runs(of(*grids), FOUR)
    for words in (
        "launch.fallback_grids='dta=2': 'dta' is not an axis. Did you mean 'data'?",
        "launch.fallback_grids='row=x': row=x is not a valid size",
        "launch.fallback_grids='row=3': row=3 does not divide",
        "launch.fallback_grids='data=4' has 4 ranks, but the plan has 4",
        "launch.fallback_grids='': '' is not an axis",
    ):
        assert words in str(error.value)


def test_a_micro_batch_that_no_longer_divides_is_inferred_again() -> None:
    plan = {"pipe": 2, "row": 2, "data": 2, "global_batch": 12, "micro_batch": 2}
    tables = {
        "plan": {**plan, "virtual_stages": 2},
        "launch": {"fallback_grids": ["data=3", "data=4"]},
    }
    eight = ResolveContext(world_size=8)
    run = resolve_run(runs.run_from_tables(tables), eight)
    same, other = resolve_fallback_runs(run, eight)
    assert (same.plan.global_batch, same.plan.micro_batch, same.plan.virtual_stages) == (12, 2, 1)
    assert (other.plan.global_batch, other.plan.micro_batch) == (12, 3)
    assert [one.setting for one in other.decisions_by("ranks")][-1] == "plan.micro_batch"


def test_a_smaller_grid_decides_anew_about_compilation_and_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With row=2 blocks are split and not compiled, and four ranks share two GPUs."""
    monkeypatch.setattr("ranvier.train.resolve.has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    tables = {"plan": {"row": 2, "data": 2}, "launch": {"fallback_grids": ["data=2"]}}
    here = ProcessInfo(local_world_size=4)
    context = ResolveContext(world_size=4, process=here, device=torch.device("cuda", 0))
    run = resolve_run(runs.run_from_tables(tables), context)
    (small,) = resolve_fallback_runs(run, context)
    assert (run.plan.compile, small.plan.compile) == ("off", "on")
    assert (run.train.backend, small.train.backend) == ("gloo", "nccl")


def test_limits_are_learnt_from_the_steps() -> None:
    step = HeartbeatState(section=STEP, slowest_step_seconds=10.0)
    assert (
        silence_limit(step, 0.0) == 50.0
        and silence_limit(HeartbeatState(section=STEP), 0.0) == 600.0
    )
    assert (
        silence_limit(HeartbeatState(), 0.0)
        == silence_limit(HeartbeatState(section="evaluation"), 0.0)
        == 600.0
    )
    assert silence_limit(HeartbeatState(section="checkpoint"), 0.0) == 420.0
    assert (
        silence_limit(step, 7.0) == 7.0
        and silence_limit(HeartbeatState(), 7.0) == 600.0
        and silence_limit(HeartbeatState(), 900.0) == 900.0
    )
    assert silence_limit(step, -1.0) == silence_limit(HeartbeatState(section=DONE), 5.0) == math.inf
    assert warning_limit(step, 0.0) == 16.0, "a step that takes long is not slow"
    assert warning_limit(HeartbeatState(section=STEP, slowest_step_seconds=0.1), 60.0) == 15.0
    beats = [
        HeartbeatState(step=3, num_collectives=9),
        HeartbeatState(step=3, num_collectives=8),
        HeartbeatState(step=4, num_collectives=7),
    ]
    assert (
        find_slowest_rank(beats, ["S", "S", "S"]) == 1
        and find_slowest_rank(beats, ["S", "S", "T"]) == 2
    )


def test_a_pulse_tells_where_a_rank_is(tmp_path: Any) -> None:
    Heartbeat.create_file(tmp_path / "pulse")
    mine, theirs = Heartbeat(str(tmp_path / "pulse")), Heartbeat(str(tmp_path / "pulse"))
    assert (theirs.read_state().section, theirs.read_state().step) == ("start", -1)
    mine.begin_section(STEP, 3)
    mine.begin_section(STEP, 4)
    mine.record_collective(12, "all_reduce over data of 8 bytes at step.status" + "x" * 300)
    beat = theirs.read_state()
    assert (beat.section, beat.step, beat.num_collectives) == (STEP, 4, 12)
    assert (
        beat.last_collective.startswith("all_reduce over data")
        and 0.0 < beat.slowest_step_seconds < 1.0
    )
    with mine.inside_section("checkpoint"):
        assert theirs.read_state().section == "checkpoint" and theirs.read_state().step == 4
    assert theirs.read_state().section == STEP and Heartbeat().read_state().step == -1

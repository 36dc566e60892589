"""What follows from how ranks ended, without processes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ranvier.config import run as runs
from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.launch.heartbeat import DONE, STEP, Beat, Pulse
from ranvier.launch.restart_policy import End, History, Kind, Outcome, Policy, judged, largest
from ranvier.launch.watchdog import behind, limit, slow
from ranvier.train.resume import elastic

GRIDS = (("data=4", 4), ("data=2", 2), ("row=3", 3), ("data=1", 1))


def outcome(rank: int, code: int, section: str = STEP, **more: Any) -> Outcome:
    return Outcome(rank, code, Beat(section=section, step=7), noticed=10.0, **more)


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
        ([outcome(0, -9, slain=True), outcome(1, -15)], True, "stopped", 75, ""),
        ([outcome(0, 71, report=LOST), outcome(1, -9)], False, "lost", 71, "Rank 1 was killed by"),
        ([outcome(0, 71, report=LOST), outcome(1, -1)], False, "lost", 71, "signal 1 (SIGHUP)"),
        ([outcome(0, -6), outcome(1, -9)], False, "lost", 71, "Rank 1 was killed by signal 9"),
        ([outcome(0, -9, slain=True), outcome(1, -11)], False, "fault", 71, "11 (SIGSEGV) at step"),
        (
            [outcome(0, 71, report=LOST), outcome(1, 0)],
            False,
            "fault",
            71,
            "ended with exit code 0",
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
        ([outcome(0, 3), outcome(1, 0, DONE)], False, "error", 3, "Rank 0 ended with exit code 3"),
        ([outcome(0, 1, DONE), outcome(1, 1, DONE)], False, "error", 1, ""),
        ([outcome(0, 0, DONE), outcome(1, 0, DONE)], True, "done", 0, ""),
        ([outcome(0, 0, DONE), outcome(1, -9, DONE)], False, "done", 0, ""),
        ([outcome(0, 75, DONE), outcome(1, 75, DONE)], True, "stopped", 75, ""),
    ],
)
def test_the_rank_that_ended_first_and_by_itself_counts(
    outcomes: list[Outcome], told: bool, kind: Kind, code: int, says: str
) -> None:
    end = judged(outcomes, told=told)
    assert (end.kind, end.code, end.step) == (kind, code, 7) and says in end.message
    assert bool(end.message) is bool(says)


def lost(step: int, rank: int = 1, kind: Kind = "lost") -> End:
    return End(kind, 71, f"Rank {rank} is gone.", rank, step)


def test_tries_without_a_new_step_are_counted() -> None:
    history = History(Policy(retries=2, grids=GRIDS[:1]))
    for step, count in ((5, 1), (5, 2), (6, 1), (4, 2)):
        then = history.after(lost(step))
        assert then.again and f"({count} of 2 without a new step)" in then.message
    then = history.after(lost(6))
    assert (then.again, then.code) == (False, 93) and "no further than step 6" in then.message
    assert [failure.step for failure in history.failures] == [5, 5, 6, 4, 6]
    assert {failure.grid for failure in history.failures} == {"data=4"}


def test_what_is_not_tried_again() -> None:
    for kind, code in (("fault", 70), ("error", 65), ("hang", 72), ("stopped", 75), ("done", 0)):
        policy = Policy(retries=3, grids=GRIDS)
        then = History(policy).after(End(kind, code, "words"))  # type: ignore[arg-type]
        assert not then.again and (then.code, then.message) == (code, "words")
    then = History(Policy(retries=0, grids=GRIDS)).after(lost(3))
    assert not then.again and then.code == 71
    assert History(Policy(retries=1, faults=True, grids=GRIDS)).after(lost(3, kind="fault")).again


def test_the_largest_smaller_grid_is_taken_without_the_rank_that_failed() -> None:
    assert [largest([4, 2, 3, 1], left) for left in (4, 3, 2, 1, 0)] == [0, 2, 1, 3, None]
    history = History(Policy(retries=1, grids=GRIDS))
    assert history.after(lost(5, rank=2)).again
    then = history.after(lost(5, rank=2))
    assert then.again and "Going on with the grid row=3 on 3 rank(s)" in then.message
    assert (history.grid, history.spare, history.idle) == (2, 2, 0)
    assert history.after(lost(5, rank=0)).again
    assert "the grid data=2" in history.after(lost(5, rank=1)).message
    assert history.spare is None, "not always the same rank"
    for _ in range(2):
        assert history.after(lost(5)).again
    assert history.grid == 3
    assert history.after(lost(5)).again
    assert history.after(lost(5)).code == 93


def test_grids_are_checked_before_anything_starts() -> None:
    def of(*grids: str) -> Run:
        tables = {"plan": {"data": 2, "row": 2}, "launch": {"grids": list(grids)}}
        return runs.from_tables(tables).check(4)

    assert elastic.named(of().plan.degrees) == "data=2,row=2"
    one, two = elastic.smaller(of("row=2", " data = 2"))
    assert (one.plan.world, one.plan.row, one.plan.data) == (2, 2, 1)
    assert (two.plan.data, two.plan.row, two.plan.batch) == (2, 1, of().plan.batch)
    assert one.plan.micro_batch == of().plan.micro_batch, "it still divides"
    grids = ("dta=2", "row=x", "row=3", "data=4", "")
    with pytest.raises(PlanError) as error:
        elastic.smaller(of(*grids))
    for words in (
        "launch.grids='dta=2': 'dta' is no axis. Did you mean 'data'?",
        "launch.grids='row=x': row=x is not a number of ranks",
        "launch.grids='row=3': row=3 does not divide",
        "launch.grids='data=4' has 4 ranks, the plan 4",
        "launch.grids='': '' is no axis",
    ):
        assert words in str(error.value)


def test_a_micro_batch_that_no_longer_divides_is_inferred_again() -> None:
    tables = {"plan": {"pipe": 2, "data": 2, "batch": 12, "micro_batch": 2, "chunks": 2}}
    run = runs.from_tables(tables).check(4)
    small = elastic.regridded(run, {**run.plan.degrees, "pipe": 1, "data": 3})
    assert (small.plan.batch, small.plan.micro_batch, small.plan.chunks) == (12, 2, 1)
    small = elastic.regridded(run, {**run.plan.degrees, "pipe": 1, "data": 4})
    assert (small.plan.batch, small.plan.micro_batch) == (12, 3)


def test_limits_are_learnt_from_the_steps() -> None:
    step = Beat(section=STEP, slowest=10.0)
    assert limit(step, 0.0) == 50.0 and limit(Beat(section=STEP), 0.0) == 600.0
    assert limit(Beat(), 0.0) == limit(Beat(section="evaluation"), 0.0) == 600.0
    assert limit(Beat(section="checkpoint"), 0.0) == 420.0
    assert limit(step, 7.0) == 7.0 and limit(Beat(), 7.0) == 600.0 and limit(Beat(), 900.0) == 900.0
    assert limit(step, -1.0) == limit(Beat(section=DONE), 5.0) == math.inf
    assert slow(step, 0.0) == 16.0, "a step that takes long is not slow"
    assert slow(Beat(section=STEP, slowest=0.1), 60.0) == 15.0
    beats = [Beat(step=3, begun=9), Beat(step=3, begun=8), Beat(step=4, begun=7)]
    assert behind(beats, ["S", "S", "S"]) == 1 and behind(beats, ["S", "S", "T"]) == 2


def test_a_pulse_tells_where_a_rank_is(tmp_path: Any) -> None:
    Pulse.lay(tmp_path / "pulse")
    mine, theirs = Pulse(str(tmp_path / "pulse")), Pulse(str(tmp_path / "pulse"))
    assert (theirs.read().section, theirs.read().step) == ("start", -1)
    mine.beat(STEP, 3)
    mine.beat(STEP, 4)
    mine.began(12, "all_reduce over data of 8 bytes at step.status" + "x" * 300)
    beat = theirs.read()
    assert (beat.section, beat.step, beat.begun) == (STEP, 4, 12)
    assert beat.last.startswith("all_reduce over data") and 0.0 < beat.slowest < 1.0
    with mine.inside("checkpoint"):
        assert theirs.read().section == "checkpoint" and theirs.read().step == 4
    assert theirs.read().section == STEP and Pulse().read().step == -1

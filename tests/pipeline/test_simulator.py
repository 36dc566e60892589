"""The simulator against the formulas of the textbooks, and its own bookkeeping."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product

import pytest

from ranvier.errors import PlanError
from ranvier.pipeline import schedules
from ranvier.pipeline.policy import (
    FixedSchedule,
    Job,
    MessageDrivenPolicy,
    PipelineShape,
    SchedulingPolicy,
)
from ranvier.pipeline.simulator import (
    JobSpan,
    JobTimes,
    Timeline,
    draw_job_seconds,
    even_times,
    simulate_step,
)

EXACT = [(1.0, 2.0), (0.75, 1.25), (3.0, 0.5)]
"""Times of forward and backward whose sums have no rounding."""


@pytest.mark.parametrize("forward, backward", EXACT)
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_bubbles_of_gpipe_and_1f1b(stages: int, forward: float, backward: float) -> None:
    for micros in (1, 2, 3, 4, 7, 16):
        shape = PipelineShape(stages, micros)
        for order in (schedules.gpipe_schedule(shape), schedules.one_f_one_b_schedule(shape)):
            line = simulate_step(shape, order, even_times(shape, forward, backward))
            assert line.busy_seconds == (micros * (forward + backward),) * stages
            assert line.seconds - line.busy_seconds[0] == (stages - 1) * (forward + backward)
            assert line.bubble_fraction == pytest.approx(
                (stages - 1) / (micros + stages - 1), abs=1e-15
            )


@pytest.mark.parametrize("forward, backward", EXACT)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_bubbles_of_interleaved(chunks: int, forward: float, backward: float) -> None:
    for stages, groups in product((1, 2, 3, 4, 8), (1, 2, 3)):
        shape = PipelineShape(stages, stages * groups, chunks)
        line = simulate_step(
            shape,
            schedules.interleaved_schedule(shape),
            even_times(shape, chunks * forward, chunks * backward),
        )
        # Of a stage: f = chunks · forward.
        assert line.seconds - line.busy_seconds[0] == (stages - 1) * (forward + backward)


@pytest.mark.parametrize("forward, backward, weight", [(1, 1, 1), (2, 2, 1), (1.5, 2, 1.25)])
def test_bubbles_of_zero_bubble(forward: float, backward: float, weight: float) -> None:
    for stages, more in product((1, 2, 3, 4, 8), (0, 1, 5, 16)):
        shape = PipelineShape(stages, stages + more)
        times = even_times(shape, forward, backward, weight)
        line = simulate_step(shape, schedules.zero_bubble_schedule(shape), times)
        assert line.seconds - line.busy_seconds[0] == (stages - 1) * (forward + backward - weight)
        whole = simulate_step(shape, schedules.one_f_one_b_schedule(shape), times)
        assert whole.seconds - whole.busy_seconds[0] == (stages - 1) * (forward + backward + weight)


def test_links_and_stragglers() -> None:
    shape = PipelineShape(3, 1)
    times = replace(even_times(shape, 1.0, 2.0), link=(0.5, 0.25), stragglers={1: 2.0})
    line = simulate_step(shape, schedules.one_f_one_b_schedule(shape), times)
    assert line.seconds == 4 * 3 + 2 * 0.75
    assert line.busy_seconds == (3.0, 6.0, 3.0)
    assert line.wait_seconds[0] == {"gradient": 10.5}
    assert line.wait_seconds[2] == {"activation": 3.75, "end": line.seconds - 6.75}


def test_chunks_of_one_stage_need_no_link() -> None:
    shape = PipelineShape(1, 2, 3)
    line = simulate_step(
        shape, schedules.interleaved_schedule(shape), even_times(shape, 3.0, 3.0, link=5.0)
    )
    assert (line.seconds, line.bubble_fraction) == (12.0, 0.0)


def cases() -> list[tuple[PipelineShape, SchedulingPolicy, JobTimes]]:
    """Some of all that can be played."""
    chance, found = random.Random(3), list[tuple[PipelineShape, SchedulingPolicy, JobTimes]]()
    for _ in range(40):
        shape = PipelineShape(chance.randint(1, 5), chance.randint(1, 8), chance.randint(1, 3))
        size = shape.stages * shape.chunks
        times = [tuple(chance.random() for _ in range(size)) for _ in range(3)]
        link = tuple(chance.random() for _ in range(size - 1))
        shaken = JobTimes(*times, link=link, jitter=0.4, stragglers={0: 1.5})
        room = (chance.randint(1, 9),) * shape.stages
        for policy in (
            schedules.gpipe_schedule(shape),
            schedules.interleaved_schedule(shape),
            schedules.zero_bubble_schedule(shape),
            MessageDrivenPolicy("first", room),
            MessageDrivenPolicy("backward", room, split_backward=True),
        ):
            found.append((shape, policy, shaken))
    return found


def stops(line: Timeline) -> dict[tuple[str, int, int], JobSpan]:
    """Spans by kind, micro-batch and virtual stage."""
    return {(s.kind, s.micro, s.chunk * line.shape.stages + s.stage): s for s in line.spans}


@pytest.mark.parametrize("part", range(4))
def test_each_job_runs_once_after_what_it_needs(part: int) -> None:
    for shape, policy, times in cases()[part::4]:
        line = simulate_step(shape, policy, times, seed=part)
        spans, last = stops(line), shape.stages * shape.chunks - 1
        assert len(spans) == len(line.spans) == line.shape.num_jobs * shape.stages
        assert isinstance(times.link, tuple)
        for (kind, micro, v), span in spans.items():
            if kind == "W":
                assert span.start >= spans["B", micro, v].stop
                continue
            step = -1 if kind == "F" else 1
            if 0 <= v + step <= last:
                delay = times.link[min(v, v + step)] if shape.stages > 1 else 0.0
                assert span.start >= spans[kind, micro, v + step].stop + delay
            if kind == "B":
                assert span.start >= spans["F", micro, v].stop


@pytest.mark.parametrize("part", range(4))
def test_time_of_a_stage_is_work_and_waiting(part: int) -> None:
    for shape, policy, times in cases()[part::4]:
        line = simulate_step(shape, policy, times)
        rows = defaultdict[int, list[JobSpan]](list)
        for span in line.spans:
            rows[span.stage].append(span)
        for stage, row in rows.items():
            assert all(a.stop <= b.start for a, b in pairwise(row))
            spent = line.busy_seconds[stage] + sum(line.wait_seconds[stage].values())
            assert spent == pytest.approx(line.seconds, rel=1e-12)
            refusal = "order" if policy.is_dynamic else "credit"
            assert refusal not in line.wait_seconds[stage]
        assert max(span.stop for span in line.spans) == line.seconds


def test_luck_is_the_same_for_all_policies() -> None:
    shape = PipelineShape(3, 5, 2)
    times = replace(even_times(shape, 2.0, 2.0, 2.0), jitter=0.5)
    room = (8, 8, 8)
    policies = [
        schedules.gpipe_schedule(shape),
        schedules.interleaved_schedule(shape),
        MessageDrivenPolicy("first", room),
    ]
    taken = []
    for policy in policies:
        line = simulate_step(shape, policy, times, seed=4)
        jobs = sorted(line.spans, key=lambda span: span[:4])
        taken.append([span.stop - span.start for span in jobs])
    assert taken[0] == pytest.approx(taken[1], rel=1e-12)
    assert taken[0] == pytest.approx(taken[2], rel=1e-12)
    table = draw_job_seconds(shape, times, 4)
    assert table == draw_job_seconds(shape, times, 4) != draw_job_seconds(shape, times, 5)
    split = draw_job_seconds(replace(shape, split_backward=True), times, 4)
    assert [row[:2] for row in split] == [row[:2] for row in table]


def test_jitter_has_mean_one() -> None:
    shape = PipelineShape(8, 4000)
    table = draw_job_seconds(shape, replace(even_times(shape, 1.0, 1.0), jitter=0.5), 0)
    values = [x for stage in table for row in stage for x in row]
    assert sum(values) / len(values) == pytest.approx(1.0, abs=0.01)


def test_waiting_for_credit_and_order() -> None:
    shape = PipelineShape(2, 4)
    times = even_times(shape, 1.0, 1.0)
    tight = simulate_step(shape, MessageDrivenPolicy("backward", (1, 1)), times)
    assert tight.wait_seconds[0] == {"credit": 3 * 2.0, "gradient": 2.0}
    # The same as an order: the next forward is there, but not its turn.
    row = tuple(Job(kind, m) for m in range(4) for kind in ("F", "B"))
    strict = simulate_step(shape, FixedSchedule("strict", (row, row)), times)
    assert strict.wait_seconds[0] == {"order": 3 * 2.0, "gradient": 2.0}


def test_a_deadlock_names_the_stage_and_what_it_waits_for() -> None:
    forward, backward = Job("F", 0), Job("B", 0)
    order = FixedSchedule("wrong", ((backward, forward), (forward, backward)))
    with pytest.raises(PlanError, match="Stage 0 waits forever for the gradient of micro-batch 0"):
        simulate_step(PipelineShape(2, 1), order, even_times(PipelineShape(2, 1), 1.0, 1.0))


def test_times_must_fit_the_shape() -> None:
    with pytest.raises(PlanError, match=r"forward has 2 times.* needs 4\. Give 4"):
        simulate_step(
            PipelineShape(2, 1, 2),
            schedules.gpipe_schedule(PipelineShape(2, 1, 2)),
            even_times(PipelineShape(2, 1), 1.0, 1.0),
        )
    with pytest.raises(PlanError, match=r"link has 3 times.* needs 1\. Give 1"):
        shape = PipelineShape(2, 1)
        simulate_step(
            shape,
            schedules.gpipe_schedule(shape),
            replace(even_times(shape, 1, 1), link=(0.0,) * 3),
        )
    with pytest.raises(PlanError, match="negative or infinite"):
        simulate_step(
            PipelineShape(1, 1),
            schedules.gpipe_schedule(PipelineShape(1, 1)),
            JobTimes((-1.0,), (1.0,)),
        )

"""Orders and policies: every job once, none waits for ever, no more kept than allowed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from statistics import fmean

import pytest

from ranvier.errors import PlanError
from ranvier.pipeline import schedules
from ranvier.pipeline.policy import (
    FixedSchedule,
    Job,
    MessageDrivenPolicy,
    PipelineShape,
    Priority,
    SchedulingPolicy,
    StageProgress,
)
from ranvier.pipeline.policy_search import POLICY_NAMES, choose_policy, credits_for
from ranvier.pipeline.simulator import JobTimes, even_times, simulate_step

SHAPES = [PipelineShape(*size) for size in product(range(1, 7), range(1, 10), range(1, 4))]
PRIORITIES: tuple[Priority, ...] = ("backward", "first", "forward")


def drawn(shape: PipelineShape, chance: random.Random, jitter: float = 0.0) -> JobTimes:
    """Unequal times of every job and link."""
    size = shape.stages * shape.chunks
    times = [tuple(chance.uniform(0.5, 2.0) for _ in range(size)) for _ in range(3)]
    return JobTimes(*times, link=chance.choice([0.0, chance.random()]), jitter=jitter)


def fixed(shape: PipelineShape) -> Iterator[FixedSchedule]:
    """The orders that there are for a shape."""
    yield schedules.gpipe_schedule(shape)
    yield schedules.interleaved_schedule(shape)
    yield schedules.zero_bubble_schedule(shape)
    if shape.chunks == 1:
        yield schedules.one_f_one_b_schedule(shape)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_an_order_has_every_job_once_in_turn(chunks: int) -> None:
    for shape in (shape for shape in SHAPES if shape.chunks == chunks):
        for order in fixed(shape):
            kinds = ("F", "B", "W") if order.split_backward else ("F", "B")
            assert len(order.jobs) == shape.stages
            for row in order.jobs:
                assert len(row) == len(kinds) * chunks * shape.micro_batches
                for kind, chunk in product(kinds, range(chunks)):
                    micros = [job.micro for job in row if (job.kind, job.chunk) == (kind, chunk)]
                    assert micros == list(range(shape.micro_batches)), (order.name, shape)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_no_order_waits_for_ever(chunks: int) -> None:
    chance = random.Random(chunks)
    for shape in (shape for shape in SHAPES if shape.chunks == chunks):
        for order in fixed(shape):
            line = simulate_step(shape, order, drawn(shape, chance, 0.3), chance.randrange(99))
            assert line.peak_activations == schedules.peak_activations(order)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_messages_never_wait_for_ever_nor_exceed_credits(chunks: int, split: bool) -> None:
    chance = random.Random(chunks + 10 * split)
    for shape in (shape for shape in SHAPES if shape.chunks == chunks):
        for priority in PRIORITIES:
            # Fewer than chunks cannot be kept to; the oldest micro-batch goes on all the same.
            credits = tuple(chance.randint(1, 2 * chunks + 3) for _ in range(shape.stages))
            policy = MessageDrivenPolicy(priority, credits, split)
            line = simulate_step(shape, policy, drawn(shape, chance, 0.3), chance.randrange(99))
            bound = (max(n, chunks) for n in credits)
            assert all(p <= n for p, n in zip(line.peak_activations, bound, strict=True)), (
                shape,
                policy,
            )


def test_1f1b_keeps_what_the_textbook_says() -> None:
    for shape in (shape for shape in SHAPES if shape.chunks == 1):
        line = simulate_step(shape, schedules.one_f_one_b_schedule(shape), even_times(shape, 1, 2))
        assert line.peak_activations == line.one_f_one_b_peaks
        assert (
            max(schedules.peak_activations(schedules.zero_bubble_schedule(shape)))
            == line.peak_activations[0]
        )


def test_1f1b_has_one_chunk() -> None:
    with pytest.raises(PlanError, match=r"virtual_stages=2\. .* Use interleaved"):
        schedules.one_f_one_b_schedule(PipelineShape(2, 4, 2))


def test_what_goes_first() -> None:
    ready = [Job("F", 2), Job("W", 0), Job("B", 1)]

    def chosen(priority: Priority, credits: int, ready: list[Job]) -> Job | None:
        now = StageProgress(
            PipelineShape(1, 4, split_backward=True), 0, {("F", 0): 2, ("B", 0): 1}, 3
        )
        return MessageDrivenPolicy(priority, (credits,), split_backward=True).choose_job(ready, now)

    assert chosen("backward", 3, ready) == ready[2]
    assert chosen("first", 3, ready) == chosen("forward", 3, ready) == ready[0]
    assert chosen("forward", 2, ready) == ready[2]
    assert chosen("forward", 2, ready[:2]) == ready[1]
    assert chosen("forward", 2, ready[:1]) is None


def test_of_one_kind_the_nearest_to_its_end_goes_first() -> None:
    now = StageProgress(PipelineShape(2, 4, 2), 0)
    ready = [Job("F", 0, 0), Job("F", 0, 1), Job("B", 0, 1), Job("B", 0, 0)]
    assert MessageDrivenPolicy("backward", (9, 9)).choose_job(ready, now) == Job("B", 0, 0)
    assert MessageDrivenPolicy("forward", (9, 9)).choose_job(ready, now) == Job("F", 0, 1)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_credits_hide_links_that_as_many_as_stages_do_not(stages: int) -> None:
    shape = PipelineShape(stages, 8 * stages)
    times = even_times(shape, 1.0, 2.0, link=0.75)
    usual = simulate_step(shape, schedules.one_f_one_b_schedule(shape), times).seconds
    few = simulate_step(shape, MessageDrivenPolicy("first", (stages,) * stages), times).seconds
    enough = credits_for(shape, times)
    assert enough == stages + -(-2 * (stages - 1) // 4)
    many = simulate_step(shape, MessageDrivenPolicy("first", (enough,) * stages), times).seconds
    assert many < few and many <= usual


# ---- the choice -------------------------------------------------------------------------


def played(shape: PipelineShape, policy: SchedulingPolicy, times: JobTimes, seeds: int) -> float:
    """Mean seconds of a step."""
    return fmean(simulate_step(shape, policy, times, seed).seconds for seed in range(seeds))


def test_message_is_never_slower_than_1f1b() -> None:
    chance = random.Random(5)
    for _ in range(150):
        split = chance.random() < 0.25
        shape = PipelineShape(chance.randint(2, 8), chance.randint(1, 20), split_backward=split)
        times = drawn(shape, chance)
        usual = simulate_step(shape, schedules.one_f_one_b_schedule(shape), times).seconds
        policy = choose_policy("message_driven", shape, times)
        assert simulate_step(shape, policy, times).seconds <= usual * (1 + 1e-9), (shape, times)


def test_message_is_never_slower_than_interleaved() -> None:
    chance = random.Random(6)
    for _ in range(30):
        shape = PipelineShape(chance.randint(2, 5), chance.randint(1, 10), chance.randint(2, 3))
        times = drawn(shape, chance)
        usual = simulate_step(shape, schedules.interleaved_schedule(shape), times).seconds
        policy = choose_policy("message_driven", shape, times)
        assert simulate_step(shape, policy, times).seconds <= usual * (1 + 1e-9), (shape, times)


@pytest.mark.parametrize("case", range(6))
def test_message_is_hardly_slower_than_1f1b_under_jitter(case: int) -> None:
    chance = random.Random(case)
    shape = PipelineShape(chance.randint(2, 6), chance.randint(2, 12))
    times = drawn(shape, chance, 0.1 * (case + 1))
    policy = choose_policy("message_driven", shape, times)
    usual = schedules.one_f_one_b_schedule(shape)
    assert played(shape, policy, times, 200) <= 1.01 * played(shape, usual, times, 200)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_the_choice_keeps_to_the_limit_and_is_the_same_each_time(jitter: float) -> None:
    chance = random.Random(7)
    for limit in range(1, 7):
        for chunks in range(1, min(limit, 3) + 1):
            shape = PipelineShape(3, 6, chunks, split_backward=limit % 2 == 0)
            times = drawn(shape, chance, jitter)
            policy = choose_policy("message_driven", shape, times, limit=limit, seeds=16)
            assert max(simulate_step(shape, policy, times, seed=3).peak_activations) <= limit
            assert policy == choose_policy("message_driven", shape, times, limit=limit, seeds=16)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_name_gives_its_policy(name: str) -> None:
    shape = PipelineShape(3, 5)
    policy = choose_policy(name, shape, even_times(shape, 1.0, 1.0, 1.0))
    assert simulate_step(shape, policy, even_times(shape, 1.0, 1.0, 1.0)).seconds > 15
    if isinstance(policy, FixedSchedule) and name != "message_driven":
        assert policy.name == name


@pytest.mark.parametrize(
    ("name", "shape", "limit", "text"),
    [
        (
            "gpipe",
            PipelineShape(2, 8),
            7,
            "gpipe keeps 8 .* max_in_flight=7. .* fewer micro-batches",
        ),
        ("1f1b", PipelineShape(4, 8), 3, "1f1b keeps 4 activations on stage 0, .* fewer stages"),
        ("interleaved", PipelineShape(2, 4, 2), 4, "interleaved keeps 5 activations"),
        ("zero-bubble", PipelineShape(4, 8), 3, "zero-bubble keeps 4 activations"),
        (
            "message_driven",
            PipelineShape(2, 4, 3),
            2,
            "max_in_flight=2 is less than virtual_stages=3",
        ),
        ("1f1", PipelineShape(2, 4), 0, "Did you mean 1f1b"),
        ("best", PipelineShape(2, 4), 0, "Use one of message_driven, gpipe"),
    ],
)
def test_what_cannot_be_says_why(name: str, shape: PipelineShape, limit: int, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        choose_policy(name, shape, even_times(shape, 1.0, 1.0), limit=limit)

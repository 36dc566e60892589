"""Schedules from the literature, as fixed orders of jobs.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, 2021), its interleaved form over chunks
(Narayanan et al. 2021) and the zero-bubble schedule with the memory of 1F1B (ZB-H1, Qi et al.
2024). Each is a closed form of stage and shape, for any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ranvier.errors import PlanError
from ranvier.pipeline.policy import FixedSchedule, Job, PipelineShape


def gpipe_schedule(shape: PipelineShape) -> FixedSchedule:
    """Returns all forwards, chunk after chunk, then all backwards; holds every activation."""
    micros = range(shape.micro_batches)
    chunks = range(shape.chunks)
    jobs = [Job("F", m, c) for c in chunks for m in micros]
    jobs += [Job("B", m, c) for c in reversed(chunks) for m in micros]
    return FixedSchedule("gpipe", (tuple(jobs),) * shape.stages)


def one_f_one_b_schedule(shape: PipelineShape) -> FixedSchedule:
    """Returns warm-up forwards until the first gradient can arrive, then 1F1B, then backwards."""
    if shape.chunks > 1:
        raise PlanError(
            f"1f1b does not support virtual_stages={shape.chunks}. It has one chunk per stage. "
            "Use interleaved or message_driven, or virtual_stages=1."
        )
    micros = range(shape.micro_batches)
    forwards = [Job("F", m) for m in micros]
    backwards = [Job("B", m) for m in micros]
    # The number of warm-up forwards: the distance to the last stage.
    lead = [shape.stages - s - 1 for s in range(shape.stages)]
    return FixedSchedule("1f1b", tuple(_alternate_jobs(forwards, backwards, n) for n in lead))


def interleaved_schedule(shape: PipelineShape) -> FixedSchedule:
    """Returns 1F1B over chunks: `stages` micro-batches of a chunk, then of the next chunk.

    Bubble `(stages - 1)(f + b) / chunks` if stages divide the micro-batches.
    """
    S = shape.stages
    M = shape.micro_batches
    V = shape.chunks
    if V == 1:
        return replace(one_f_one_b_schedule(shape), name="interleaved")
    # The last group of micro-batches is padded to `stages` and the padding dropped at the end. Jobs
    # depend only on jobs of their own micro-batch, so the remaining order is still valid.
    turns = [(k // (S * V) * S + k % S, k // S % V) for k in range(-(-M // S) * S * V)]
    forwards = [Job("F", m, c) for m, c in turns]
    backwards = [Job("B", m, V - 1 - c) for m, c in turns]
    rows = (_alternate_jobs(forwards, backwards, 2 * (S - s - 1) + (V - 1) * S) for s in range(S))
    return FixedSchedule("interleaved", tuple(tuple(j for j in row if j.micro < M) for row in rows))


def zero_bubble_schedule(shape: PipelineShape) -> FixedSchedule:
    """Returns 1F1B (interleaved, with chunks) with weight gradients delayed more on later stages.

    Bubble `(stages - 1)(f + b - w)` for one chunk, `w <= f, b` and at least as many micro-batches
    as stages. Later stages hold fewer activations, so they can delay more: no stage holds more than
    the first one.
    """
    lag = 1 if shape.chunks == 1 else 2
    rows = (
        _delay_weight_grads(row, lag * s) for s, row in enumerate(interleaved_schedule(shape).jobs)
    )
    return FixedSchedule("zero-bubble", tuple(rows), split_backward=True)


def peak_activations(order: FixedSchedule) -> tuple[int, ...]:
    """Returns the maximum number of activations held by each stage, for any job times."""
    last = "W" if order.split_backward else "B"
    found = []
    for row in order.jobs:
        held = peak = 0
        for job in row:
            held += (job.kind == "F") - (job.kind == last)
            peak = max(peak, held)
        found.append(peak)
    return tuple(found)


def _alternate_jobs(
    forwards: Sequence[Job], backwards: Sequence[Job], lead: int
) -> tuple[Job, ...]:
    """Returns `lead` forwards, then forward and backward alternating, then the other backwards."""
    lead = min(lead, len(forwards))
    jobs = list(forwards[:lead])
    for forward, backward in zip(forwards[lead:], backwards, strict=False):
        jobs += [forward, backward]
    return (*jobs, *backwards[len(forwards) - lead :])


def _delay_weight_grads(jobs: Sequence[Job], lag: int) -> tuple[Job, ...]:
    """Inserts after each backward the weight gradients of the `lag`-th backward before it."""
    weights = [Job("W", job.micro, job.chunk) for job in jobs if job.kind == "B"]
    row = []
    seen = 0
    for job in jobs:
        row.append(job)
        if job.kind == "B":
            seen += 1
            if seen > lag:
                row.append(weights[seen - lag - 1])
    return (*row, *weights[max(0, seen - lag) :])

"""Communicators: what two ranks measure, and the memory of those that a run has made."""

from __future__ import annotations

import pytest
import torch

from ranvier.errors import CommunicationError
from ranvier.grid import Communicator, Grid
from ranvier.models import MODEL_SIZES, Decoder
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.planner.communicators import communicator_bytes
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.tools.benchmark_communicators import (
    EXTRA_COMMUNICATORS,
    CommunicatorSample,
    measure_communicator_cost,
    summarize_samples,
)
from ranvier.train.memory.breakdown import MemoryTracker

MIB = 2**20


def test_two_ranks_measure_over_gloo() -> None:
    cost = measure_communicator_cost(0)
    assert cost.first_bytes == cost.further_bytes == 0, "the host is no device"
    assert 0.0 < cost.further_seconds < 10.0 and cost.host_seconds > 0.0
    assert cost.total_seconds(3, 1) == pytest.approx(
        cost.first_seconds + 2 * cost.further_seconds + cost.host_seconds
    )
    assert cost.total_seconds(0, 0) == 0.0


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(CommunicationError, match=r"no result within 0 s.* Set NCCL_DEBUG"):
        measure_communicator_cost(0, limit_seconds=0.01)


def test_an_error_of_a_rank_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU would be found")
    with pytest.raises(CommunicationError, match=r"could not create communicators: \w+: "):
        measure_communicator_cost(1)


@pytest.mark.parametrize(("other", "each"), [("cuda:0", 1), ("cuda:1", 2)])
def test_ranks_share_what_their_devices_have_less(other: str, each: int) -> None:
    free = tuple(1000 * MIB - n for n in (0, 400 * MIB, 440 * MIB, 480 * MIB, 540 * MIB))
    late = (0.3, *[0.2] * EXTRA_COMMUNICATORS)
    samples = [
        CommunicatorSample("cuda:0", 0.1, (1.0, *[0.1] * EXTRA_COMMUNICATORS), free),
        CommunicatorSample(other, 0.2, late, free),
    ]
    cost = summarize_samples(samples)
    assert (cost.first_seconds, cost.host_seconds) == (1.0, 0.2)
    assert cost.further_seconds == pytest.approx(0.2)
    assert cost.first_bytes == 200 * MIB * each
    assert cost.further_bytes == pytest.approx(140 / 3 / 2 * MIB * each, rel=1e-6)


def test_the_table_of_a_run_counts_those_over_nccl() -> None:
    grid = Grid({})
    optimizer = Optimizer(parallelize(Decoder(MODEL_SIZES["tiny"]), grid).parallel.bucket_scheduler)
    measured = MemoryTracker().measure_usage(optimizer, torch.device("cpu"))
    assert measured.device["communicators"] == 0
    assert "communicators" not in " ".join(breakdown.format_breakdown(None, measured))
    for backend in ("nccl", "nccl", "gloo"):
        grid.communicators.append(Communicator(("pipe",), backend, 2, backend, 0.1))
    counted = MemoryTracker(peers=2).measure_usage(optimizer, torch.device("cpu"))
    assert counted.device["communicators"] == communicator_bytes(2, 2)
    assert counted.allocated_bytes == measured.allocated_bytes, "no tensor has them"
    assert MemoryBreakdown.from_dict(counted.to_dict()) == counted
    assert any(
        line.startswith("communicators ") for line in breakdown.format_breakdown(None, counted)
    )

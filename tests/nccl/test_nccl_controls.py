"""Negative controls: what tests over NCCL must see, broken on purpose."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch

from equivalence import Case, Serial, batch_of, compare, run_case
from pool import NcclPools, Pool, RankError
from ranvier.comm import collectives
from ranvier.grid import Axis, Grid
from ranvier.launch.signals import abort_communicators

pytestmark = pytest.mark.nccl


def drop_waits(grid: Grid, case: Case, batch: Any) -> dict[str, Any]:
    """A step in which nothing waits for what a communication brings."""
    with mock.patch.object(
        collectives._WorkHandle, "wait", lambda self: self.postprocess(self.output)
    ):
        return run_case(grid, case, batch, 1e-2, 0.5)


def test_a_dropped_wait_is_seen(pool: NcclPools) -> None:
    serial = Serial("biased", batch_of("biased", samples=8, packed=False), 1e-2, 0.5, steps=1)
    own = Pool(2, "nccl", mps=False)
    try:
        results = own.on_grid({"row": 2}, drop_waits, Case("biased", steps=1), serial.batch)
        assert compare(serial, results) != []
    except RankError as error:  # a result that cannot be used is seen as well
        assert "run_case" in str(error)
    finally:
        own.stop()


def swap_pair(grid: Grid, swapped: bool) -> tuple[float, float]:
    """Two sums over the same axis, which rank 1 may issue in the other order."""
    axis, values = grid.axis("row"), [torch.full((4,), 1.0 + i, device="cuda") for i in range(2)]
    order = [1, 0] if swapped and grid.rank == 1 else [0, 1]
    sums = {i: collectives.all_reduce(values[i], axis) for i in order}
    first, second = (sums[i].wait()[0].item() for i in (0, 1))
    return first, second


def test_a_swapped_pair_of_collectives_is_seen(pool: NcclPools) -> None:
    assert pool.on_grid({"row": 2}, swap_pair, False) == [(2.0, 4.0)] * 2
    assert pool.on_grid({"row": 2}, swap_pair, True) != [(2.0, 4.0)] * 2


def swap_checked(grid: Grid) -> str:
    """The same in debug mode, in which collectives are compared before they run."""
    grid.trace.check_collectives = True
    axis: Axis = grid.axis("row")
    try:
        if grid.rank == 0:
            collectives.all_reduce(torch.ones(4, device="cuda"), axis).wait()
        else:
            collectives.all_gather(torch.ones(4, device="cuda"), axis).wait()
    except Exception as error:
        return str(error)
    return ""


def test_debug_mode_names_what_differs(pool: NcclPools) -> None:
    for said in pool.on_grid({"row": 2}, swap_checked):
        assert "issue different collectives" in said


def fail_alone(grid: Grid, aborts: bool) -> None:
    """Rank 1 fails, and aborts its communicators or not; rank 0 waits for it on the device."""
    axis = grid.axis("row")
    collectives.all_reduce(torch.ones(4, device="cuda"), axis).wait()
    torch.cuda.synchronize()
    if grid.rank == 1:
        if aborts:
            abort_communicators()
        time.sleep(60.0)
    collectives.all_reduce(torch.ones(4, device="cuda"), axis).wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize("aborts", [True, False])
def test_a_missing_abort_is_seen(aborts: bool) -> None:
    """Rank 0 ends soon after rank 1 has failed and aborted, and hangs if it does not."""
    own = Pool(2, "nccl", mps=False)
    own.start()
    begun = time.monotonic()
    try:
        with pytest.raises(RankError) as raised:
            own.on_grid({"row": 2}, fail_alone, aborts, timeout=25.0)
        text, seconds = str(raised.value), time.monotonic() - begun
    finally:
        own.stop()
    if aborts:
        assert "rank 0 died" in text and seconds < 20.0, text
    else:
        assert "hang" in text and seconds > 20.0, text

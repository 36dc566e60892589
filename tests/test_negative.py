"""Negative controls: what the comparison with one process must catch, broken on purpose."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from equivalence import Case, Serial, batch_of, compare, run_case
from pool import Pool
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.comm import autograd, collectives
from ranvier.comm.collectives import PendingTensor
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.nn import cross_entropy, norm
from ranvier.sharding import Sharding

pytestmark = pytest.mark.nccl


def _half_reduced(x: Any, axis: Any, dim: int = 0) -> PendingTensor:
    """A reduce-scatter that forgets to add."""
    return PendingTensor(autograd.local_slice(x, axis, dim).clone())


def _no_depth(self: Sharding, degrees: Any) -> dict[str, int]:
    """The gradient rule without the depth axis."""
    return {axis: n for axis, n in OVER(self, degrees).items() if axis != "depth"}


OVER = Sharding.replica_counts
BREAKS = {
    "dual of total": lambda: mock.patch.object(norm, "copy_to_axis", lambda x, axis: x),
    "lost sum in a norm": lambda: mock.patch.multiple(
        norm, copy_to_axis=lambda x, axis: x, sum_gradients=lambda x, axis: x
    ),
    "sum of a scatter": lambda: mock.patch.object(collectives, "reduce_scatter", _half_reduced),
    "maximum over the vocabulary": lambda: mock.patch.object(
        cross_entropy.collectives, "all_reduce", lambda x, axis, op="sum": PendingTensor(x)
    ),
    "missing axis in the gradient sum": lambda: mock.patch.object(
        Sharding, "replica_counts", _no_depth
    ),
    "lost bucket": lambda: mock.patch.object(
        BucketScheduler, "_reduce_over_replicas", lambda self, bucket, whole: None
    ),
}


MODELS = {"lost sum in a norm": "llama"}
"""Models with the broken part; others are seen in the one with biases."""


def broken(grid: Grid, name: str, case: Case, batch: Batch) -> dict[str, Any]:
    with BREAKS[name]():
        return run_case(grid, case, batch, 1e-2, 0.5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n[0] in "dl" else pytest.mark.full) for n in BREAKS],
)
def test_a_broken_part_is_caught(pool: Pool, name: str) -> None:
    model = MODELS.get(name, "biased")
    serial = Serial(model, batch_of(model, samples=8, packed=False), 1e-2, 0.5, steps=1)
    degrees = {"depth": 2, "row": 2, "col": 2}
    results = pool.on_grid(degrees, broken, name, Case(model, steps=1), serial.batch)
    lines = compare(serial, results)
    assert any("gradient" in line or "losses" in line for line in lines), lines

"""Seconds, not minutes: one rank equals plain PyTorch, and the parts of a grid make the whole."""

from __future__ import annotations

import pytest
import torch

from equivalence import Case, Serial, batch_of, compare, run_case
from grids import grids, label
from ranvier.grid import Grid
from ranvier.models import EXAMPLES
from ranvier.parallel.parallelize import parallelize
from states import assemble


@pytest.mark.parametrize("model", EXAMPLES)
@pytest.mark.parametrize("fast", [True, False])
def test_one_rank_is_plain_pytorch(model: str, fast: bool) -> None:
    serial = Serial(model, batch_of(model, samples=8, packed=True), 1e-2, 0.5)
    result = run_case(Grid({}), Case(model, packed=True, fast=fast), serial.batch, 1e-2, 0.5)
    assert compare(serial, [result]) == []


@pytest.mark.parametrize("degrees", grids((8,))[::4], ids=label)
def test_parts_make_the_whole(degrees: dict[str, int]) -> None:
    whole = {n: p.detach() for n, p in Case("qwen3").build().named_parameters()}
    states = [
        parallelize(Case("qwen3").build(), Grid(degrees, rank=rank)).parallel.sharded_state()
        for rank in range(8)
    ]
    assert all(torch.equal(value, whole[name]) for name, value in assemble(states).items())

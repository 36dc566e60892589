"""Muon, Jorge and SGD on any grid equal one process, and depend on no layout.

Losses, gradients, norms, and weights after three steps in float64; communication is as predicted,
and states reload bit for bit on another grid.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from equivalence import Case, Serial, batch_of, compare, copied, micros_of, reload, run_case
from pool import Pool
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.rules import Jorge, Muon, Rule, Sgd
from ranvier.optim.state_tiles import StatePlacement
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import forward_backward
from states import assemble

LR, CLIP = 1e-2, 0.5
RULES: dict[str, Rule] = {
    "muon": Muon(),
    "muon original": Muon(adjust_lr="original", nesterov=False, steps=4, momentum=0.9),
    "jorge": Jorge(max_preconditioner_dim=16),
    "jorge plain": Jorge(symmetric=False, precondition_interval=2, grafting=False, momentum=0.8),
    "sgd": Sgd(),
}
GRIDS: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({}, "deep", {}),
    ({"data": 2}, "deep", {}),
    ({"row": 2, "depth": 3}, "deep", {}),
    ({"row": 2, "col": 2, "depth": 2}, "deep", {}),
    ({"row": 2, "col": 2, "depth": 2}, "deep tied", {"inner": "features"}),
    ({"row": 4}, "one kv head", {}),
    ({"data": 3, "row": 2}, "deep tied", {}),
    ({"context": 2, "depth": 2}, "local", {"weights_over": "depth_context"}),
    ({"pipe": 2, "data": 2}, "deep tied", {}),
    ({"expert": 2, "data": 2}, "local moe", {}),
    ({"expert": 2, "depth": 2, "row": 2}, "local moe", {}),
    ({"data": 2, "depth": 2, "col": 2}, "deep", {}),
    ({"row": 2, "col": 2, "depth": 2}, "same dim", {}),
    ({"data": 2, "row": 2, "col": 2}, "same dim", {"inner": "features"}),
]


@functools.cache
def serial(model: str, rule: str) -> Serial:
    batch = batch_of(model, samples=48, packed=False)
    return Serial(model, batch, LR, CLIP, 3, rule=RULES[rule])


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("degrees", "model", "options"), GRIDS, ids=str)
def test_any_grid_equals_one_process(
    pool: Pool, degrees: dict[str, int], model: str, options: dict[str, Any], rule: str
) -> None:
    whole = serial(model, rule)
    case = Case(model, micro_batches=2, steps=3, both=True, rule=RULES[rule], **options)
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["muon", "jorge", "sgd"])
def test_states_reload_on_another_grid(pool: Pool, rule: str) -> None:
    case = Case("deep", micro_batches=2, steps=2, rule=RULES[rule])
    batch = serial("deep", rule).batch
    results = pool.on_grid({"row": 2, "depth": 3}, run_case, case, batch, LR, CLIP)
    state = {key: assemble(result[key] for result in results) for key in ("after", "optimizer")}
    bad = pool.on_grid({"data": 2, "col": 2}, reload, case, state["after"], state["optimizer"])
    assert [line for lines in bad for line in lines] == []


def stored_update(
    grid: Grid,
    rule: Rule,
    home: StatePlacement,
    moments: str,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Weights after two steps with states in some place."""
    case = Case("deep", steps=2)
    model = case.on(grid, dtype=dtype)
    queue = get_parallel_model(model).bucket_scheduler
    optimizer = Optimizer(
        queue,
        lr=LR,
        clip=CLIP,
        rule=rule,
        home=home,
        moments=moments,  # type: ignore[arg-type]
    )
    batch = batch_of("deep", samples=8, packed=False)
    for _ in range(2):
        forward_backward(model, micros_of(batch, grid, 1))
        optimizer.step()
    queue.wait_for_updates()
    for bucket, master in optimizer.master_weights.items():
        assert torch.equal(bucket.take_optimizer_shard(bucket.data), master.to(dtype))
    return {n: x.clone() for n, (x, _) in get_parallel_model(model).sharded_state().items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update_device", ["device", "cpu"])
@pytest.mark.parametrize("rule", ["muon", "jorge", "sgd"])
def test_states_on_the_host_change_no_bit(
    pool: Pool, rule: str, update_device: str, dtype: torch.dtype
) -> None:
    degrees = {"data": 2, "row": 2}
    away = StatePlacement("host", update_device=update_device, tile_elements=256)  # type: ignore[arg-type]
    here = pool.on_grid(degrees, stored_update, RULES[rule], StatePlacement(), "master", dtype)
    there = pool.on_grid(degrees, stored_update, RULES[rule], away, "master", dtype)
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["muon", "jorge"])
def test_narrow_moments_do_not_depend_on_the_grid(pool: Pool, rule: str) -> None:
    """Stochastic rounding follows the element, so that bf16 momenta are the same on any grid."""
    one = pool.on_grid({}, stored_update, RULES[rule], StatePlacement(), "bf16")
    (whole,) = one
    exact = pool.on_grid({}, stored_update, RULES[rule], StatePlacement(), "master")[0]
    for part in pool.on_grid({"data": 2}, stored_update, RULES[rule], StatePlacement(), "bf16"):
        assert all((x - whole[n]).abs().max() < 1e-12 for n, x in part.items())
    assert any(not torch.equal(x, exact[name]) for name, x in whole.items())


def skipped_update(grid: Grid, rule: Rule, reason: str) -> list[str]:
    """States and weights that change in a step that is skipped."""
    case = Case("deep")
    model = case.on(grid)
    parallel = get_parallel_model(model)
    optimizer = Optimizer(parallel.bucket_scheduler, lr=LR, rule=rule)
    batch = batch_of("deep", samples=8, packed=False)
    forward_backward(model, micros_of(batch, grid, 1))
    optimizer.step()
    before = copied({**parallel.sharded_state(), **optimizer.sharded_state()})
    forward_backward(model, micros_of(batch, grid, 1))
    votes = torch.tensor([reason == "veto"])
    if reason == "not finite":
        bucket = next(b for b in parallel.bucket_scheduler.buckets if b.spec.has_matrices)
        bucket.add_compressed_grad(torch.full((bucket.size,), float("nan"), dtype=torch.float64))
    optimizer.step(votes=votes, vetoes=1)
    after = {**parallel.sharded_state(), **optimizer.sharded_state()}
    return [name for name, (x, _) in after.items() if not torch.equal(x, before[name][0])]


@pytest.mark.sample(3)
@pytest.mark.parametrize("reason", ["not finite", "veto"])
@pytest.mark.parametrize("rule", ["muon", "jorge", "sgd"])
def test_a_skipped_step_changes_nothing(pool: Pool, rule: str, reason: str) -> None:
    assert pool.on_grid({"row": 2}, skipped_update, RULES[rule], reason) == [[], []]


@pytest.mark.parametrize("rule", ["muon", "jorge"])
def test_what_a_rule_does_not_support_is_refused(rule: str) -> None:
    """In one's own training loop; a run is refused by its settings."""

    def build(model: str, **options: Any) -> Optimizer:
        queue = get_parallel_model(Case(model).on(Grid({}))).bucket_scheduler
        return Optimizer(queue, rule=RULES[rule], **options)

    with pytest.raises(PlanError, match=r"moments='int8' .* Only .* Use moments='bf16'"):
        build("deep", moments="int8")
    with pytest.raises(PlanError, match=r"without trainable hidden matrices.* Use rule=None"):
        build("adapted")
    with pytest.raises(PlanError, match=r"Pruned weights .* Use rule=None"):
        build("deep").prune_weights(lambda *_: None)

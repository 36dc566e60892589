"""Pruned training: equals masked dense training, and takes and moves what it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equivalence import Case
from grids import grids, label
from pool import Pool
from pruned import (
    Masked,
    Pair,
    compare,
    differing,
    examples,
    growing,
    grown,
    long,
    masks_of,
    off,
    pruned,
    way_of,
    weighed,
)
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.optim import pruning
from ranvier.optim.state_tiles import StatePlacement
from ranvier.parallel.parallelize import parallelize
from states import assemble

full = pytest.mark.full
CASES = [
    (Case("llama", micro_batches=2), 0.8, {"depth": 2, "row": 2, "data": 2}),
    (Case("llama", recompute="full"), 0.9, {"row": 4}),  # ranks share kv heads
    (Case("moe 2 of 8"), 0.7, {"expert": 2, "depth": 2}),
    *(
        pytest.param(*case, marks=full)
        for case in [
            (Case("gpt2"), "2:4", {"col": 2, "data": 2}),
            (Case("moe 2 of 8"), "2:4", {"expert": 2, "row": 2}),
            (Case("moe 1 of 8", micro_batches=2), 0.6, {"expert": 2, "col": 2, "data": 2}),
            (Case("moe 8 of 16"), 0.9, {"depth": 4, "data": 2}),
            (Case("deep tied", micro_batches=2), 0.5, {"pipe": 2, "depth": 2, "data": 2}),
            (Case("qwen3", inner="features", overlap=False), 0.98, {"depth": 2, "col": 2}),
            (Case("qwen3", fast=False, steps=3), 0.6, {"depth": 2, "row": 2}),
            *((Case("llama"), 0.7, degrees) for degrees in grids((1, 2, 4, 8))),
            *((Case("biased"), "1:2", degrees) for degrees in grids((1, 2, 4))),
        ]
    ),
]


def named(value: Any) -> str:
    return (
        value.label if isinstance(value, Case) else label(value) if isinstance(value, dict) else ""
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "how", "degrees"), CASES, ids=named)
def test_equals_masked_dense_training(
    pool: Pool, case: Case, how: float | str, degrees: dict[str, int]
) -> None:
    """Losses, norms, gradients, weights and masks; what is predicted is communicated."""
    assert compare(case, how, pool.on_grid(degrees, pruned, case, how)) == []


STEPS = 300
LONG = [
    pytest.param({}, marks=full),
    {"depth": 2, "data": 2},
    *(
        pytest.param(degrees, marks=full)
        for degrees in [{"depth": 2, "row": 2, "data": 2}, *grids((2, 4))]
        if degrees.get("col", 1) == 1 and degrees.get("row", 1) < 4
    ),
]


def masked_pair(sparsity: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Pair()
    plain = Masked(model, masks_of(model, way_of(sparsity)), 1e-2, 0.5)
    x, y = examples(Grid({}))
    losses = [plain.step(lambda model: off(model, x, y))[0] for _ in range(STEPS)]
    return losses, plain.state()


@pytest.mark.full
@pytest.mark.parametrize("degrees", LONG, ids=named)
def test_three_hundred_steps(pool: Pool, degrees: dict[str, int]) -> None:
    losses, weights = masked_pair(0.6)
    results = pool.on_grid(degrees, long, STEPS, 0.6)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-6, abs=0.0)
    after = assemble(result["after"] for result in results)
    for name, want in weights.items():
        assert torch.equal(after[name] == 0.0, want == 0.0) and (want == 0.0).sum() == 36
        assert (after[name] - want).abs().max() < 1e-6
    assert losses[-1] < 0.8 * losses[0]


SHAPES = [
    {"layers": 1, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24},
    {"layers": 2, "embed": 24, "heads": 4, "kv_heads": 4, "head_dim": 6, "mlp": 44},
]
HELD = [
    (0, {}, "bfloat16"),
    (1, {}, "float32"),
    (1, {"depth": 2, "data": 2}, "float32"),
    pytest.param(1, {"depth": 2, "row": 2, "data": 2}, "float32", marks=full),
    pytest.param(0, {"depth": 2, "data": 2}, "bfloat16", marks=full),
    pytest.param(1, {"depth": 4, "data": 2}, "bfloat16", marks=full),
    pytest.param(0, {"row": 2, "data": 4}, "float32", marks=full),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "degrees", "dtype"), HELD, ids=named)
def test_bytes_are_those_of_the_formula(
    pool: Pool, shape: int, degrees: dict[str, int], dtype: str
) -> None:
    """Of all tensors that are held, exactly; and reductions move what is left, up to padding."""
    data, depth = degrees.get("data", 1), degrees.get("depth", 1)
    narrow = dtype == "bfloat16"
    numbers = {"data": data, "working": 2 if narrow else 4}
    numbers["gradient"] = 2 if narrow and data == depth == 1 else 4
    for sparsity in (0.0, 0.5, 0.8, 0.9):
        for found in pool.on_grid(degrees, weighed, SHAPES[shape], sparsity, dtype):
            for size, rows, grad, held, moved in found:
                count = -(-max(rows) // data) * data
                grad = moved[-1] if grad is None else grad
                if sparsity == 0.0:  # nothing is pruned: the bytes of the dense optimizer
                    master = 4 if narrow else 0
                    want = size * (numbers["working"] + numbers["gradient"])
                    assert held + grad == want + (master + 8) * size // data
                    continue
                assert held + grad == pruning.pruned_bucket_bytes(size, rows, **numbers)
                assert sum(rows) / len(rows) / size == pytest.approx(1.0 - sparsity, abs=0.04)
                share = max(rows) / size
                assert not narrow or depth > 2 or held + grad <= (2 + 24 * share) * size
                over = [depth * count * 4] * (depth > 1) + [count * 4] * (data > 1)
                assert sorted(set(moved)) == sorted(over)


@pytest.mark.parametrize(("sparsity", "bound"), [(0.5, 1.0), (0.8, 1.0), (0.9, 1.0), (0.99, 1.0)])
def test_the_formula_keeps_what_was_promised(sparsity: float, bound: float) -> None:
    """2 + 24 (1 - p) bytes a parameter at most, with gradients of 2 or 4 bytes."""
    size = 10_000
    stay = pruning.num_kept_elements(size, sparsity)
    for gradient in (2, 4):
        assert pruning.pruned_bucket_bytes(size, [stay], gradient=gradient) <= 2 * size + 24 * stay


def test_groups_that_a_rank_has_a_part_of_are_refused() -> None:
    model = parallelize(Pair(), Grid({}))
    says = r"pattern=2:4 does not divide .*: blocks.0.up.weight has rows of 6 .* another M"
    with pytest.raises(PlanError, match=says):
        pruning.by_pattern(model.parallel.bucket_scheduler, 2, 4)  # type: ignore[union-attr]


def test_equal_magnitudes_go_by_their_place() -> None:
    model = Pair()
    with torch.no_grad():
        up, down = model.parameters()
        up.fill_(-0.5)
        down.copy_(torch.arange(60).view(6, 10) % 2)
    queue = parallelize(model, Grid({})).parallel.bucket_scheduler  # type: ignore[union-attr]
    pruning.prune_buckets(queue, pruning.by_magnitude(queue, 0.75))
    up, down = model.parameters()
    assert (up.view(-1) != 0).tolist() == [True] * 15 + [False] * 45
    want = [n % 2 == 1 and n < 30 for n in range(60)]
    assert (down.view(-1) != 0).tolist() == want


def test_sparsity_grows_and_stays() -> None:
    found = [pruning.sparsity_at(step, 0.8, 100) for step in (0, 50, 100, 200)]
    assert found == pytest.approx([0.0, 0.7, 0.8, 0.8])
    assert pruning.sparsity_at(0, 0.8, 0) == 0.8


TILE = 96
BF16 = {"dtype": torch.bfloat16}
HOST = {"home": StatePlacement("host", tile_elements=TILE)}
SOME = {"home": StatePlacement("split", device_bytes=20_000, tile_elements=TILE), "room": 2**30}
CPU = {"home": StatePlacement("host", update_device="cpu", tile_elements=TILE), **BF16}
ELSEWHERE: list[Any] = [
    ({"data": 2}, {**BF16, "moments": "int8"}, SOME),
    *(
        pytest.param(*case, marks=full)
        for case in [
            ({}, {}, HOST),
            ({"data": 2}, BF16, SOME),
            ({"depth": 2, "data": 2}, {"moments": "bf16"}, HOST),
            ({}, CPU, {"room": 2**30}),
            ({"row": 2, "data": 2}, {}, {**HOST, "room": 2**30}),
            (
                {"depth": 2},
                {**BF16, "moments": "int8"},
                {"home": StatePlacement("host", tile_elements=768)},
            ),
        ]
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("degrees", "one", "other"), ELSEWHERE, ids=range(len(ELSEWHERE)))
def test_states_elsewhere_change_no_bit(
    pool: Pool, degrees: dict[str, int], one: dict[str, Any], other: dict[str, Any]
) -> None:
    ranks = pool.on_grid(degrees, differing, one, {**one, **other})
    assert ranks == [[]] * len(ranks)


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{"depth": 2, "data": 2}], ids=named)
def test_pruning_further_equals_masked_dense_training(pool: Pool, degrees: dict[str, int]) -> None:
    """Moments of what stays go on; what is pruned is forgotten."""
    want = grown()
    for numbers, _ in pool.on_grid(degrees, growing, {}):
        assert numbers == pytest.approx(want, rel=1e-9, abs=0.0)

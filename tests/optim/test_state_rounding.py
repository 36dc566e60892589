"""The rule of AdamW with its options, and moments that are rounded at random on any grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from equivalence import copied
from pool import Pool
from ranvier import counter_rng
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.grid import Grid
from ranvier.models import EXAMPLES
from ranvier.optim import adamw, fused_adamw
from ranvier.optim.adamw import UpdateScalars
from ranvier.optim.low_precision_states import (
    BLOCK_SIZE,
    MomentKind,
    Moments,
    RoundingKey,
    quantize_moment,
    stochastic_round_bf16,
)
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import WEIGHT_RULE, Shard, ShardedStateDict, Sharding
from states import assemble
from training import losses_of, run_of, stored, trainer_of

YES, NO = torch.tensor(True), torch.tensor(False)
KEY = RoundingKey.for_weight("w", Shard((1 << 40,), (0,), (1 << 40,), (1 << 40,)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def number(step: int) -> Tensor:
    return torch.tensor(float(step), dtype=torch.float64)


def update(step: int, good: Tensor = YES, lr: float = 1e-2, beta2: float = 0.95) -> UpdateScalars:
    return UpdateScalars.for_update(number(step), good, None, (0.9, beta2), lr)


def drawn(count: int, kind: MomentKind, grads: torch.dtype) -> tuple[Tensor, Tensor, Moments]:
    """Weight, gradient and both moments."""
    draw = torch.Generator().manual_seed(1)
    weight, grad, mean, square = torch.randn(4, count, generator=draw)
    if kind == "int8":
        means, squares = quantize_moment(mean, "mean"), quantize_moment(square.abs(), "square")
        moments = Moments(means[0], squares[0], torch.stack([means[1], squares[1]]))
    else:
        moments = Moments.zeros(count, kind, torch.float32)
        moments.mean.copy_(mean), moments.square.copy_(square.abs())
    return weight.clone(), grad.to(grads), moments


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rule_equals_that_of_torch(grads: torch.dtype) -> None:
    weight, grad, _ = drawn(1000, "master", grads)
    moments = Moments.zeros(1000, "master", torch.float32)
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    out = torch.zeros(1000, dtype=torch.bfloat16)
    for step in range(1, 4):
        theirs.grad = grad.float() * (0.25 / step)
        optimizer.step()
        factor = torch.tensor(0.25 / step)
        now = fused_adamw.UpdateScalars.for_update(number(step), YES, factor, (0.9, 0.95), 1e-2)
        fused_adamw.fused_adamw(weight, grad, moments, now=now, decay=0.1, out=out)
    assert torch.allclose(weight, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(out, weight.bfloat16())


@pytest.mark.parametrize("kind", ["master", "bf16", "int8"])
def test_an_update_that_is_not_good_changes_no_bit(kind: MomentKind) -> None:
    weight, grad, moments = drawn(1000, kind, torch.float32)
    weight[:9], grad[::7] = -0.0, torch.nan
    out = torch.full((1000,), 3.0, dtype=torch.bfloat16)
    tensors = [weight, *moments.tensors, out]
    held = [x.clone() for x in tensors]
    now = UpdateScalars.for_update(number(2), NO, torch.tensor(torch.nan), (0.9, 0.95), 1e-2)
    for update_of in (adamw.adamw_update, fused_adamw.fused_adamw):
        update_of(weight, grad, moments, now=now, decay=0.1, out=out, key=KEY)
        for before, after in zip(held, tensors, strict=True):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernel_of_a_cpu_does_not_depend_on_cuts(dtype: torch.dtype) -> None:
    """Whole, or in ranges that fill no vector register; the plain rule agrees but for rounding."""
    now = UpdateScalars.for_update(number(3), YES, torch.tensor(0.7), (0.9, 0.95), 1e-2)

    def updated(rule: Callable[..., None], *cuts: int) -> list[Tensor]:
        weight, grad, _ = drawn(1003, "master", torch.float32)
        weight, grad = weight.to(dtype), grad.to(dtype)
        moments = Moments(torch.sin(grad), torch.cos(grad).square())
        for start, stop in pairwise([0, *cuts, 1003]):
            part = moments.slice_range(start, stop)
            rule(weight[start:stop], grad[start:stop], part, now=now, decay=0.1)
        return [weight, moments.mean, moments.square]

    whole = updated(fused_adamw.fused_adamw)
    for cuts in ([7], [16, 99, 100], [1, 2, 3, 997]):
        assert all(
            torch.equal(x, y)
            for x, y in zip(updated(fused_adamw.fused_adamw, *cuts), whole, strict=True)
        )
    for x, y in zip(whole, updated(adamw.adamw_update), strict=True):
        torch.testing.assert_close(x, y, rtol=4 * torch.finfo(dtype).eps, atol=1e-12)


def test_random_rounding_keeps_what_nearest_rounding_loses() -> None:
    """v goes from 1 to 0.25 by a thousandth of the way a step; a bf16 number has steps of 1/256."""
    count, steps = 100_000, 100
    weight, grad = torch.zeros(count), torch.full((count,), 0.5)
    moments = Moments.zeros(count, "bf16", torch.float32)
    moments.square.fill_(1.0)
    nearest, exact = torch.ones((), dtype=torch.bfloat16), 1.0
    for step in range(1, steps + 1):
        adamw.adamw_update(weight, grad, moments, now=update(step, lr=0.0, beta2=0.999), key=KEY)
        nearest = (nearest.float() * 0.999 + 0.25 * 0.001).bfloat16()
        exact = exact * 0.999 + 0.25 * 0.001
    square = moments.square.double()
    error = square.std().item() / count**0.5
    assert nearest == 1.0, "the control: it never moves"
    assert square.mean().item() == pytest.approx(exact, abs=5 * error)
    assert 0 < error < 1e-4


def test_rounding_leaves_what_is_exact_and_what_is_no_number() -> None:
    bits = KEY.random_bits(number(1), 6) & 0xFFFF
    x = torch.tensor([0.0, -0.0, -1.5, torch.inf, -torch.inf, torch.nan])
    x[5:].view(torch.int32).fill_(0x7F800001)  # cut to 16 bits it would be infinite
    assert torch.equal(stochastic_round_bf16(x, bits)[:5], x[:5].bfloat16())
    assert stochastic_round_bf16(x, bits)[5].isnan()


def test_the_random_bits_are_uniform_and_independent() -> None:
    count = 200_000
    place = Shard((1 << 40,), (0,), (1 << 40,), (1 << 40,))
    cases = ((1, "a", 0, 0), (2, "a", 0, 0), (1, "b", 0, 0), (1, "a", 1, 0), (1, "a", 0, 1))
    streams = [
        RoundingKey.for_weight(name, place, seed=seed)
        .at_offset(first)
        .random_bits(number(step), count)
        for step, name, seed, first in (*cases, (1, "a", 0, 1 << 32))
    ]
    halves = torch.stack([part for x in streams for part in (x >> 16, x & 0xFFFF)]).double()
    assert halves.min() >= 0 and halves.max() < 1 << 16
    assert (halves.mean(1) / 65535 - 0.5).abs().max() < 5 / (12 * count) ** 0.5
    off = torch.corrcoef(halves) - torch.eye(len(halves))
    assert off.abs().max() < 5 / count**0.5
    counts = torch.stack([torch.bincount(x.long() >> 8, minlength=256) for x in halves]).double()
    chi = (counts - count / 256).square().sum(1) / (count / 256)
    assert (chi - 255).abs().max() < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_pieces_round_like_the_whole(kind: MomentKind) -> None:
    key = KEY.at_offset((1 << 32) - 500)  # a piece crosses the largest 32-bit index
    weight, grad, moments = drawn(1000, kind, torch.bfloat16)
    whole = [weight, *moments.tensors]
    adamw.adamw_update(weight, grad, moments, now=update(3), key=key)
    weight, grad, moments = drawn(1000, kind, torch.bfloat16)
    for start, stop in ((0, BLOCK_SIZE), (BLOCK_SIZE, 3 * BLOCK_SIZE), (3 * BLOCK_SIZE, 1000)):
        part = moments.slice_range(start, stop)
        adamw.adamw_update(
            weight[start:stop], grad[start:stop], part, now=update(3), key=key.at_offset(start)
        )
    pieces = [weight, *moments.tensors]
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    weight, grad, moments = drawn(1000, kind, torch.bfloat16)
    adamw.adamw_update(weight, grad, moments, now=update(3), key=KEY)
    assert not torch.equal(moments.mean, whole[1]), "the control: the index counts"


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((6, 8), ("mlp", "embed")),
        ((8, 3, 4), ("embed", "", "heads")),
        ((3, 4, 8), ("", "heads", "embed")),
        ((4, 6, 8), ("expert", "mlp", "embed")),
        ((4, 2, 6, 8), ("expert", "", "mlp", "embed")),
        ((29, 8), ("vocab", "embed")),
        ((7, 5, 2), ("", "", "rank")),
    ],
    ids=str,
)
def test_a_key_knows_the_place_of_each_element(
    shape: tuple[int, ...], dims: tuple[str, ...]
) -> None:
    whole = torch.arange(math.prod(shape)).view(shape) + 1  # padding is 0
    ways = [{}, {"row": 2}, {"col": 2}, {"depth": 2}, {"row": 2, "col": 2, "depth": 2, "expert": 2}]
    for way in ways:
        degrees = {axis: way.get(axis, 1) for axis in ("pipe", "expert", "depth", "row", "col")}
        sharding = Sharding.from_dims(shape, dims, WEIGHT_RULE, degrees, gather_axes=("depth",))
        for last in (0, 1):
            place = sharding.shard_at({axis: n - 1 if last else 0 for axis, n in degrees.items()})
            box, size = place.slice_from(whole).view(-1), math.prod(place.local_shape)
            # The kernel takes three; of four dims all may be split, then the plain rule runs.
            assert len(RoundingKey.for_weight("w", place).merged_dims) <= max(3, len(shape))
            for start, stop in ((0, size), (size // 3, size - 2), (size - 1, size)):
                key = RoundingKey.for_weight("w", place.narrow_flat(start, stop))
                index = key.global_index(stop - start, torch.device("cpu")) + 1
                wanted = box[start:stop]
                assert torch.equal(index[wanted > 0], wanted[wanted > 0]), (way, start)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp64", "fp16"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, corpus: str, dtype: str) -> None:
    changes = {"optim__state_dtype": "bf16", "train__dtype": dtype, "checkpoint__interval": 3}
    run = run_of(str(tmp_path), {}, 6, checkpoint__keep_latest=0, **changes)
    whole, half = (trainer_of(Grid({}), corpus, run) for _ in range(2))
    losses = [row["loss"] for row in whole.run_steps()]
    half.checkpointer.resume_from(tmp_path / "checkpoints" / "step-00000003")
    assert [row["loss"] for row in half.run_steps()] == losses[3:]
    wide = torch.float64 if dtype == "fp64" else torch.float32
    for name, (part, place) in whole.state.optimizer.sharded_state().items():
        narrow = not name.endswith(".master") and len(place.global_shape) > 1
        assert part.dtype == (torch.bfloat16 if narrow else wide), name
    for name, (part, _) in half.state.optimizer.sharded_state().items():
        assert torch.equal(part, whole.state.optimizer.sharded_state()[name][0]), name
        assert bool((part != 0).any()), name


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2},
        {"row": 2, "col": 2},
        pytest.param({"depth": 2, "pipe": 2}, marks=pytest.mark.full),
        pytest.param({"data": 2, "col": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_grids_round_like_one_process(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int]
) -> None:
    """Gradients differ in their last bits; moments of matrices do not."""
    changes = {"optim__state_dtype": "bf16"}
    folders = [tmp_path / "one", tmp_path / "grid"]
    for folder, way in zip(folders, ({}, degrees), strict=True):
        pool.on_grid(way, losses_of, corpus, str(folder), 4, "", changes)
    paths = [find_checkpoints(folder / "checkpoints")[-1] for folder in folders]
    for kind in ("mean", "square", "master"):
        one, two = (load_full_tensors(path, kind) for path in paths)
        assert set(one) == set(two) and one
        for name, value in one.items():
            if value.dtype == torch.bfloat16:
                assert torch.equal(value, two[name]), name
            else:
                assert (value - two[name]).abs().max() < 1e-9 * value.abs().max(), name
        narrow = sum(value.dtype == torch.bfloat16 for value in one.values())
        assert (narrow > 0) == (kind != "master")


def fed(grid: Grid, steps: int) -> ShardedStateDict:
    """My part of the state after updates with gradients that only the first of copies has."""
    torch.manual_seed(1)
    model = parallelize(EXAMPLES["llama"]().float(), grid)
    queue = model.parallel.bucket_scheduler  # type: ignore[union-attr]
    optimizer = Optimizer(queue, clip=0.0, moments="bf16")
    for step in range(steps):
        queue.begin_step("train")
        for bucket in queue.buckets:
            for weight in bucket.weights:
                grad = counter_rng.init_shard(
                    weight.shard, seed=step, name=weight.name, std=1.0
                ).float()
                mine = bucket.owns_weight(weight)
                queue.accumulate_shard_grad(
                    bucket, weight.offset, grad if mine else torch.zeros_like(grad)
                )
        optimizer.step()
    return copied(optimizer.sharded_state())


def test_equal_gradients_give_equal_states_on_every_grid(pool: Pool) -> None:
    one = assemble(pool.on_grid({}, fed, 3))
    for degrees in ({"row": 2, "col": 2}, {"depth": 2, "data": 2}, {"pipe": 2}):
        other = assemble(pool.on_grid(degrees, fed, 3))
        assert set(one) == set(other)
        assert all(torch.equal(value, other[name]) for name, value in one.items()), degrees

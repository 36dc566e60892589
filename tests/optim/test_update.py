"""Groups, masked updates, the loss scale and the schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from equivalence import Case, batch_of
from pool import Pool
from ranvier.grid import Grid
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.optim.grad_scaler import GROWTH_INTERVAL, INITIAL_SCALE, MIN_SCALE, GradScaler
from ranvier.optim.lr_schedule import lr_factor
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import StepLimits, forward_backward, train_step

FACTORS = {"matrix": 1.0, "embedding": 0.3, "vector": 5.0}


def grouped(grid: Grid) -> float:
    """Largest difference of weights after three steps with factors to torch's own groups."""
    case, batch = Case("qwen3"), batch_of("qwen3", samples=8, packed=False)
    model, plain = case.on(grid), case.build()
    parallel = model.parallel
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2, clip=0.5, factors=FACTORS)  # type: ignore[arg-type,union-attr]
    groups = []
    for name, param in plain.named_parameters():
        group = "vector" if param.ndim < 2 else "embedding" if "embed" in name else "matrix"
        decay = 0.1 if group == "matrix" else 0.0
        groups.append({"params": [param], "lr": 1e-2 * FACTORS[group], "weight_decay": decay})
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    micros = batch.split_micro_batches(grid, 8 // grid.axis("data", "expert", "depth").size)
    for _ in range(3):
        forward_backward(model, micros)
        optimizer.step()
        theirs.zero_grad()
        (plain(**batch.model_inputs()) / (batch.targets != IGNORE_INDEX).sum()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
    want = dict(plain.named_parameters())
    parts = parallel.sharded_state().items()  # type: ignore[union-attr]
    return max(
        float((part - place.slice_from(want[n])).detach().abs().max()) for n, (part, place) in parts
    )


@pytest.mark.parametrize("degrees", [{}, {"row": 2, "depth": 2}, {"col": 2, "data": 2}], ids=str)
def test_groups_are_those_of_the_named_dims(pool: Pool, degrees: dict[str, int]) -> None:
    assert max(pool.on_grid(degrees, grouped)) < 1e-10


def clipped(grid: Grid) -> list[float]:
    """Largest change of each gradient in a step that clips them."""
    model, batch = Case("llama").on(grid), batch_of("llama", samples=8, packed=False)
    queue = model.parallel.bucket_scheduler  # type: ignore[union-attr]
    optimizer = Optimizer(queue, lr=1e-2, clip=1e-3)  # type: ignore[arg-type]
    forward_backward(model, batch.split_micro_batches(grid, 8))
    grads = [part for b in queue.buckets if b.grad is not None for part in b.grad.parts.values()]  # type: ignore[union-attr]
    before = [grad.clone() for grad in grads]
    assert optimizer.step() > 1e-3
    return [float((x - y).abs().max()) for x, y in zip(grads, before, strict=True)]


def test_gradients_are_clipped_in_copies(pool: Pool) -> None:
    """Two weights may have got the same tensor, which would be clipped twice."""
    (changes,) = pool.on_grid({}, clipped)
    assert len(changes) > 20
    assert max(changes) == 0.0


def masked(grid: Grid, kind: str) -> list[str]:
    """What changes in a step whose gradient is no number on one rank, and in the one after it."""
    case, batch = Case("llama"), batch_of("llama", samples=8, packed=False)
    model = case.on(grid)
    parallel = model.parallel
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2)  # type: ignore[arg-type,union-attr]
    micros = batch.split_micro_batches(grid, 8 // grid.axis("data", "expert", "depth").size)
    forward_backward(model, micros)
    optimizer.step()
    before = {n: x.clone() for n, (x, _) in optimizer.sharded_state().items()}
    weights = {n: x.clone() for n, (x, _) in parallel.sharded_state().items()}  # type: ignore[union-attr]
    forward_backward(model, micros)
    if grid.rank == 0:
        bucket = next(
            b for b in parallel.bucket_scheduler.buckets if b.reduced_grads or b.grad is not None
        )  # type: ignore[union-attr]
        if bucket.reduced_grads:
            grad = bucket.reduced_grads[0].wait()
        else:
            grad = next(iter(bucket.grad.parts.values()))  # type: ignore[union-attr]
        grad.view(-1)[0] = float(kind)
    optimizer.step()
    changed = [
        n for n, (x, _) in optimizer.sharded_state().items() if not torch.equal(x, before[n])
    ]
    state = parallel.sharded_state().items()  # type: ignore[union-attr]
    changed += [n for n, (x, _) in state if not torch.equal(x, weights[n])]
    assert not optimizer.is_norm_finite and optimizer.num_updates == 1
    forward_backward(model, micros)
    optimizer.step()
    assert optimizer.is_norm_finite and optimizer.num_updates == 2
    moved = any(not torch.equal(x, before[n]) for n, (x, _) in optimizer.sharded_state().items())
    return changed if moved else ["nothing moves any more"]


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_bad_gradient_changes_no_bit(pool: Pool, kind: str) -> None:
    assert pool.on_grid({"row": 2, "data": 2}, masked, kind) == [[]] * 4


def test_the_scale_follows_overflows() -> None:
    scale, yes, no = GradScaler("cpu"), torch.tensor(True), torch.tensor(False)
    scale.update(no)
    assert scale.scale == INITIAL_SCALE / 2
    for _ in range(GROWTH_INTERVAL):
        scale.update(yes)
    assert scale.scale == INITIAL_SCALE and scale.growth_tracker == 0
    for _ in range(40):
        scale.update(no)
    assert scale.scale == MIN_SCALE and scale.is_at_minimum()


def scaled(grid: Grid, start: float) -> tuple[list[float], float, bool]:
    """Losses of some steps in fp16 that begin with a scale; the scale and the health they leave."""
    case, batch = Case("llama"), batch_of("llama", samples=8, packed=False)
    model = case.on(grid, dtype=torch.float16)
    scale = GradScaler("cpu")
    scale.scale.fill_(start)
    optimizer = Optimizer(model.parallel.bucket_scheduler, lr=1e-2, scale=scale)  # type: ignore[arg-type,union-attr]
    micros = batch.split_micro_batches(grid, 8 // grid.axis("data", "expert", "depth").size)
    watch, losses = StepLimits.for_device("cpu"), []
    for _ in range(12):
        taken = train_step(model, optimizer, micros, 1e-2, watch)
        losses.append(taken.loss.item())
    return losses, scale.scale.item(), not watch.nonfinite_steps


def test_fp16_skips_overflows_and_trains(pool: Pool) -> None:
    ((losses, scale, healthy),) = pool.on_grid({}, scaled, 2.0**24)
    assert healthy and scale < 2.0**24
    assert losses[0] == losses[1], "the first updates overflow and are skipped"
    assert losses[-1] < losses[0] - 0.1
    for other, same, fine in pool.on_grid({"row": 2}, scaled, 2.0**24):
        assert fine and same in (scale / 2, scale, scale * 2), "ranks sum fewer tokens each"
        # a skipped step repeats its loss
        made, wanted = list(dict.fromkeys(other)), list(dict.fromkeys(losses))
        count = min(len(made), len(wanted))
        assert count > 4 and made[:count] == pytest.approx(wanted[:count], abs=2e-2)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_schedules_rise_stay_and_fall(kind: str) -> None:
    rates = [
        lr_factor(step, kind=kind, steps=100, warmup=10, cooldown=0.2, floor=0.1)  # type: ignore[arg-type]
        for step in range(101)
    ]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == 1.0 and rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    if kind == "wsd":
        assert rates[10:82] == pytest.approx([1.0] * 72) and rates[91] == pytest.approx(0.55)


class Idle(torch.nn.Module):
    """One of its layers is never used."""

    dims = {"used": ("mlp", "embed"), "idle": ("mlp", "embed")}

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"embed": 4, "mlp": 6}
        self.used, self.idle = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)


def unused(grid: Grid) -> tuple[float, bool]:
    """The norm of a step, and whether the idle layer has moved."""
    torch.manual_seed(0)
    model = parallelize(Idle().double(), grid)
    optimizer = Optimizer(model.parallel.bucket_scheduler, lr=1e-2, decay=0.0)  # type: ignore[arg-type]
    before = model.idle.weight.detach().clone()
    model.parallel.bucket_scheduler.begin_step("train")  # type: ignore[union-attr]
    x = torch.ones(1, 2, 4, dtype=torch.float64)
    model.used(x).sum().backward()
    return optimizer.step().item(), torch.equal(model.idle.weight, before)


def test_a_layer_that_is_not_used_has_no_gradient(pool: Pool) -> None:
    ((norm, still),) = pool.on_grid({}, unused)
    assert norm > 0.0 and still
    for other, idle in pool.on_grid({"data": 2}, unused):
        assert other == pytest.approx(2 * norm) and idle

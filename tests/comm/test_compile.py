"""Compiled without a break, forward and backward, on two ranks: numbers and events as in eager.

The axis runs against the order of the ranks, which functional collectives do not know of.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import gradients
from pool import Pool
from ranvier.comm import autograd, collectives
from ranvier.grid import Axis, Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.parallel.parallelize import parallelize
from ranvier.trace import communication_events, diff_events

pytestmark = pytest.mark.compiled
SEND = [[1, 2], [3, 0]]
"""Rows of a ragged exchange."""
LAST = [0, 3]
"""Rows of a gather to which the first rank adds nothing."""


def strict() -> None:
    """Warnings are errors here too, but for what the compiler uses that is going out of use."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    # scripts/other_torch.sh runs tests with newer versions.
    warnings.filterwarnings("ignore", message=".*the newest version that Ranvier is tested with")
    # It stays so in this worker: later tests may multiply in bf16 on a CPU that cannot.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")
    with contextlib.suppress(ImportError):  # the compiler's progress bar: no lock of processes
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


def all_pairs(x: Tensor, w: Tensor, axis: Axis) -> Tensor:
    """Every pair once, with arithmetic between them; x: `[3, n, 6]`."""
    h = autograd.all_gather(x, axis, 1) @ w  # (3, 2n, 6)
    y = autograd.reduce_scatter(h.tanh(), axis, 1)  # (3, n, 6)
    mean = autograd.copy_to_axis(autograd.reduce_from_axis(y.mean(), axis), axis)
    y = autograd.gather_from_axis(autograd.scatter_to_axis(y, axis, -1).sin(), axis, -1)
    z = autograd.all_to_all(y, axis, SEND[axis.index], [row[axis.index] for row in SEND])
    rows = [sum(row[to] for row in SEND) for to in range(axis.size)]
    z = autograd.all_gather(z, axis, 0, counts=rows).cos()  # (6, n, 6)
    z = autograd.reduce_scatter(z, axis, 0, counts=rows)
    some = autograd.all_gather(x[: LAST[axis.index]], axis, 0, counts=LAST)  # (3, n, 6)
    z = z * some.square().mean()
    z = autograd.all_to_all(autograd.all_gather(z.sum(0, keepdim=True), axis, 0), axis) * mean
    return z.square().sum()


def bare_verbs(x: Tensor, w: Tensor, axis: Axis) -> Tensor:
    """What leaves use outside autograd."""
    peak = collectives.all_reduce(x.detach(), axis, "max").wait()
    first, last = (collectives.broadcast(w.detach(), axis, index=index).wait() for index in (0, 1))
    return ((x - peak) @ (w + 2 * first + 3 * last)).sum()


def call(
    function: Callable[..., Tensor], axis: Axis, tokens: int, seed: int = 0
) -> tuple[float, list[Tensor], list[Any]]:
    """Loss, gradients and events of one forward and backward pass."""
    generator = torch.Generator().manual_seed(10 * axis.index + seed)
    x = torch.randn(3, tokens, 6, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(6, 6, dtype=torch.float64, generator=generator).requires_grad_()
    with axis.trace.record_events() as events:
        loss = function(x, w, axis)
        loss.backward()
    assert x.grad is not None and w.grad is not None
    return loss.item(), [x.grad, w.grad], events


def against_eager(grid: Grid, backend: str, name: str) -> list[str]:
    """A first call, one that uses the graph again, one with another shape (then it is dynamic)."""
    strict()
    torch._dynamo.reset()
    mixed = Grid(grid.degrees, rank=grid.rank, order=[1, 0], connected=True, groups=grid.groups)
    axis = mixed.axis("row")
    eager, lines = globals()[name], list[str]()
    compiled = torch.compile(eager, fullgraph=True, backend=backend)
    for turn, (tokens, seed) in enumerate([(4, 0), (4, 1), (8, 2)]):
        loss, grads, recorded = call(compiled, axis, tokens, seed)
        want, wanted, expected = call(eager, axis, tokens, seed)
        errors = [abs(loss - want)]
        errors += [(a - b).abs().max().item() for a, b in zip(grads, wanted, strict=True)]
        if not max(errors) <= 1e-12 * abs(want):
            lines.append(f"turn {turn}: {errors}")
        if turn == 0:
            lines += diff_events(expected, recorded)
        elif turn == 1 and recorded:
            lines.append(f"traced again: {recorded}")
        lines += [f"{event} has a time" for event in recorded if event.issue_time is not None]
    return lines


@pytest.mark.full
def test_pairs_compile_without_a_break(pool: Pool) -> None:
    assert pool.on_grid({"row": 2}, against_eager, "aot_eager", "all_pairs") == [[], []]


@pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler"
)
@pytest.mark.full
def test_pairs_compile_to_machine_code(pool: Pool) -> None:
    assert pool.on_grid({"row": 2}, against_eager, "inductor", "bare_verbs") == [[], []]


def decoder(grid: Grid) -> tuple[list[str], list[str]]:
    """Loss and gradients of a compiled decoder against the eager one, and events that differ."""
    strict()
    config = DecoderConfig(layers=1, embed=8, heads=2, kv_heads=1, head_dim=4, mlp=8, vocab=13)
    tokens = torch.randint(0, 13, (2, 4), generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = parallelize(Decoder(config).double(), grid)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        model.parallel.bucket_scheduler.begin_step("train")  # type: ignore[union-attr]
        with grid.trace.record_events() as events:
            loss = run(tokens, tokens.roll(1, 1))
            loss.backward()
        state = gradients(model.parallel)  # type: ignore[arg-type]
        found.append((loss.item(), state, communication_events(events)))
    (want, wanted, expected), (have, grads, recorded) = found
    lines = [] if abs(have - want) <= 1e-12 * want else [f"loss {have} instead of {want}"]
    for name, (grad, place) in wanted.items():
        error = (grads[name][0] - grad).abs().max().item()
        if not error <= 1e-12 * grad.abs().max() or grads[name][1] != place:
            lines.append(f"gradient of {name} differs by {error}")
    return lines, diff_events(expected, recorded)


@pytest.mark.full
def test_decoder_compiles_without_a_break(pool: Pool) -> None:
    """The compiled graph keeps the gathered input of a layer, eager backward gathers it again."""
    size = 2 * 4 * 8 * 8
    again = ("blocks.0.attention.qkv", "blocks.0.mlp.enter")
    for lines, events in pool.on_grid({"row": 2}, decoder):
        assert lines == []
        assert events == [
            f"all_gather over row of {size} bytes at {where}: predicted 2, recorded 1"
            for where in again
        ]

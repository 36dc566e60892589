"""Activations on the host: no bit changes, and the bytes are where they are said to be."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor

from equivalence import Case, batch_of, gradients, micros_of
from grids import label
from nn.test_compile_blocks import fresh
from offload_cases import ALONE, ON_GRID, activations, bytes_of, passes, stored
from pool import Pool as Workers
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.memory.activation_offload import ActivationOffload
from ranvier.memory.host import HostBufferPool
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.memory import usage
from ranvier.train.step import forward_backward

FULL = [
    ({"depth": 2, "row": 2, "col": 2}, Case("gemma2", micro_batches=2), [*ALONE, *ON_GRID]),
    ({"row": 2, "col": 2}, Case("adapted"), [*ALONE, *ON_GRID]),
    ({"pipe": 2}, Case("deep", micro_batches=4, chunks=3), ALONE),
    ({"pipe": 2, "col": 2}, Case("deep", micro_batches=4), ON_GRID),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "case", "ways"),
    [
        ({}, Case("four", packed=True), ALONE),
        ({"pipe": 2, "row": 2}, Case("four", micro_batches=2), ON_GRID[1:]),
        *(pytest.param(*one, marks=pytest.mark.full) for one in FULL),
    ],
    ids=lambda one: getattr(one, "label", "") or (label(one) if isinstance(one, dict) else "ways"),
)
def test_no_bit_changes(
    pool: Workers, degrees: dict[str, int], case: Case, ways: list[str]
) -> None:
    for lines, went in pool.on_grid(degrees, passes, case, ways):
        assert lines == []
        for none, some, every in zip(*[iter(went)] * 3, strict=True):
            assert none == (0, 0) and 0 < some[0] < every[0]
            assert some[1] == every[1] == 0, "all of it came back, or is gone"


# ---- blocks of one operation ------------------------------------------------------------


def squares(store: ActivationOffload, x: Tensor, count: int) -> Tensor:
    """x to the power of 2 to the power of `count`; each block keeps its input."""
    for i in range(count):
        with store.block_context(f"blocks.{i}"):
            x = x * x
    return x


def names(count: int) -> list[str]:
    return [f"blocks.{i}" for i in range(count)]


@pytest.mark.parametrize(
    ("share", "want"),
    [
        (0.25, [0, 0, 0, 1, 0, 0, 0, 1, 0]),
        (0.5, [0, 1, 0, 1, 0, 1, 0, 1, 0]),
        (0.8, [0, 1, 1, 1, 1, 1, 1, 1, 0]),
        (1.0, [1, 1, 1, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_a_share_is_spread_over_the_blocks(share: float, want: list[int]) -> None:
    """The last one is due at once."""
    store = activations(share, names(9), last="blocks.8")
    x, went = torch.full((2,), 1.01, dtype=torch.float64, requires_grad=True), []
    y: Tensor = x
    for i in range(9):
        before = store.offloaded_bytes
        with store.block_context(f"blocks.{i}"):
            y = y * y
        went.append((store.offloaded_bytes - before) // 16)
    assert went == want
    device, host = store.saved_bytes()
    assert (device, host) == (16 * (9 - sum(want)), 16 * sum(want))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([512 * 1.01**511] * 2, rel=1e-12)
    assert store.saved_bytes() == (0, 0)


def test_shares_are_of_bytes() -> None:
    """A large tensor counts for as many small ones as it has bytes."""
    store, drawn = activations(0.5, names(200)), torch.Generator().manual_seed(1)
    results, kept = [], 0
    for i, size in enumerate(torch.randint(1, 64, (200,), generator=drawn).tolist()):
        with store.block_context(f"blocks.{i}"):
            results.append(torch.ones(size, requires_grad=True).sin())
        kept += 4 * size
    assert abs(store.offloaded_bytes - kept / 2) <= 4 * 64


def test_a_storage_goes_once_and_comes_once() -> None:
    """Whatever views of it are saved, and in how many blocks."""
    store = activations(1.0, names(3), last="blocks.2")
    whole = torch.randn(3, 8, dtype=torch.float64)
    x = whole.clone().requires_grad_()
    y = torch.zeros(8, dtype=torch.float64)
    with store.block_context("blocks.0"):
        shared = x * 2.0
        q, k, v = shared.unbind(0)
        y = y + (q * k + k * v).sin() * k
    with store.block_context("blocks.1"):
        y = y + q * v
    with store.block_context("blocks.2"):
        y = y * y
    sin = 8 * 8
    assert store.offloaded_bytes == 3 * 8 * 8 + 2 * sin, (
        "all three, the argument of sin, and its value"
    )
    y.sum().backward()
    plain = whole.clone().requires_grad_()
    q, k, v = (plain * 2.0).unbind(0)
    ((q * k + k * v).sin() * k + q * v).square().sum().backward()
    assert x.grad is not None and plain.grad is not None and torch.equal(x.grad, plain.grad)


def test_weights_and_small_tensors_stay() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    store = activations(1.0, names(2), weights=lambda: [weight], small=100, last="blocks.1")
    x = torch.randn(4, 8, requires_grad=True)
    with store.block_context("blocks.0"):
        y = (x @ weight[:4].T) @ weight[4:].T.view(8, 4).T  # views of it, too
        y = y.exp() * torch.ones(3).exp().sum()
    with store.block_context("blocks.1"):
        y = y.sin()
    assert store.offloaded_bytes == 2 * x.nbytes, "x, and the result of exp; nothing of fewer bytes"
    y.sum().backward()


def test_what_is_written_to_is_refused_as_torch_does() -> None:
    store = activations(1.0, names(2), last="blocks.1")
    x = torch.randn(4, requires_grad=True)
    with store.block_context("blocks.0"):
        y = x.exp()
        z = y * y
        y.add_(1.0)
    assert store.offloaded_bytes == 0
    with pytest.raises(RuntimeError, match="modified 1 times before backward"):
        z.sum().backward()


def test_copies_come_one_block_ahead() -> None:
    store, order = activations(1.0, names(5), last="blocks.4"), list[str]()
    x = torch.full((4,), 1.01, requires_grad=True)
    y: Tensor = x
    for i in range(5):
        with store.block_context(f"blocks.{i}"):
            y = y * y
            y.register_hook(lambda grad, i=i: order.append(f"{i} {store.saved_bytes()[1] // 16}"))
    assert store.saved_bytes() == (16, 64), "what went leaves when the next block has run"
    y.sum().backward()
    # before a block computes, all but its own and that of the block before it is on the host
    assert order == ["4 4", "3 3", "2 2", "1 1", "0 0"]


def test_memory_of_a_pass_that_is_dropped_is_given_back() -> None:
    pool = HostBufferPool(bytes_of, room=2**20)
    store = activations(1.0, names(4), pool=pool, last="blocks.3")
    for _ in range(3):
        squares(store, torch.ones(4, requires_grad=True), 4)
        assert store.saved_bytes() == (0, 0)
    assert pool.total_bytes == 3 * 256, "buffers are used again"


def test_buffers_become_one_arena() -> None:
    made: list[weakref.ref[Tensor]] = []

    def arena(size: int) -> Tensor:
        whole = bytes_of(size)
        made.append(weakref.ref(whole))
        return whole

    pool = HostBufferPool(arena, room=3 * 1024)
    first = [pool.take_buffer(size)[0] for size in (1000, 300, 1000)]
    with pytest.raises(PlanError, match=r"need 3\.1e-06 GiB of host memory .* smaller memory\.act"):
        pool.take_buffer(600)
    pool.merge_buffers()
    assert len(made) == 3, "not while they are used"
    for buffer in first:
        pool.return_buffer(buffer, None)
    del first, buffer
    pool.merge_buffers()
    assert pool.total_bytes == 1024 + 512 + 1024 and len(made) == 4
    again = [pool.take_buffer(size)[0] for size in (300, 1000, 1000)]
    assert len({x.untyped_storage().data_ptr() for x in again}) == 1
    assert [x.numel() for x in again] == [300, 1000, 1000]
    ranges = sorted((x.storage_offset(), x.storage_offset() + x.numel()) for x in again)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("share", [-1.0, 1.5])
def test_a_share_is_settled_before(share: float) -> None:
    with pytest.raises(PlanError, match=r"fraction between 0 and 1\. .* replaces -1 before"):
        activations(share, names(2))


# ---- memory -----------------------------------------------------------------------------


def test_the_peak_falls() -> None:
    """What goes is away when the loss is computed, but for the block before the last."""
    peaks, kept = [], []
    batch = batch_of("deep", samples=16, packed=False)
    for share in (0.0, 0.5, 1.0):
        model = Case("deep").on(Grid({}))
        store = stored(model, share)
        for _ in range(2):
            get_parallel_model(model).bucket_scheduler.begin_step("")
            watch = usage.HostMemoryCounter(
                [bucket.data for bucket in get_parallel_model(model).bucket_scheduler.buckets]
            )
            with watch:
                loss = model(batch.tokens, batch.targets)
                kept.append((watch.live_bytes(), store.saved_bytes()))
                loss.backward()
                peaks.append(watch.peak_bytes())
            del loss
    (all_, _), (half, (here, there)), (least, (stays, away)) = kept[1::2]
    assert all_ - half == there and all_ - least == away, "what went is not here"
    assert here + there == stays + away
    assert there / (here + there) == pytest.approx(0.5, abs=0.02)
    assert away / (stays + away) > 0.8, "of six blocks five"
    assert peaks[1] > 1.2 * peaks[3] > 1.4 * peaks[5]


@pytest.mark.compiled
@pytest.mark.full
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_what_graphs_keep_goes_as_well(kind: str) -> None:
    fresh()
    batch, found = batch_of("four", samples=8, packed=False), []
    micros = [one.to("cpu") for one in micros_of(batch, Grid({}), 1)]
    for share in (0.0, 1.0):
        model = Case("four", recompute=kind).on(Grid({}), compiled="aot_eager")
        store = stored(model, share)
        for _ in range(2):
            loss = forward_backward(model, micros)
            grads = {name: grad for name, (grad, _) in gradients(get_parallel_model(model)).items()}
        found.append({"loss": loss, **grads})
    assert store.offloaded_bytes > 0 and store.saved_bytes() == (0, 0)
    assert all(torch.equal(found[1][name], want) for name, want in found[0].items())


@pytest.mark.full
def test_offloaded_activations_with_context(pool: Workers) -> None:
    """No bit changes if activations wait on the host, and all of them come back."""
    case = Case("four", packed=True)
    ways = ["none rerun", "selective save", "full rerun"]
    for lines, went in pool.on_grid({"context": 2}, passes, case, ways):
        assert lines == []
        assert all(rest == 0 for _, rest in went) and went[2][0] > went[1][0] > went[0][0] == 0

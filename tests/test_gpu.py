"""On a GPU: two ranks that share it over Gloo equal one rank, and every verb runs on NCCL."""

from __future__ import annotations

import gc
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import SMALL_OPTIONS, call
from commands import losses as losses_of
from equivalence import batch_of, gradients
from pool import Pool
from ranvier.checkpoint import directory as folders
from ranvier.checkpoint.load import load_full_tensors
from ranvier.comm import autograd, collectives
from ranvier.config.plan import Plan
from ranvier.data.loader import Loader
from ranvier.grid import Axis, Grid
from ranvier.models import EXAMPLES, DecoderConfig, decoder
from ranvier.models.document_attention import (
    Documents,
    can_use_flash_kernel,
    document_attention,
    packed_attention,
)
from ranvier.nn import attention_backends, cross_entropy, float8
from ranvier.optim import adamw, fused_adamw
from ranvier.optim.grad_norm import GradNormAccumulator
from ranvier.optim.low_precision_states import (
    BLOCK_SIZE,
    MomentKind,
    MomentName,
    Moments,
    RoundingKey,
    dequantize_moment,
    quantize_moment,
)
from ranvier.parallel.parallelize import parallelize
from ranvier.planner import device_rates
from ranvier.sharding import Shard
from ranvier.trace import COMPUTE
from ranvier.train.memory import resolve
from ranvier.train.step import forward_backward
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def losses(
    grid: Grid, corpus: str, dtype: str, recompute: str = "none"
) -> tuple[list[float], list[str]]:
    """Losses of a few steps on the GPU, and what was communicated and hidden."""
    run = run_of("", dict(grid.degrees), STEPS, train__dtype=dtype, plan__recompute=recompute)
    trainer = trainer_of(grid, corpus, run, device="cuda")
    with grid.trace.record_events() as events:
        rows = list(trainer.run_steps())
    words = []
    for event in events:
        if event.op != COMPUTE:
            assert (
                event.issue_time <= event.wait_time <= event.resume_time
                and event.exposed_seconds >= 0.0
            )  # type: ignore[operator]
            words.append(f"{event.op} {event.axis}")
    assert all(row["peak_memory_bytes"] > 0 for row in rows)
    return [row["loss"] for row in rows], words


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "degrees", [{"row": 2}, {"depth": 2}, {"col": 2}, {"data": 2}, {"pipe": 2}], ids=str
)
def test_two_ranks_share_one_gpu(
    pool: Pool, corpus: str, degrees: dict[str, int], dtype: str
) -> None:
    ((one, silent),) = pool.on_grid({}, losses, corpus, dtype)
    results = pool.on_grid(degrees, losses, corpus, dtype)
    assert silent == []
    for found, words in results:
        assert words
        limit = 1e-4 if dtype == "fp32" else 3e-2
        assert found == pytest.approx(one, abs=limit)
    assert results[0][0] == results[1][0]


def test_recomputation_on_the_gpu(pool: Pool, corpus: str) -> None:
    ((one, _),) = pool.on_grid({}, losses, corpus, "fp32")
    for found, _ in pool.on_grid({"depth": 2}, losses, corpus, "fp32", "full"):
        assert found == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_kernel_for_documents_equals_its_twin(dtype: torch.dtype, kv_heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(2 * 300, heads, 64) for heads in (8, kv_heads, kv_heads)]
    inputs = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    ids = (torch.rand(2, 300) < 0.03).cumsum(1)
    documents = Documents.from_ids(ids, "cuda")
    assert can_use_flash_kernel(inputs[0]) and not can_use_flash_kernel(inputs[0].float())
    results = []
    for wide in (False, True):
        mine = [(x.float() if wide else x.clone()).requires_grad_() for x in inputs]
        q, k, v = mine[0], *torch.cat(mine[1:], 1).split(kv_heads, 1)  # packed, as k and v are
        y = (
            packed_attention(q, k, v, documents.cu_seqlens)
            if wide
            else document_attention(q, k, v, documents)
        )
        y.float().square().sum().backward()
        results.append([y, *(x.grad for x in mine)])
    for ours, twin in zip(*results, strict=True):
        assert twin is not None and ours is not None
        error = (ours.float() - twin).abs().max() / twin.abs().max()
        assert error < 2e-2, error


@pytest.mark.parametrize("window", [2, 5, 64])
def test_the_kernel_sees_a_window_as_its_twin(window: int) -> None:
    """Whole samples and documents."""
    torch.manual_seed(0)
    shape = DecoderConfig(heads=8, kv_heads=2, head_dim=32, sliding_window=window)
    core = decoder.AttentionCore(shape).cuda()
    q = torch.randn(3, 96, 8, 32, device="cuda")
    k, v = (torch.randn(3, 96, 2, 32, device="cuda") for _ in range(2))
    cuts = Documents.from_lengths(((40, 56), (96,), (1, 5, 90)), "cuda")
    for documents in (None, cuts):
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            y = core(*inputs, None, documents)
            grads = torch.autograd.grad(y.float().square().sum(), inputs)
            results.append([y, *grads])
        for want, have in zip(*results, strict=True):
            error = (have.double() - want).abs().max() / want.abs().max()
            assert error < 3e-2, (window, documents is None, error)
    assert can_use_flash_kernel(q.bfloat16()) and not can_use_flash_kernel(q.bfloat16(), 5.0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_shapes_of_families_compile(name: str) -> None:
    """Caps, windows, shifted norms and norms over all heads, as compiled blocks in bf16."""
    losses = []
    for dtype, compiled in ((torch.float64, ""), (torch.bfloat16, "inductor")):
        torch.manual_seed(0)
        model = EXAMPLES[name]().to(dtype).cuda()
        tokens = torch.randint(0, 29, (4, 16), generator=torch.Generator().manual_seed(1)).cuda()
        plan = Plan(compile="on" if compiled else "off")
        model = parallelize(model, Grid({}), plan, device="cuda")
        loss = model(tokens, tokens)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)


def test_the_host_does_not_wait_for_the_device(corpus: str) -> None:
    """A step is issued without one synchronization."""
    run = run_of("", {}, 6, train__dtype="bf16", model__head_dim=8)
    trainer = trainer_of(Grid({}), corpus, run, device="cuda")
    with Loader(trainer._batch_maker()) as loader:
        for _ in range(3):  # documents are cut in one of them: the kernel has run
            trainer.issue_step(loader)
        with warnings.catch_warnings(action="ignore"):  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            under = trainer.issue_step(loader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.read_step(under, None)["loss"] > 0


class OneRank(int):
    """The size of an axis of one rank that does not equal 1, so that collectives are issued."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 1


def nccl_axis() -> Axis:
    """An axis of this rank alone with an NCCL group, over which collectives are issued."""
    from torch import distributed

    grid = Grid({}, connected=True)
    axis = grid.axis()
    ranks = list(axis.ranks)
    group = distributed.new_group(ranks, backend="nccl", use_local_synchronization=True)
    assert isinstance(group, distributed.ProcessGroup), ranks
    # A grid makes no group for one rank, but connects the group as it does those of several.
    rules, runner = grid._connect_algorithms(("row",), ranks, axis.shape, "", group)
    return replace(axis, names=("row",), size=OneRank(1), group=group, rules=rules, runner=runner)


def on_nccl(_: int) -> list[str]:
    """What is wrong after each verb and each pair, forward and backward, on one NCCL rank."""
    torch.cuda.set_device(0)
    axis, x = nccl_axis(), torch.arange(24.0, device="cuda").view(4, 6)
    bad = []
    with_counts = collectives.all_to_all(x, axis, [4], [4]), collectives.all_to_all(x, axis)
    pending = {
        "all_gather": collectives.all_gather(x, axis, 1),
        "reduce_scatter": collectives.reduce_scatter(x, axis, 0),
        "all_reduce": collectives.all_reduce(x, axis),
        "maximum": collectives.all_reduce(x, axis, "max"),
        "ragged all_to_all": with_counts[0],
        "all_to_all": with_counts[1],
        "broadcast": collectives.broadcast(x, axis),
    }
    bad += [name for name, one in pending.items() if not torch.equal(one.wait(), x)]
    functions: dict[str, Any] = {
        "gather": lambda t: autograd.all_gather(t, axis, 1),
        "sum_scatter": lambda t: autograd.reduce_scatter(t, axis, 0),
        "share": lambda t: autograd.copy_to_axis(t, axis),
        "total": lambda t: autograd.reduce_from_axis(t, axis),
        "split": lambda t: autograd.scatter_to_axis(t, axis, 0),
        "join": lambda t: autograd.gather_from_axis(t, axis, 0),
        "swap": lambda t: autograd.all_to_all(t, axis),
    }
    for name, function in functions.items():
        leaf: Tensor = x.clone().requires_grad_()
        function(leaf).mul(3.0).sum().backward()
        if leaf.grad is None or not torch.equal(leaf.grad, torch.full_like(x, 3.0)):
            bad.append(f"backward of {name}")
    return bad


def test_every_verb_runs_on_nccl(pool: Pool) -> None:
    assert pool.run(on_nccl, 1) == [[]]


State = tuple[Tensor, Tensor, Moments]
"""Weight, gradient, moments."""
FLAT = RoundingKey.for_weight("w", Shard((1 << 40,), (0,), (1 << 40,), (1 << 40,)))
KEYS = {
    "flat": FLAT,
    "odd": FLAT.at_offset(7),
    "far": FLAT.at_offset((1 << 32) - 1000),
    "columns": RoundingKey(1 << 40, (9000, 1111), (700, 555), (1 << 20, 1 << 14), 12345),
    "experts": RoundingKey(5, (300, 40, 111), (3, 40, 222), (900, 1 << 15, 333), 4321),
    "narrow": RoundingKey(5, (600_000, 2, 1), (3, 1, 4), (1 << 23, 3, 999), 17),
}


def updated(
    kernel: bool, state: State, out: Tensor | None, *, key: RoundingKey = FLAT, good: bool = True
) -> list[Tensor]:
    """Copies of weight, moments and working weights after an update by the kernel or its twin."""
    step = torch.full((), 3.0, dtype=torch.float64, device="cuda")
    now = fused_adamw.UpdateScalars.for_update(
        step, step > (0 if good else 9), step.float() / 8, (0.9, 0.95), 1e-3
    )
    weight, grad, moments = state
    weight, grad, *held = (again(x) for x in (weight, grad, *moments.tensors))
    moments, out = Moments(*held), None if out is None else out.clone()
    assert fused_adamw.can_use_kernel(weight, grad, moments, out, key)
    update = fused_adamw.fused_adamw if kernel else adamw.adamw_update
    update(weight, grad, moments, now=now, decay=0.1, share=0.5, out=out, key=key)
    return [weight, *moments.tensors, *([] if out is None else [out])]


def again(x: Tensor) -> Tensor:
    """A copy that lies in its 16 bytes, and its rows apart, as the tensor does."""
    base = x if x._base is None else x._base
    return base.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def drawn(count: int, grads: torch.dtype, kind: MomentKind, start: int = 0) -> State:
    """Tensors that begin at an element `start` of others; scales that have more behind them."""
    draw = torch.Generator("cuda").manual_seed(1)
    weight, grad, mean, square = torch.randn(4, count, device="cuda", generator=draw)
    square = square.abs() + 0.01  # so that no small root makes a large update of the rounding
    scales = None
    if kind == "int8":
        (mean, first), (square, second) = (
            quantize_moment(mean, "mean"),
            quantize_moment(square, "square"),
        )
        scales = torch.nn.functional.pad(torch.stack([first, second]), (0, 3))[:, :-3]
    else:
        narrow = torch.bfloat16 if kind == "bf16" else torch.float32
        mean, square = mean.to(narrow), square.to(narrow)
    weight, grad, mean, square = (
        torch.nn.functional.pad(x, (start, 0))[start:]
        for x in (weight, grad.to(grads), mean, square)
    )
    return weight, grad, Moments(mean, square, scales)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("count", [1 << 20, 1_000_003, 5])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_fused_update_equals_its_twin(grads: torch.dtype, count: int, start: int) -> None:
    for out in (None, torch.zeros(count, dtype=torch.bfloat16, device="cuda")):
        state = drawn(count, grads, "master", start)
        pairs = zip(updated(True, state, out), updated(False, state, out), strict=True)
        for ours, twin in list(pairs)[:3]:
            assert torch.allclose(ours, twin, rtol=1e-6, atol=1e-7)
    ours = updated(True, state, out)
    assert torch.equal(ours[3], ours[0].bfloat16())


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_fused_narrow_moments_round_like_the_twin(kind: MomentKind, name: str, start: int) -> None:
    state = drawn(1_000_003, torch.bfloat16, kind, start)
    ours, twin = (updated(kernel, state, None, key=KEYS[name]) for kernel in (True, False))
    assert torch.allclose(ours[0], twin[0], rtol=1e-6, atol=1e-7)
    if kind == "int8":
        assert torch.allclose(ours[3], twin[3], rtol=1e-6)
    types = [torch.int16, torch.int16] if kind == "bf16" else [torch.int8, torch.uint8]
    for mine, other, narrow in zip(ours[1:3], twin[1:3], types, strict=True):
        off = (mine.view(narrow).int() - other.view(narrow).int()).abs()
        if kind == "bf16":
            off = off[other.abs() > 1e-6]  # what cancels leaves nothing but rounding
        assert off.max() <= 1 and (off > 0).float().mean() < 1e-4
    other = updated(True, state, None, key=KEYS[name].at_offset(1))
    assert (other[1] != ours[1]).float().mean() > 0.1, "the control: the place counts"


def test_fused_codes_are_those_of_the_twin_at_the_edges() -> None:
    """Blocks of zeros, of tiny and of large numbers, and one that is not full."""
    scale = torch.logspace(-42, 15, 58, device="cuda")
    draw = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(59, BLOCK_SIZE, device="cuda", generator=draw)
    grad[1:] *= scale[:, None]
    grad[0] = 0.0
    grad = grad.view(-1)[: 59 * BLOCK_SIZE - 77].clone()
    moments = Moments.zeros(grad.numel(), "int8", torch.float32, "cuda")
    state = torch.zeros_like(grad), grad, moments
    ours, twin = (updated(kernel, state, None) for kernel in (True, False))
    assert torch.allclose(ours[3], twin[3], rtol=1e-6, atol=0.0)
    for mine, other in zip(ours[1:3], twin[1:3], strict=True):
        assert (mine != other).float().mean() < 1e-3
    which: MomentName
    for row, which in enumerate(("mean", "square")):
        codes, scales = quantize_moment(
            dequantize_moment(ours[1 + row], ours[3][row], which), which
        )
        assert torch.equal(codes, ours[1 + row]) and torch.equal(scales, ours[3][row])
    assert bool((ours[2][grad.abs() > 1e-17] > 0).all()), "no square becomes zero"


@pytest.mark.parametrize("kind", ["master", "bf16", "int8"])
def test_a_fused_update_that_is_not_good_changes_no_bit(kind: MomentKind) -> None:
    weight, grad, moments = drawn(10_007, torch.bfloat16, kind)
    grad[::3] = torch.nan
    out = torch.full((10_007,), 3.0, dtype=torch.bfloat16, device="cuda")
    after = updated(True, (weight, grad, moments), out, good=False)
    for before, same in zip((weight, *moments.tensors, out), after, strict=True):
        assert torch.equal(before, same)


def test_sizes_make_no_other_kernel() -> None:
    """Places are numbers that a kernel is told, and not compiled for."""
    updated(
        True,
        drawn(4096, torch.bfloat16, "bf16"),
        None,
        key=RoundingKey(1, (64, 64), (0, 3), (64, 99)),
    )
    built = fused_adamw._adamw_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(built)
    for columns in (1, 16, 17, 4096):
        key = RoundingKey(
            columns, (1 << 13, columns), (1, columns), (1 << 14, 3 << 20), columns - 1
        )
        updated(True, drawn(4096, torch.bfloat16, "bf16"), None, key=key)
    assert len(built) == before


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_the_fused_update_counts_beyond_32_bits(kind: MomentKind) -> None:
    count, tail = (1 << 31) + 5003, 5003 + (1 << 16)
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free device memory")
    weight = torch.full((count,), 0.75, device="cuda")
    grad = torch.full((count,), 0.75, dtype=torch.bfloat16, device="cuda")
    grad[-tail:] -= 0.25
    whole = weight, grad, Moments.zeros(count, kind, torch.float32, "cuda")
    end = weight[-tail:], grad[-tail:], Moments.zeros(tail, kind, torch.float32, "cuda")
    want = updated(True, end, None, key=FLAT.at_offset(count - tail))
    found = updated(True, whole, None)
    for mine, other, old in zip(found, want, (weight, *whole[2].tensors), strict=True):
        size = other.shape[-1]
        assert torch.equal(mine[..., -size:], other)
        assert bool((mine != old).all()), "all have changed"


def test_squares_are_summed_in_fp32() -> None:
    draw = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(5_000_003, device="cuda", generator=draw)
    tensors = [x[3:], x[:0], x.bfloat16()[1:], x.half()[:7]]
    found = fused_adamw.sum_of_squares(tensors)
    want = sum(part.double().square().sum() for part in tensors)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(float(want), rel=1e-5)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused_adamw.sum_of_squares([x.bfloat16()])
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2 * x.numel(), "no wider copy"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_squares_summed_during_backward_are_those_summed_after_it(
    corpus: str, monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    made: list[int] = []
    begun = GradNormAccumulator.__call__
    monkeypatch.setattr(
        GradNormAccumulator, "__call__", lambda *args: made.append(1) or begun(*args)
    )
    norms = []
    for overlap in (("dw",), ()):
        made.clear()
        settings = {"plan__overlap": overlap, "plan__micro_batch": 8 // micro_batches}
        run = run_of("", {}, 8, train__dtype="bf16", **settings)
        trainer = trainer_of(Grid({}), corpus, run, device="cuda")
        norms.append([row["grad_norm"] for row in trainer.run_steps()])
        assert bool(made) == bool(overlap)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_of_the_loss_equals_its_twin(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Also on a part of the vocabulary with padding behind it, and where tokens do not count."""
    axis = Grid({}).axis("row")
    logits = torch.randn(37, 5000, device="cuda", dtype=dtype)
    targets = torch.randint(0, 9000, (37,), device="cuda")
    targets[3] = cross_entropy.IGNORE_INDEX
    factor = torch.tensor(0.25, device="cuda")
    for mine in (
        cross_entropy.VocabShard(axis, axis, 0, 5000),
        cross_entropy.VocabShard(axis, axis, 2000, 4321),
    ):
        found = []
        for kernel in (True, False):
            monkeypatch.setattr(cross_entropy, "TRITON", kernel)
            assert cross_entropy.can_use_kernel(logits) == kernel
            peak, total, hit = cross_entropy.logit_statistics(logits, targets, mine)
            grad = logits.clone()
            cross_entropy.logits_to_grads_(grad, targets, peak + total.log(), mine, factor)
            found.append([peak, total.log(), hit, grad.float()])
        assert (
            found[0][3][:, mine.valid_columns :].abs().max().item() == 0.0
            if mine.valid_columns < 5000
            else True
        )
        for ours, twin in zip(*found, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-3)
        monkeypatch.setattr(cross_entropy, "TRITON", True)
        if mine.valid_columns == 5000:  # both in one pass
            at_once = logits.clone()
            cross_entropy.logit_statistics(at_once, targets, mine, gradient=factor)
            torch.testing.assert_close(at_once.float(), found[1][3], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("shape", [(64, 128), (37, 50), (300, 1000)], ids=str)
def test_the_cast_to_fp8_equals_its_twin(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 100
    scale = torch.tensor(8.0, device="cuda")
    for dtype in (float8.E4M3, float8.E5M2):
        want = float8._cast_saturated(x, scale, dtype).float()
        plain, turned = float8.cast_transpose_op(x, scale, dtype, True, True)
        assert torch.equal(plain.float(), want) and torch.equal(turned.float(), want.t())
        assert float8.cast_transpose_op(x, scale, dtype, True, False)[1].numel() == 0


@pytest.mark.parametrize("shape", [(1, 1), (37, 50), (3000, 1024)], ids=str)
def test_the_kernel_of_scales_equals_its_twin(shape: tuple[int, int]) -> None:
    from ranvier.nn import triton_kernels  # which needs Triton

    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(shape, device="cuda", dtype=dtype)
        for factor in (1.0, 0.0, 3e-4, 7e20, math.inf, math.nan):
            y = x.clone()
            y[-1, -1] = factor
            for most in (448.0, 57344.0):
                scale, inverse = triton_kernels.tensorwise_scale(y, most, float8.MIN_AMAX)
                want = float8.power_of_two_scale(y.abs().amax().float(), most)
                torch.testing.assert_close(scale, want, rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(inverse, 1.0 / want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("groups", [4, 2], ids=str)
def test_attention_in_32_bits_needs_no_scores(groups: int) -> None:
    sizes = [(2, 256, 4, 64), (2, 256, groups, 64), (2, 256, groups, 64)]
    q, k, v = (torch.randn(n, device="cuda", requires_grad=True) for n in sizes)
    assert attention_backends.supports_inputs(
        "efficient", q, k, v
    ) and not attention_backends.supports_inputs("flash", q, k, v)
    dy, found = torch.randn(sizes[0], device="cuda"), []
    for name in ("auto", "efficient"):
        y = attention_backends.BACKENDS[name](q, k, v)
        found.append([y, *torch.autograd.grad(y, (q, k, v), dy)])
    for twin, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_products_in_fp8_are_those_of_the_cpu(kind: float8.ScalingGranularity) -> None:
    if not float8.supports_device(torch.device("cuda")):
        pytest.skip("the device has no fp8")
    x, w, dy = (torch.randn(n, 64, dtype=torch.bfloat16) for n in (96, 64, 96))
    scaled = float8.Float8Linear(kind)
    for name, a, b in (("forward", x, w), ("grad_x", dy, w), ("grad_w", dy, x)):
        want = getattr(scaled, name)(a, b).float()
        have = getattr(scaled, name)(a.cuda(), b.cuda()).float().cpu()
        assert (have - want).norm() < 5e-3 * want.norm(), name


@pytest.mark.filterwarnings("default")  # those of compilers are not ours
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "olmo2", "gemma2", "dora"])
def test_compiled_blocks_have_every_gradient_of_eager_ones(kind: str) -> None:
    """In float64: losses alone do not show that a small gradient is missing."""
    found = []
    for compiled in ("", "inductor"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = EXAMPLES[kind]().double().cuda()
        model = parallelize(model, Grid({}), Plan(compile="on" if compiled else "off"))
        forward_backward(model, [batch_of(kind, samples=4, packed=True).to("cuda")])
        found.append({name: grad for name, (grad, _) in gradients(model.parallel).items()})
    eager, compiled_grads = found
    assert eager.keys() == compiled_grads.keys()
    for name, grad in eager.items():
        # Softmax does not change with a bias of all keys: its gradient is rounding.
        if name.endswith(".k.bias"):
            continue
        assert grad.norm() > 0, name
        assert (compiled_grads[name] - grad).norm() <= 1e-10 * grad.norm(), name


@pytest.mark.filterwarnings("default")  # those of compilers are not ours
@pytest.mark.parametrize(
    "change",
    [
        {"plan__compile": "on"},
        {"plan__compile": "on", "plan__recompute": "selective"},
        {"plan__compile": "on", "train__float8": "tensorwise"},
        {"plan__cuda_graph": True, "data__document_mask": False},
        {"plan__compile": "on", "plan__cuda_graph": True, "data__document_mask": False},
    ],
    ids=str,
)
def test_the_fast_ways_train_alike(corpus: str, change: dict[str, Any]) -> None:
    """Compiled, recomputed, in fp8 and as one graph: the losses of the plain run."""
    curves = []
    for extra in ({}, change):
        packed = change.get("data__document_mask", True)
        settings = {
            "train__dtype": "bf16",
            "model__head_dim": 16,
            "data__document_mask": packed,
            **extra,
        }
        run = run_of("", {}, 8, **settings)
        trainer = trainer_of(Grid({}), corpus, run, device="cuda")
        curves.append([row["loss"] for row in trainer.run_steps()])
    limit = 0.1 if "train__float8" in change else 0.03
    assert curves[1] == pytest.approx(curves[0], abs=limit)


@pytest.mark.filterwarnings("default")  # those of compilers are not ours
@pytest.mark.parametrize(
    "change",
    [
        ["--plan.compile", "off"],
        ["--plan.compile", "on", "--optim.state-dtype", "bf16"],
        ["--plan.compile", "off", "--train.dtype", "fp32", "--data.document-mask", "False"],
        ["--plan.cuda-graph", "True", "--data.document-mask", "False", "--plan.compile", "off"],
    ],
    ids=str,
)
def test_a_deterministic_run_repeats_itself_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[str]
) -> None:
    """G9 on CUDA: twice the same bits, also for a run that broke in the middle and went on."""
    monkeypatch.chdir(tmp_path)
    words = ["train", *SMALL_OPTIONS, "--nproc", "1", "--train.steps", "6"]
    words += ["--checkpoint.interval", "3"]
    words += ["--model.head-dim", "16", "--train.dtype", "bf16", "--train.deterministic", "True"]
    for name in ("one", "two"):
        assert call(*words, *change, "--train.output-dir", name) == 0
    issue = Trainer.issue_step

    def breaks(self: Trainer, *arguments: Any, **options: Any) -> Any:
        if self.state.step == 5:
            raise RuntimeError("a cable")
        return issue(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "issue_step", breaks)
        assert call(*words, *change, "--train.output-dir", "three") == 70
    assert call("train", "three", "--nproc", "1") == 0
    assert not torch.are_deterministic_algorithms_enabled()
    wanted = load_full_tensors(folders.find_checkpoints(tmp_path / "one" / "checkpoints")[-1])
    for name in ("two", "three"):
        assert losses_of(tmp_path / name) == losses_of(tmp_path / "one"), name
        found = load_full_tensors(folders.find_checkpoints(tmp_path / name / "checkpoints")[-1])
        assert all(torch.equal(x, found[key]) for key, x in wanted.items()), name


MIDDLE: dict[str, Any] = {
    "model__layers": 6,
    "model__embed": 512,
    "model__heads": 8,
    "model__head_dim": 64,
    "model__mlp": 1536,
    "model__vocab": 4096,
    "data__seq_len": 512,
    "data__document_mask": False,
    "train__dtype": "bf16",
}
"""A model whose activations are more than its libraries take."""


@pytest.mark.filterwarnings("default")  # those of compilers are not ours
@pytest.mark.parametrize(
    ("kind", "compiled", "micro"),
    [("none", "off", 8), ("selective", "off", 2), ("full", "off", 4), ("none", "on", 8)],
)
def test_predicted_memory_is_what_torch_counts(
    corpus: str, kind: str, compiled: str, micro: int
) -> None:
    changes = {"plan__recompute": kind, "plan__compile": compiled, "plan__micro_batch": micro}
    trainer = trainer_of(Grid({}), corpus, run_of("", {}, 3, **MIDDLE, **changes), device="cuda")
    optimizer, device = trainer.state.optimizer, trainer.device
    account = resolve.predict_memory(trainer.run, trainer.state.model, optimizer, device, 1)
    steps = trainer.run_steps()
    next(steps)
    torch.cuda.reset_peak_memory_stats()
    list(steps)
    predicted = account.predicted_usage
    assert predicted is not None
    measured = account.measure_usage(optimizer, device)
    assert measured.allocated_bytes == pytest.approx(predicted.allocated_bytes, rel=0.05), measured


@pytest.mark.parametrize(("limit", "left"), [(0.7, 0), (0.4, 0), (0.4, 64)])
def test_a_fit_stays_below_its_limit(corpus: str, limit: float, left: int) -> None:
    """With a device that has no more; what others have left in the process counts, too.

    left: small tensors, each alone in a segment of 2 MiB, in which no large one fits.
    """
    others = [torch.empty(2**19, dtype=torch.uint8, device="cuda") for _ in range(4 * left)]
    others = others[::4]  # the allocator puts four into a segment
    gc.collect()
    torch.cuda.empty_cache()
    limit += torch.cuda.memory_reserved() / 2**30
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit * 2**30 / total)
    try:
        changes = {**MIDDLE, "memory__auto": "auto", "memory__device_limit_gib": limit}
        trainer = trainer_of(Grid({}), corpus, run_of("", {}, 3, **changes), device="cuda")
        rows = list(trainer.run_steps())
        assert sum("chosen again" in note for note in trainer.notes) <= 1, trainer.notes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(rows) == 3 and all(row["peak_memory_bytes"] <= limit * 2**30 for row in rows)
    found = device_rates.measure_rates(trainer.device, torch.bfloat16)
    assert found.flops > 1e13 and found.memory > 1e11 and found.to_device > 1e9 < found.to_host

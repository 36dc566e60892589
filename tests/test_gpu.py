"""On a GPU: two ranks that share it over Gloo equal one rank, and every verb runs on NCCL."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import Pool
from ranvier.comm import pairs, verbs
from ranvier.data.loader import Loader
from ranvier.grid import Axis, Grid
from ranvier.models.decoder import Documents, kernel_takes, packed, packed_kernel
from ranvier.trace import COMPUTE
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
    with grid.trace.recording() as events:
        rows = list(trainer.steps())
    words = []
    for event in events:
        if event.op != COMPUTE:
            assert event.issued <= event.waited <= event.resumed and event.exposed >= 0.0  # type: ignore[operator]
            words.append(f"{event.op} {event.axis}")
    assert all(row["memory"] > 0 for row in rows)
    return [row["loss"] for row in rows], words


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("degrees", [{"row": 2}, {"depth": 2}, {"col": 2}, {"data": 2}], ids=str)
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
    documents = Documents.of(ids, "cuda")
    assert kernel_takes(inputs[0]) and not kernel_takes(inputs[0].float())
    results = []
    for attend, wide in ((packed_kernel, False), (packed, True)):
        mine = [(x.float() if wide else x.clone()).requires_grad_() for x in inputs]
        y = attend(*mine, documents)
        y.float().square().sum().backward()
        results.append([y, *(x.grad for x in mine)])
    for ours, twin in zip(*results, strict=True):
        assert twin is not None and ours is not None
        error = (ours.float() - twin).abs().max() / twin.abs().max()
        assert error < 2e-2, error


def test_the_host_does_not_wait_for_the_device(corpus: str) -> None:
    """A step is issued without one synchronization."""
    run = run_of("", {}, 6, train__dtype="bf16", model__head_dim=8)
    trainer = trainer_of(Grid({}), corpus, run, device="cuda")
    with Loader(trainer._loaded()) as loader:
        for _ in range(3):  # documents are cut in one of them: the kernel has run
            trainer.issue(loader)
        with warnings.catch_warnings(action="ignore"):  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            under = trainer.issue(loader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.read(under, None)["loss"] > 0


class Some(int):
    """One, but not so that a verb would do nothing for it."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 1


def nccl_axis() -> Axis:
    """An axis of this rank alone with an NCCL group, which the verbs do not skip."""
    from torch import distributed

    rank = distributed.get_rank()
    group = distributed.new_group([rank], backend="nccl", use_local_synchronization=True)
    axis = Grid({}, rank=0).axis()
    return replace(axis, names=("row",), size=Some(1), ranks=(rank,), group=group)


def on_nccl(_: int) -> list[str]:
    """What is wrong after each verb and each pair, forward and backward, on one NCCL rank."""
    torch.cuda.set_device(0)
    axis, x = nccl_axis(), torch.arange(24.0, device="cuda").view(4, 6)
    bad = []
    with_counts = verbs.all_to_all(x, axis, [4], [4]), verbs.all_to_all(x, axis)
    pending = {
        "all_gather": verbs.all_gather(x, axis, 1),
        "reduce_scatter": verbs.reduce_scatter(x, axis, 0),
        "all_reduce": verbs.all_reduce(x, axis),
        "maximum": verbs.all_reduce(x, axis, "max"),
        "ragged all_to_all": with_counts[0],
        "all_to_all": with_counts[1],
        "broadcast": verbs.broadcast(x, axis),
    }
    bad += [name for name, one in pending.items() if not torch.equal(one.wait(), x)]
    functions: dict[str, Any] = {
        "gather": lambda t: pairs.gather(t, axis, 1),
        "sum_scatter": lambda t: pairs.sum_scatter(t, axis, 0),
        "share": lambda t: pairs.share(t, axis),
        "total": lambda t: pairs.total(t, axis),
        "split": lambda t: pairs.split(t, axis, 0),
        "join": lambda t: pairs.join(t, axis, 0),
        "swap": lambda t: pairs.swap(t, axis),
    }
    for name, function in functions.items():
        leaf: Tensor = x.clone().requires_grad_()
        function(leaf).mul(3.0).sum().backward()
        if leaf.grad is None or not torch.equal(leaf.grad, torch.full_like(x, 3.0)):
            bad.append(f"backward of {name}")
    return bad


def test_every_verb_runs_on_nccl(pool: Pool) -> None:
    assert pool.run(on_nccl, 1) == [[]]

"""On a GPU: two ranks that share it over Gloo equal one rank, and every verb runs on NCCL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import Pool
from ranvier.comm import pairs, verbs
from ranvier.grid import Axis, Grid
from ranvier.plan import Plan
from ranvier.run import DataConfig, Run, TrainConfig
from ranvier.trace import COMPUTE
from ranvier.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 4


def losses(grid: Grid, dtype: Any, recompute: Any = "none") -> tuple[list[float], list[str]]:
    """Losses of a few steps of the tiny model on the GPU, and what was communicated and hidden."""
    plan = Plan(**grid.degrees, batch=8, recompute=recompute).resolve(grid.world)
    run = Run(plan=plan, train=TrainConfig(steps=STEPS, dtype=dtype), data=DataConfig(seq=128))
    trainer = Trainer.assemble(run, grid, torch.device("cuda", 0))
    found, words = [], []
    for step in range(STEPS):
        with grid.trace.recording() as events:
            found.append(trainer.step(step)["loss"])
    for event in events:
        if event.op != COMPUTE:
            assert event.issued <= event.waited <= event.resumed and event.exposed >= 0.0  # type: ignore[operator]
            words.append(f"{event.op} {event.axis}")
    return found, words


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("degrees", [{"row": 2}, {"depth": 2}, {"col": 2}, {"data": 2}], ids=str)
def test_two_ranks_share_one_gpu(pool: Pool, degrees: dict[str, int], dtype: str) -> None:
    ((one, silent),) = pool.on_grid({}, losses, dtype)
    results = pool.on_grid(degrees, losses, dtype)
    assert silent == []
    for found, words in results:
        assert words
        limit = 1e-4 if dtype == "fp32" else 3e-2
        assert found == pytest.approx(one, abs=limit)
    assert results[0][0] == results[1][0]


def test_recomputation_on_the_gpu(pool: Pool) -> None:
    ((one, _),) = pool.on_grid({}, losses, "fp32")
    for found, _ in pool.on_grid({"depth": 2}, losses, "fp32", "full"):
        assert found == pytest.approx(one, abs=1e-4)


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

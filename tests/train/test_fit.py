"""Fit: a run with little memory takes the same steps, and what was predicted is what is needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from pool import Pool
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.memory import budget
from ranvier.models import Decoder
from ranvier.parallel import parallel_of
from ranvier.plan import Plan
from ranvier.train import fit
from ranvier.train.fit import GIB, candidates, measured, room
from ranvier.train.step import forward_backward
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of

LAYERS = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def made(corpus: str, grid: Grid | None = None, **plan: Any) -> Trainer:
    grid = grid or Grid({})
    changes = {f"plan__{name}": value for name, value in plan.items()}
    run = run_of("unused", dict(grid.degrees), 3, model__layers=LAYERS, **changes)
    return trainer_of(grid, corpus, run)


def need_of(trainer: Trainer, micro: int) -> budget.Need:
    run = trainer.run
    need = measured(
        run,
        trainer.model,
        trainer.optimizer,
        trainer.device,
        micro,
        accumulated=micro * run.plan.replicas < run.plan.batch,
    )
    assert need is not None
    return need


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.steps()]


def test_blocks_are_recomputed_as_the_memory_asks_and_losses_stay(corpus: str) -> None:
    plain = made(corpus, micro_batch=8)
    need, want = need_of(plain, 8), losses(plain)
    low, high = budget.least(need), need.of(("none",) * LAYERS)
    found = []
    for available in (low, (low + high) // 2, high):
        memory = (available + 0.5) / GIB
        trainer = made(corpus, recompute="budget", memory=memory, micro_batch=8)
        kinds = tuple(parallel_of(trainer.model).kinds.values())
        found.append(budget.share(kinds))  # type: ignore[arg-type]
        (note,) = trainer.notes
        assert "micro-batch 8, recomputation of blocks: " in note
        assert losses(trainer) == pytest.approx(want, rel=1e-12)
        if available == (low + high) // 2:
            assert len(set(kinds)) > 1, kinds
    assert found[0] > found[1] > found[2] == 0.0


@pytest.mark.parametrize("micro", [2, 8])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_prediction_is_what_a_step_needs(corpus: str, kind: budget.Kind, micro: int) -> None:
    trainer = made(corpus, recompute=kind, micro_batch=micro)
    parallel = parallel_of(trainer.model)
    need = need_of(trainer, micro)
    batches = [batch.to("cpu") for batch in trainer._loaded()(0)]
    # of a sample that is one document nothing is gathered
    batches = [replace(batch, documents=batches[0].documents) for batch in batches]
    watch = fit._OnHost([bucket.data for bucket in parallel.queue.buckets])
    with watch:
        forward_backward(trainer.model, batches)
    want = need.of((kind,) * LAYERS) - need.fixed
    assert 0.75 * want < watch.peak() <= 1.02 * want


def test_selective_keeps_less_than_all_and_more_than_nothing(corpus: str) -> None:
    need = need_of(made(corpus), 4)
    kept = [need.blocks[kind].kept for kind in ("none", "selective", "full")]
    assert kept[0] > 1.3 * kept[1] and kept[1] > 3 * kept[2]
    trainer = made(corpus)
    embed, seq = trainer.run.model.embed, trainer.run.data.seq
    assert kept[2] == 4 * seq * embed * 8, "the output, which is the input of the next block"
    double = need_of(trainer, 8)
    assert [double.blocks[kind].kept for kind in double.blocks] == [2 * n for n in kept]
    assert double.fixed == need.fixed and double.gradient == need.gradient


def test_measuring_leaves_no_trace(corpus: str) -> None:
    trainer = made(corpus, micro_batch=8)
    parallel = parallel_of(trainer.model)
    before = {name: part.clone() for name, (part, _) in trainer.state().items()}
    need_of(trainer, 8)
    assert isinstance(trainer.model, Decoder) and len(trainer.model.blocks) == LAYERS
    assert set(parallel.kinds.values()) == {"none"}
    assert all(bucket.grad is None for bucket in parallel.queue.buckets)
    assert all(torch.equal(part, before[name]) for name, (part, _) in trainer.state().items())


def test_the_micro_batch_is_found(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "USEFUL_TOKENS", 64)
    monkeypatch.setattr(budget, "EMPTY_TOKENS", 2)
    plain = made(corpus, micro_batch=4)
    rich = made(corpus, recompute="budget")
    assert rich.run.plan.micro_batch == 4, "64 tokens are enough"
    assert set(parallel_of(rich.model).kinds.values()) == {"none"}
    tight = budget.least(need_of(plain, 4)) - 1
    poor = made(corpus, recompute="budget", memory=tight / GIB)
    assert poor.run.plan.micro_batch in (1, 2)
    assert losses(poor) == pytest.approx(losses(plain), rel=1e-12)
    assert poor.run.check(1) == poor.run, "a run that is continued keeps its micro-batch"


@pytest.mark.full
def test_too_small_a_budget_is_refused(corpus: str) -> None:
    with pytest.raises(PlanError) as caught:
        made(corpus, recompute="budget", memory=1e-4)
    text = str(caught.value)
    assert re.search(r"a rank needs at least [\d.]+ GiB, but may use 0.0001 GiB\. ", text)
    assert "must fit. Use a larger plan.memory, a smaller data.seq" in text


def test_memory_and_budget_belong_together() -> None:
    sizes = {"embed": 8, "heads": 2, "kv_heads": 2, "mlp": 8, "vocab": 8, "seq": 8}
    with pytest.raises(PlanError, match=r"memory=2\.0 with recompute='full'\. .* memory=0\."):
        Plan(memory=2.0, recompute="full").check(sizes, 1)
    plan = Plan(recompute="budget", batch=12).check(sizes, 2)
    assert (plan.data, plan.micro_batch) == (2, -1) and plan.check(sizes, 2) == plan
    assert (plan.unmeasured.micro_batch, plan.unmeasured.recompute) == (6, "selective")
    assert Plan().unmeasured == Plan()
    with pytest.raises(PlanError, match="col=4 does not divide micro_batch=6"):
        Plan(recompute="budget", batch=6, data=1, col=4).check(sizes, 4)
    col = Plan(recompute="budget", batch=24, data=1, col=2, memory=0.5)
    assert candidates(col, 16) == [24, 12, 8, 6, 4, 2]
    assert candidates(replace(col, micro_batch=3), 16) == [3]
    assert room(col, torch.device("cpu"), 1) == GIB // 2
    machine = room(Plan(), torch.device("cpu"), 1)
    assert room(replace(col, memory=1e6), torch.device("cpu"), 1) == machine, (
        "no more than is there"
    )
    assert room(Plan(), torch.device("cpu"), 2) == pytest.approx(machine / 2, rel=1e-6)


def on_grid(grid: Grid, corpus: str, memory: float) -> tuple[list[float], list[str], int]:
    trainer = made(corpus, grid, recompute="budget", memory=memory)
    kinds = list(parallel_of(trainer.model).kinds.values())
    return losses(trainer), kinds, trainer.run.plan.micro_batch


@pytest.mark.parametrize(
    "degrees",
    [{"depth": 2, "data": 2}, pytest.param({"row": 2, "col": 2}, marks=pytest.mark.full)],
    ids=str,
)
@pytest.mark.full
def test_ranks_agree(pool: Pool, corpus: str, degrees: dict[str, int]) -> None:
    rich = pool.on_grid(degrees, on_grid, corpus, 1.0)
    want = losses(made(corpus))
    for memory in (1.0, 0.0017):
        found = rich if memory == 1.0 else pool.on_grid(degrees, on_grid, corpus, memory)
        assert all(one == found[0] for one in found[1:])
        assert found[0][0] == pytest.approx(want, rel=1e-9)
    assert set(rich[0][1]) == {"none"}

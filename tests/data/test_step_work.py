"""The work of all ranks is counted from lengths as the batches of the ranks have it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import corpus_of

from ranvier.config.plan import Plan
from ranvier.cost.context_attention import KeyShape
from ranvier.data.batch import Batch
from ranvier.data.corpus import DocumentStream
from ranvier.data.loader import load_micro_batches
from ranvier.data.mixture import CorpusMixture
from ranvier.data.step_work import StepWork, WorkCounter
from ranvier.data.window_assignment import WindowCost
from ranvier.grid import Grid
from ranvier.nn.context_documents import ContextDocuments
from ranvier.train.loggers import format_metrics
from ranvier.train.report.work import work_metrics, work_section

SEQ = 24
WINDOWS = (0, 5, 5, 100)
COST = WindowCost(1000, 16, WINDOWS)
SHAPE = KeyShape(4, 2, 8, 4, 0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> CorpusMixture:
    """Short and long documents; the last window has padding."""
    drawn = np.random.default_rng(0)
    sizes = [int(n) for n in np.where(drawn.random(60) < 0.2, 23, drawn.integers(1, 6, 60))]
    folder: Path = tmp_path_factory.mktemp("corpus")
    stream = corpus_of(folder, [[i % 50 + 1] * n for i, n in enumerate(sizes)]).open_stream(SEQ)
    assert isinstance(stream, DocumentStream) and stream.window_padding(stream.num_windows - 1) > 0
    return CorpusMixture([stream], [1], seed=1)


def count_scores(batch: Batch) -> float:
    """Keys that the tokens of a batch see, from their positions."""
    assert batch.positions is not None
    seen = batch.positions.numpy() + 1
    return float(sum(np.minimum(seen, window or SEQ).sum() for window in WINDOWS))


def find_missing(batch: Batch, window: int) -> int:
    """Keys that the tokens of a batch see and that it does not hold."""
    assert batch.positions is not None and isinstance(batch.documents, ContextDocuments)
    missing = 0
    for sample in range(len(batch.tokens)):
        order = batch.documents.orders[sample]
        documents = np.repeat(np.arange(len(order.lengths)), order.lengths)
        numbers = batch.documents.token_numbers[sample].numpy()
        own = set(zip(documents[numbers], batch.positions[sample].tolist(), strict=True))
        seen = {(d, i) for d, p in own for i in range(max(p - (window or SEQ) + 1, 0), p + 1)}
        missing += len(seen - own)
    return missing


def count_by_batches(mixture: CorpusMixture, plan: Plan, is_balanced: bool) -> dict[str, Any]:
    """Work of each rank as its micro-batches have it, and what ranks wait for."""
    attention, tokens, flops, fetched = {}, {}, {}, []
    cost = COST if is_balanced else None
    for rank in range(plan.world_size):
        grid = Grid(plan.degrees, rank=rank)
        micros = load_micro_batches(
            mixture, 5, plan.global_batch, grid, plan.micro_batch, order="balanced", cost=cost
        )
        part = plan.col if plan.col_splits == "samples" else 1
        at = grid.index["col"] if part > 1 else 0
        each = plan.micro_batch // part
        inside = [micro.select(slice(at * each, (at + 1) * each)) for micro in micros]
        key = tuple(grid.index[axis] for axis in ("data", "expert", "depth", "col", "context"))
        attention[key] = sum(map(count_scores, inside))
        tokens[key] = sum(int((micro.tokens > 0).sum()) for micro in micros)
        rows = plan.micro_batch * SEQ / plan.context
        flops[key] = [
            2 * COST.num_parameters * rows + 4 * COST.attention_features * count_scores(one) * part
            for one in inside
        ]
        if plan.context > 1:
            others = each * SEQ * (plan.context - 1) / plan.context
            fetched += [find_missing(one, w) / others for one in inside for w in WINDOWS]
    waited = 0.0
    for data in range(plan.data):
        mine = [row for key, row in flops.items() if key[0] == data]
        waited = max(waited, float(np.max(mine, axis=0).sum()))
    mean = np.mean([sum(row) for row in flops.values()])
    return {
        "attention": attention,
        "tokens": tokens,
        "fetched": np.mean(fetched) if fetched else None,
        "efficiency": mean / waited,
    }


@pytest.mark.parametrize("is_balanced", [True, False], ids=["cost", "none"])
@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2},
        {"data": 2, "depth": 2},
        {"data": 1, "context": 3},
        {"data": 1, "depth": 2, "col": 2, "context": 2},
    ],
    ids=str,
)
def test_work_is_what_the_batches_of_ranks_have(
    mixture: CorpusMixture, degrees: dict[str, Any], is_balanced: bool
) -> None:
    plan = Plan(**degrees, global_batch=16, micro_batch=2, context_attention="kv_gather")
    counter = WorkCounter(mixture, plan, SEQ, COST, SHAPE, is_balanced)
    found = counter.count_step(5)
    expected = count_by_batches(mixture, plan, is_balanced)
    attention = [x for _, x in sorted(expected["attention"].items())]
    assert found.attention.ravel().tolist() == attention
    assert len(attention) == counter.num_ranks
    columns = {key[:3] + key[4:]: x for key, x in sorted(expected["tokens"].items())}
    assert found.tokens.ravel().tolist() == list(columns.values())
    assert found.keys_fetched == pytest.approx(expected["fetched"])
    assert found.efficiency == pytest.approx(expected["efficiency"])


def test_methods_move_what_they_move(mixture: CorpusMixture) -> None:
    """A ring moves all keys, and with split heads all ranks have the same work."""
    plan = Plan(data=1, context=2, global_batch=8, micro_batch=1)
    found = {}
    for method in ("kv_gather", "ring", "ulysses"):
        one = dataclasses.replace(plan, context_attention=method)
        cost = dataclasses.replace(COST, layer_windows=(0, 0))
        found[method] = WorkCounter(mixture, one, SEQ, cost, SHAPE, True).count_step(0)
    fetched = found["kv_gather"].keys_fetched
    assert found["ring"].keys_fetched == 1.0 and found["ulysses"].keys_fetched is None
    assert fetched is not None and 0.0 < fetched < 0.5
    assert np.ptp(found["ulysses"].attention) == 0.0 < np.ptp(found["ring"].attention)
    assert found["ulysses"].efficiency == pytest.approx(1.0)


@pytest.mark.parametrize(("lost", "shown"), [(0.25, True), (0.05, False)])
def test_a_line_shows_lost_efficiency_only_if_it_is_large(lost: float, shown: bool) -> None:
    names = ("lr", "grad_norm", "loss", "tokens_per_second", "peak_memory_bytes")
    row: dict[str, Any] = dict.fromkeys(names, 1.0)
    row |= {"step": 0, "val_loss": None, "mfu": None, "skipped_total": 0}
    assert "lost to imbalance" not in format_metrics(row, 10, "tokens")
    row["efficiency_lost_to_imbalance"] = lost
    assert ("25% lost to imbalance" in format_metrics(row, 10, "tokens")) == shown


def test_the_report_says_how_unequal_the_work_is() -> None:
    attention = np.array([[[3.0, 1.0]], [[2.0, 2.0]]])
    work = StepWork(attention, np.array([[4.0, 4.0], [4.0, 2.0]]), 0.25, 0.9)
    row = {"step": 0, **work_metrics(work)}
    assert row["attention_imbalance"] == 1.5 and row["rank_attention"] == [1.5, 0.5, 1.0, 1.0]
    page = work_section([row])
    assert "1.500 times the mean attention work and 1.143 times the mean tokens" in page
    assert "takes 10.0% of the compute" in page and "25.0% of the keys of other ranks" in page
    assert "<svg" in page and work_section([{"step": 0}]) == ""
    assert work_metrics(None) == {}
    many = StepWork(np.ones((65, 1, 1)), np.ones((65, 1)), None, 1.0)
    assert "rank_attention" not in work_metrics(many)
    # Files of runs are not trusted.
    odd = {"step": 0, "attention_imbalance": 2, "token_imbalance": 10**400, "rank_attention": "x"}
    assert "2.000 times" in work_section([odd])

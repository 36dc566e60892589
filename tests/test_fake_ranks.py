"""Predicted bytes equal counted bytes on 64, 512 and 4096 ranks of the fake process group.

Bytes are counted below comm, in the calls of torch.distributed, independently of the tracer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from grids import label
from ranvier import launch
from ranvier.comm import collectives
from ranvier.config.plan import Plan, WeightSplit
from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.nn.context_documents import ContextDocuments
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.rules import Jorge, MatrixRule, Muon
from ranvier.parallel.parallelize import parallelize
from ranvier.tools.verify import predict_events
from ranvier.train.step import forward_backward

GRIDS = [
    (64, {"data": 2, "depth": 4, "row": 4, "col": 2}),
    (512, {"data": 4, "depth": 8, "row": 8, "col": 2}),
    (4096, {"data": 8, "depth": 16, "row": 8, "col": 4}),
    (512, {"data": 2, "expert": 2, "context": 4, "depth": 4, "row": 4, "col": 2}),
]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes of whole tensors in the calls of torch.distributed."""
    total: Counter[str] = Counter()

    def wrapped(name: str, call: Any, whole: int) -> Any:
        def count(*arguments: Any, **options: Any) -> Any:
            x = arguments[whole]
            total[name] += x.numel() * x.element_size()
            return call(*arguments, **options)

        return count

    with (
        mock.patch.object(
            collectives, "gather_into", wrapped("all_gather", collectives.gather_into, 0)
        ),
        mock.patch.object(
            collectives, "scatter_into", wrapped("reduce_scatter", collectives.scatter_into, 1)
        ),
        mock.patch.object(
            collectives.distributed,
            "all_reduce",
            wrapped("all_reduce", collectives.distributed.all_reduce, 0),
        ),
        mock.patch.object(
            collectives.distributed,
            "all_to_all_single",
            wrapped("all_to_all", collectives.distributed.all_to_all_single, 1),
        ),
    ):
        yield total


RULES: list[tuple[int, dict[str, int], Any, MatrixRule | None]] = [
    *((*grid, inner, None) for inner in ("samples", "features") for grid in GRIDS),
    (*GRIDS[0], "samples", Muon()),
    (*GRIDS[3], "features", Muon()),
    (*GRIDS[0], "features", Jorge(max_preconditioner_dim=16)),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("world", "degrees", "inner", "rule"),
    RULES,
    ids=[f"{label(grid)}-{inner}-{type(rule).__name__}" for _, grid, inner, rule in RULES],
)
def test_predicted_bytes_are_counted_bytes(
    world: int, degrees: dict[str, int], inner: Any, rule: MatrixRule | None
) -> None:
    config = DecoderConfig(
        layers=2,
        embed=16,
        heads=32,
        kv_heads=4,
        head_dim=2,
        mlp=64,
        vocab=101,
        bias=True,
        tie_embeddings=True,
    )
    over: WeightSplit = "depth" if inner == "samples" else "depth_context"
    with launch.fake_process_group(world, rank=world // 3):
        grid = Grid(degrees, rank=world // 3, connected=True)
        plan = Plan(col_splits=inner, recompute="full", shard_weights_over=over)
        plan = plan.with_degrees(grid.degrees)
        model = parallelize(Decoder(config), grid, plan)
        tokens = torch.zeros(4, 16, dtype=torch.long)
        # Micro-batches with different documents communicate different keys.
        ids = [torch.arange(16) // length for length in (16, 5)]
        micros = [
            Batch(tokens, tokens, documents=one.expand(4, 16)).shard_over_context(grid, "balanced")
            for one in ids
        ]
        orders = [
            micro.documents.orders
            for micro in micros
            if isinstance(micro.documents, ContextDocuments)
        ]
        optimizer = Optimizer(model.parallel.bucket_scheduler, rule=rule)
        with counted() as total:
            forward_backward(model, micros)
            optimizer.step()
        predicted: Counter[str] = Counter()
        flow = ActivationShape(samples=4, seq=16, itemsize=4, statistics_itemsize=4)
        cost = None if rule is None else rule.cost(torch.float32)
        for event in predict_events(model.parallel, flow, 2, orders, cost):
            predicted[event.op] += event.bytes
        assert total == predicted

"""Hugging Face models on grids: what runs inside workers, and the serial side of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import equivalence
from equivalence import Case, Serial
from hf_models import HF_MODELS, MODELS_OF_CORE
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.nn.cross_entropy import CrossEntropy
from ranvier.parallel import huggingface
from ranvier.parallel.parallel_model import ParallelModel
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import ShardingTable
from ranvier.train.step import forward_backward


@dataclass(frozen=True)
class HfCase(Case):
    """A case of a Hugging Face model, perhaps of another config."""

    inner: str = "features"
    changes: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        """The model, the same on every call."""
        torch.manual_seed(1)
        models = {**HF_MODELS, **MODELS_OF_CORE}
        return models[self.model](**dict(self.changes)).double()  # type: ignore[call-arg]


def serial(case: HfCase, batch: Batch, lr: float, clip: float) -> Serial:
    """The same model on one process."""
    with mock.patch.object(equivalence, "build", lambda name: case.build()):
        return Serial(case.model, batch, lr, clip)


def loss_of(grid: Grid, case: HfCase, batch: Batch) -> float:
    """Mean loss of a batch on a grid."""
    micros = equivalence.micros_of(batch, grid, case.micro_batches)
    return forward_backward(case.on(grid), micros).item()


def logits_of(grid: Grid, case: HfCase, tokens: Tensor) -> tuple[Tensor, int]:
    """My logits without padding, and the first token of the vocabulary they are of."""
    model = case.on(grid)
    loss = model.loss
    assert isinstance(loss, CrossEntropy)
    return model(tokens)[
        ..., : loss.vocab_shard.valid_columns
    ].detach(), loss.vocab_shard.first_column


def from_meta(grid: Grid, case: HfCase, batch: Batch) -> tuple[float, list[str]]:
    """Mean loss of a model that came without values, and the names of its parameters."""
    with torch.device("meta"):
        models = {**HF_MODELS, **MODELS_OF_CORE}
        model = models[case.model](**dict(case.changes))  # type: ignore[call-arg]
    plan = Plan(col_splits="features").with_degrees(grid.degrees)
    model = parallelize(model, grid, plan, dtype=torch.float64, seed=3)
    parallel = model.parallel
    assert isinstance(parallel, ParallelModel)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    loss = forward_backward(model, equivalence.micros_of(batch, grid, 1)).item()
    return loss, [name for name, _ in model.named_parameters()]


def naive(grid: Grid, case: HfCase, batch: Batch) -> float | str:
    """Mean loss, or the error, when layers are swapped and heads counted, and that is all.

    No entrances; positions and masks by transformers.
    """
    model = case.build()
    names = huggingface.derive_dims(model)
    layers = {type(m): huggingface.HF_LAYERS.get(type(m).__name__) for m in model.modules()}
    leaves = {kind: leaf for kind, leaf in layers.items() if leaf is not None}
    leaves[huggingface.LossPlaceholder] = CrossEntropy
    model.loss = huggingface.LossPlaceholder()
    for module in model.modules():
        huggingface._set_local_heads(
            module, huggingface.dim_units(model.config), ShardingTable("features"), grid
        )
    with mock.patch.object(huggingface, "is_huggingface_model", lambda model: False):
        plan = Plan(col_splits="features").with_degrees(grid.degrees)
        model = parallelize(model, grid, plan, dims={**names, "loss": ("vocab",)}, layers=leaves)
    model.forward = NaiveForward(model)  # type: ignore[assignment]
    try:
        return forward_backward(model, equivalence.micros_of(batch, grid, 1)).item()
    except RuntimeError as error:
        return str(error)


class NaiveForward:
    """The forward of transformers, positions and mask left to it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Tensor, targets: Tensor, **_: Tensor) -> Tensor:
        model = self.model
        x = model.get_input_embeddings()(tokens)
        out = model.base_model(inputs_embeds=x, use_cache=False).last_hidden_state
        loss: Tensor = model.loss(model.lm_head(out), targets)
        return loss


def restarted(grid: Grid, case: HfCase, batch: Batch) -> float:
    """Mean loss with positions that begin anew in the part of each rank of row."""
    seq, parts = batch.tokens.shape[1], grid.degrees["row"]
    positions = (torch.arange(seq) % (seq // parts)).expand_as(batch.tokens)
    return loss_of(grid, case, replace(batch, positions=positions))

"""A second kind of model: residual MLP blocks that classify vectors, all of it in this file.

A sample is a list of `data.seq_len` vectors, each with a class. The vectors are added to learned
positions in the residual stream: they enter the model split like it, `[b, s/row, d/col]`.

Shapes: b samples, s vectors, d embed, c classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.comm.autograd import local_slice
from ranvier.config.kinds import ModelKind, Reference
from ranvier.config.run import RunConfig
from ranvier.config.sections import ModelConfig
from ranvier.data.batch import SampleBatch
from ranvier.grid import Axis, Grid
from ranvier.models.config import AdapterConfig
from ranvier.models.decoder import LMHead
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.setting import setting
from ranvier.sharding import ShardingTable, local_range, round_up
from ranvier.tools.shrink import ShrunkSizes

# ---- settings -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VectorShape:
    """The shape of a classifier of vectors."""

    layers: int = setting(2, minimum=1, maximum=1000)
    """Blocks."""
    embed: int = setting(16, minimum=1, maximum=2**20)
    """Elements of a vector."""
    mlp: int = setting(24, minimum=1, maximum=2**20)
    """Width of the hidden layer of a block."""
    classes: int = setting(10, minimum=2, maximum=2**20)
    """Classes that vectors belong to."""
    max_seq: int = setting(4096, minimum=1, unit="vectors")
    """Most vectors of a sample."""


@dataclass(frozen=True, kw_only=True)
class VectorModelConfig(VectorShape, ModelConfig):
    """The model: blocks that classify vectors."""

    kind: str = "vectors"
    """Kind of the model."""
    size: str = "vectors-tiny"
    """vectors-tiny or vectors-1b."""

    @property
    def num_parameters(self) -> int:
        """Parameters of all matrices and positions."""
        blocks = 2 * self.layers * self.embed * self.mlp
        return blocks + (self.classes + self.max_seq) * self.embed

    @property
    def dim_units(self) -> dict[str, int]:
        """Units of each named dim; classes are split like a vocabulary."""
        return {"embed": self.embed, "mlp": self.mlp, "vocab": self.classes}

    @property
    def sequence_limit(self) -> int:
        """Largest `data.seq_len`."""
        return self.max_seq

    @property
    def memory_traits(self) -> dict[str, Any]:
        """The activation function of its blocks."""
        return {"activation": "gelu"}


# ---- model ----------------------------------------------------------------------------------


class VectorBlock(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    dims = {"norm": ("embed",), "up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self, config: VectorShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.embed)
        self.up = nn.Linear(config.embed, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[b, s, d]`."""
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return y


class VectorClassifier(nn.Module):
    """Positions, blocks, norm, head, loss."""

    returns_head_loss = True
    dims = {"position": ("position", "embed"), "norm": ("embed",), "head": ("vocab", "embed")}

    def __init__(self, config: VectorModelConfig) -> None:
        super().__init__()
        self.sizes = config.dim_units
        self.init = {".down": 0.1, "": 0.3}
        self.position = nn.Embedding(config.max_seq, config.embed)
        self.blocks = nn.ModuleList(VectorBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed)
        self.head = LMHead(config.embed, config.classes)

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """Names of the layers that run together, in order."""
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("position",), *blocks, ("norm", "head")]

    def forward(self, vectors: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits `[b, s, c]`, or with targets the sum of the losses of all vectors.

        vectors: `[b, s, d]`; positions, targets: `[b, s]`.
        """
        everything = slice(0, len(self.blocks) + 2)
        return self.segment(None, everything, vectors, positions, targets)

    def segment(
        self,
        x: Tensor | None,
        parts: slice,
        vectors: Tensor,
        positions: Tensor,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Run some of the parts; x: output of those before them, `[b, s, d]`."""
        if x is None:
            places: Tensor = self.position(positions)
            x = places + vectors.to(places.dtype)
        for block in self.blocks[max(parts.start - 1, 0) : parts.stop - 1]:
            x = block(x)
        if parts.stop > len(self.blocks) + 1:
            x = self.head(self.norm(x), targets)
        assert x is not None
        return x


def build_classifier(config: VectorModelConfig, adapters: AdapterConfig) -> VectorClassifier:
    """The model; it has no adapters."""
    assert adapters.rank == 0, adapters
    return VectorClassifier(config)


# ---- data -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorBatch(SampleBatch):
    """Vectors `[b, s, d]` and their classes `[b, s]`."""

    vectors: Tensor
    targets: Tensor

    @classmethod
    def blank(cls, run: RunConfig, size: int) -> Self:
        """Zeros."""
        shape = (size, run.data.seq_len)
        vectors = torch.zeros(*shape, run.model.embed)
        return cls(vectors, torch.zeros(shape, dtype=torch.int64), samples=torch.arange(size))

    @classmethod
    def random(cls, run: RunConfig) -> Self:
        """Random vectors and classes; some have none."""
        drawn = torch.Generator().manual_seed(run.train.seed + 1)
        shape = (run.plan.global_batch, run.data.seq_len)
        vectors = torch.randn(*shape, run.model.embed, generator=drawn)
        targets = torch.randint(0, run.model.dim_units["vocab"], shape, generator=drawn)
        targets[torch.rand(shape, generator=drawn) < 0.2] = IGNORE_INDEX
        return cls(vectors, targets)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        positions = torch.arange(self.targets.shape[1], device=self.targets.device)
        positions = positions.expand(self.targets.shape)
        return {"vectors": self.vectors, "positions": positions, "targets": self.targets}

    def local_inputs(self, grid: Grid, table: ShardingTable) -> dict[str, Any]:
        """The vectors split like the residual stream; whole positions and classes."""
        part = self.vectors
        for dim, name in ((1, "seq"), (2, "embed")):
            axes = table.activation_rule("embed")[name]
            here = local_range(part.shape[dim], axes, grid.degrees, grid.index)
            part = part.narrow(dim, here.start, len(here))
        return {**self.model_inputs(), "vectors": part}

    def count_targets(self, axis: Axis | None = None) -> Tensor:
        """Number of vectors with a class."""
        targets = self.targets if axis is None else local_slice(self.targets, axis, 0)
        return (targets != IGNORE_INDEX).sum()


@dataclass(frozen=True)
class RandomVectors:
    """Vectors drawn from (seed, split, number of the sample), classified by a random matrix."""

    seq: int
    embed: int
    classes: int
    seed: int
    split: str

    def read_batch(self, numbers: Sequence[int], end: int | None = None) -> VectorBatch:
        """The samples of these numbers; those from `end` on have no targets."""
        matrix = np.random.default_rng(self.seed).normal(size=(self.embed, self.classes))
        shape = (self.seq, self.embed)
        keys = [(self.seed, *self.split.encode(), number) for number in numbers]
        vectors = np.stack([np.random.default_rng(key).normal(size=shape) for key in keys])
        targets = torch.from_numpy((vectors @ matrix).argmax(-1))
        if end is not None:
            targets[torch.tensor(numbers) >= end] = IGNORE_INDEX
        inputs = torch.from_numpy(vectors.astype(np.float32))
        return VectorBatch(inputs, targets, samples=torch.tensor(numbers))


@dataclass(frozen=True)
class VectorData:
    """Training and validation data."""

    train: RandomVectors
    validation: RandomVectors

    @property
    def fingerprint(self) -> str:
        """All that decides about the samples."""
        return str(self.train)

    @property
    def summary_lines(self) -> list[str]:
        """What the data is."""
        return [f"random vectors of {self.train.embed} elements in {self.train.classes} classes"]

    def save_files(self, folder: Path) -> None:
        """Nothing is needed."""


class VectorSource:
    """Samples that are drawn, so that nothing is prepared."""

    def prepare(self, run: RunConfig) -> list[str]:
        """Nothing."""
        return []

    def open(self, run: RunConfig, stored: list[str]) -> VectorData:
        """The samples of a run."""
        assert isinstance(run.model, VectorModelConfig), type(run.model)
        model = run.model
        train = RandomVectors(run.data.seq_len, model.embed, model.classes, run.train.seed, "train")
        return VectorData(train, replace(train, split="validation"))

    def write_random(self, run: RunConfig, folder: Path, samples: int) -> list[str]:
        """Nothing: all samples are random."""
        return []


# ---- verify ---------------------------------------------------------------------------------


def shrink_classifier(run: RunConfig, sizes: ShrunkSizes) -> VectorModelConfig:
    """A classifier as small as the grid of its run allows."""
    assert isinstance(run.model, VectorModelConfig), type(run.model)
    return replace(
        run.model,
        layers=sizes.layers,
        embed=round_up(16, sizes.outer_multiple),
        mlp=round_up(24, sizes.inner_multiple),
        max_seq=sizes.seq,
        classes=sizes.vocab(run.model.classes, run.plan),
    )


VECTORS = ModelKind(
    name="vectors",
    config=VectorModelConfig,
    sizes={
        "vectors-tiny": VectorShape(),
        "vectors-1b": VectorShape(layers=30, embed=2048, mlp=8192, classes=1000),
    },
    unit="vectors",
    builder=Reference("kinds.vectors:build_classifier"),
    batch=Reference("kinds.vectors:VectorBatch"),
    data_source=Reference("kinds.vectors:VectorSource"),
    shrink=Reference("kinds.vectors:shrink_classifier"),
)
"""The row of the table."""

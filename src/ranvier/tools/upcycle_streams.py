"""Upcycle to several streams of each sample (ParScale), with the weights of another run.

The prefixes of all layers and the average of the streams are new, so that the function of the model
changes: the held-out loss is higher at first, and training adapts it. Chen et al. (2025) train a
dense model first, and add streams for the last 2 % of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from ranvier import counter_rng
from ranvier.checkpoint.hf.model import RowPart, TensorProvider, shapes_of
from ranvier.errors import PlanError
from ranvier.models.config import SIZE_LIMITS, DecoderConfig
from ranvier.sharding import Shard
from ranvier.tools.upcycle_architecture import upcycle_architecture
from ranvier.train import import_export


@dataclass(frozen=True)
class WeightsWithStreams:
    """The weights of a dense model, and new ones of its streams, as a `TensorProvider`."""

    config: DecoderConfig
    dense: TensorProvider
    seed: int

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""
        return shapes_of(self.config)

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a tensor; new ones have that of the embedding."""
        return self.dense.dtype_of(name if name in self.dense.shapes else "embed.weight")

    def num_bytes(self, name: str) -> int:
        """Size of a tensor in bytes."""
        return math.prod(self.shapes[name]) * self.dtype_of(name).itemsize

    def row_parts(self, name: str) -> Iterator[RowPart]:
        """The parts of a tensor of the dense model, or a new one."""
        if name in self.dense.shapes:
            yield from self.dense.row_parts(name)
            return
        shape = self.shapes[name]
        place = Shard(shape, (0,) * len(shape), shape, shape)
        # Biases are zero in the beginning.
        std = self.config.init_std if len(shape) > 1 else 0.0
        dtype = self.dtype_of(name)
        yield 0, counter_rng.init_shard(place, seed=self.seed, name=name, std=std, dtype=dtype)


def streams_config(config: DecoderConfig, streams: int) -> DecoderConfig:
    """Returns the config with several streams; raises if it is not possible."""
    if config.streams > 1:
        raise PlanError(
            f"The model already has parscale_streams={config.parscale_streams}. Only a model with "
            "one stream can be upcycled. Use the run that it was made from."
        )
    if streams < 2:
        raise PlanError(
            f"parscale_streams={streams} is too small. A model with streams has at least 2. Use "
            "--parscale-streams 4."
        )
    most = SIZE_LIMITS["parscale_streams"]
    if streams > most:
        raise PlanError(
            f"parscale_streams={streams} is too large. It must be at most {most}. Use "
            "--parscale-streams 4."
        )
    made = replace(config, parscale_streams=streams)
    problems = made.find_problems()
    if problems:
        raise PlanError(problems)
    return made


def upcycle_to_streams(
    source: str, out: Path, *, streams: int, seed: int = 0, step: int = -1
) -> list[str]:
    """Creates a run with several streams from a run or published model; returns a summary in
    lines.
    """
    config, lines = upcycle_architecture(
        source,
        out,
        lambda dense: streams_config(dense, streams),
        lambda config, weights: WeightsWithStreams(config, weights, seed),
        step=step,
    )
    num_parameters = import_export.to_model_config(config).num_parameters
    return [
        f"{config.streams} streams, {config.parscale_prefix_tokens} prefix tokens: "
        f"{num_parameters:,} parameters, in {out}",
        *lines,
    ]

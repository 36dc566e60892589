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
from ranvier.checkpoint.hf.model import PublishedModel, RowPart, TensorProvider, shapes_of
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.infer.load import find_checkpoint, load_config_from_dir
from ranvier.models.config import DecoderConfig
from ranvier.sharding import Shard
from ranvier.system import safe_files
from ranvier.system.model_hub import find_model
from ranvier.tools.extend_context import CheckpointWeights
from ranvier.tools.held_out_loss import compare_held_out_losses
from ranvier.tools.upcycle import TOKENIZER_FILES
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
    path = find_model(source)
    # A directory with config.toml is a run; anything else must be a published model.
    if not (path / "config.toml").exists():
        with PublishedModel.open(path) as model:
            run = import_export.build_imported_run(
                model, out, tokenizer=(model.folder / "tokenizer.json").exists()
            )
            config = streams_config(model.config, streams)
            return _write_run(
                model.folder, out, WeightsWithStreams(config, model, seed), run, config
            )
    run = load_config_from_dir(path)
    config = streams_config(run.decoder, streams)
    chosen = None if step < 0 else step
    weights = CheckpointWeights.open(run, find_checkpoint(path, chosen))
    lines = _write_run(path, out, WeightsWithStreams(config, weights, seed), run, config)
    losses, reason = compare_held_out_losses(run, [path, out], [chosen, None])
    if not losses:
        return [*lines, reason]
    dense, first = losses
    return [
        *lines,
        f"Held-out loss before training: {first:.4f} ({first / dense - 1.0:+.1%}), of {source}: "
        f"{dense:.4f}",
    ]


def _write_run(
    origin: Path, out: Path, weights: TensorProvider, run: RunConfig, config: DecoderConfig
) -> list[str]:
    made = RunConfig(model=import_export.to_model_config(config), data=run.data)
    # The run directory appears only once it is complete.
    with import_export.write_atomically(out) as here:
        for name in TOKENIZER_FILES:
            if safe_files.path_exists(origin / name):
                safe_files.copy_file(origin / name, here / name)
        import_export.copy_origin_files(str(origin), here)
        import_export.write_initial_run(here, made, weights, str(origin))
    return [
        f"{config.streams} streams, {config.parscale_prefix_tokens} prefix tokens: "
        f"{made.model.num_parameters:,} parameters, in {out}"
    ]

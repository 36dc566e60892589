"""Training time of gemstone shapes on a device of a cluster, predicted by the planner.

One device holds the whole model; with data parallelism over more devices, device hours are about
the same. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ranvier.config.plan import Plan
from ranvier.models.config import GEMSTONE_HEAD_DIM, gemstone_size
from ranvier.planner.cluster import Cluster
from ranvier.planner.model_spec import ModelSpec, dense_decoder
from ranvier.planner.predict import Candidate, Prediction, Workload, predict_step
from ranvier.scaling.flops import GEMSTONE_SEQ, GEMSTONE_VOCAB
from ranvier.scaling.minimize import Array

ANCHOR_WIDTHS = tuple(GEMSTONE_HEAD_DIM * k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))
ANCHOR_DEPTHS = (2, 8)
"""Shapes whose time is predicted; that of others is interpolated."""
BATCH_TOKENS = 2**17
"""Tokens per step of a device, so that the update of weights hardly counts."""


def gemstone_spec(width: int, depth: int, vocab: int) -> ModelSpec:
    """Returns the layers of a gemstone shape."""
    model = gemstone_size(f"gemstone-{width}x{depth}")
    return dense_decoder(
        layers=depth,
        embed=width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        mlp=model.mlp,
        gated=True,
        vocab=vocab,
        name=f"gemstone-{width}x{depth}",
    )


def predict_shape(
    width: int, depth: int, machine: Cluster, *, vocab: int, seq: int, batch: int, micro_batch: int
) -> Prediction:
    """Returns the prediction of a step on one device."""
    job = Workload(
        model=gemstone_spec(width, depth, vocab),
        seq=seq,
        batch=batch,
        dtype="fp32" if machine.cores else "bf16",
    )
    plan = Plan(data=1, global_batch=batch, micro_batch=micro_batch)
    return predict_step(job, Candidate(plan), machine.with_size(devices=1))


def fitting_micro_batch(
    width: int, depth: int, machine: Cluster, *, vocab: int, seq: int, batch: int
) -> tuple[int, Prediction] | None:
    """Returns the largest micro-batch that fits, halving the batch, and its prediction; None if
    even one sample does not fit."""
    micro = batch
    while True:
        found = predict_shape(
            width, depth, machine, vocab=vocab, seq=seq, batch=batch, micro_batch=micro
        )
        if found.fits_memory:
            return micro, found
        if micro == 1:
            return None
        # Only divisors of the batch are allowed; an odd rest goes down to single samples.
        micro = micro // 2 if micro % 2 == 0 else 1


@dataclass(frozen=True)
class ClusterTimeCost:
    """Device seconds per token by shape, on a device of a cluster."""

    machine: Cluster
    vocab: int = GEMSTONE_VOCAB
    seq: int = GEMSTONE_SEQ

    @property
    def unit(self) -> str:
        """What a token costs."""
        return f"device seconds on {self.machine.name}"

    @cached_property
    def _anchors(self) -> Array:
        """Seconds per token of the ends and of a layer, [2, widths]."""
        batch = max(BATCH_TOKENS // self.seq, 1)
        rows = []
        for width in ANCHOR_WIDTHS:
            few, many = (
                predict_shape(
                    width,
                    depth,
                    self.machine,
                    vocab=self.vocab,
                    seq=self.seq,
                    batch=batch,
                    micro_batch=1,
                ).step_seconds
                / (batch * self.seq)
                for depth in ANCHOR_DEPTHS
            )
            layer = (many - few) / (ANCHOR_DEPTHS[1] - ANCHOR_DEPTHS[0])
            # A layer that costs nothing would be prescribed without limit.
            layer = max(layer, 1e-3 * few)
            rows.append((max(few - ANCHOR_DEPTHS[0] * layer, 1e-3 * few), layer))
        return np.array(rows).T

    def per_token(self, width: Array, depth: Array) -> Array:
        """Returns the device seconds per token of shapes."""
        x = np.log(np.array(ANCHOR_WIDTHS, dtype=np.float64))
        logs = np.log(self._anchors)
        wanted = np.log(width)
        # Beyond the widest anchor a layer grows with the square of the width.
        beyond = np.maximum(wanted - x[-1], 0.0)
        ends = np.exp(np.interp(wanted, x, logs[0]) + beyond)
        layers = np.exp(np.interp(wanted, x, logs[1]) + 2.0 * beyond)
        found: Array = ends + depth * layers
        return found

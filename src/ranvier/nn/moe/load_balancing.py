"""Load balancing: sums the tokens per expert of all layers in a step, and updates the router bias.

Each layer counts its own tokens. In the optimizer step the counts of all ranks and layers are
summed as one small tensor, so that every rank has the counts of the global batch. Metrics use them,
and layers with a router bias update it by sign(mean - count). A skipped step does not change the
bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.grid import Axis
from ranvier.nn.moe.layer import ROUTING_STATS, MoELayer
from ranvier.sharding import Shard, ShardedStateDict

LOAD_SUM_AXES = ("pipe", "data", "expert", "context", "depth", "row")
"""Axes whose ranks route different tokens or have different layers."""


@dataclass
class LoadBalancer:
    """Sums the expert loads of all MoE layers of a model and updates their router biases."""

    layer_names: list[str]
    """Names of all MoE layers, on all stages, in order."""
    local_layers: Mapping[str, MoELayer]
    """The MoE layers on this stage, by name."""
    num_experts: int
    axis: Axis
    last_stats: Tensor | None = field(default=None)
    """Loads and ROUTING_STATS of the global batch in the last step, `[layers, E + stats]`."""

    @torch.no_grad()
    def step(self, good: Tensor) -> None:
        """Sums the counts of a step, and updates biases unless the step is skipped.

        Communicates: all-reduce over all axes whose ranks have different tokens or layers.
        """
        device = good.device
        width = self.num_experts + len(ROUTING_STATS)
        # One row per layer of the whole model; rows of other stages are zero here and filled by the
        # sum. float64 counts tokens exactly.
        rows = torch.zeros(len(self.layer_names), width, dtype=torch.float64, device=device)
        for name, leaf in self.local_layers.items():
            rows[self.layer_names.index(name)] = leaf.routing_stats.to(device)
            # In place, as a captured CUDA graph adds to this tensor.
            leaf.routing_stats.zero_()
        with self.axis.trace.named_scope("experts"):
            self.last_stats = collectives.all_reduce(rows, self.axis).wait()
        for name, leaf in self.local_layers.items():
            if leaf.bias is not None:
                loads = self.last_stats[self.layer_names.index(name), : self.num_experts]
                by = (loads.mean() - loads).sign().to(leaf.bias.dtype)
                # `good` is 0 for a skipped step; a product avoids reading it on the host.
                leaf.bias += leaf.rule.bias_update_rate * by * good

    @property
    def aux_loss_sum(self) -> Tensor:
        """Sum of the auxiliary losses over all layers and tokens of the last step."""
        assert self.last_stats is not None, "no optimizer step has run yet"
        return self.last_stats[:, self.num_experts + ROUTING_STATS.index("extra")].sum()

    @property
    def sharded_state(self) -> ShardedStateDict:
        """The biases, which are equal on all ranks."""
        whole = (self.num_experts,)
        place = Shard(whole, (0,), whole, whole)
        return {
            f"{name}.bias": (leaf.bias, place)
            for name, leaf in self.local_layers.items()
            if leaf.bias is not None
        }


def load_metrics(rows: Tensor, experts: int) -> dict[str, Tensor]:
    """Returns the metrics of a step from its stats `[layers, E + stats]`, on the device.

    load: the largest load of an expert in any layer, relative to the mean. idle: fraction of
    experts without tokens. drops: fraction of choices above the capacity. entropy: mean entropy of
    the scores, in nats. extra: mean auxiliary loss per token, summed over layers.
    """
    loads = rows[:, :experts]
    drops, entropy, extra, tokens = rows[:, experts:].unbind(1)
    mean = loads.mean(1).clamp(min=1e-30)
    return {
        "load": (loads.amax(1) / mean).amax(),
        "idle": (loads == 0).double().mean(),
        "drops": drops.sum() / loads.sum().clamp(min=1.0),
        "entropy": (entropy / tokens.clamp(min=1.0)).mean(),
        "extra": (extra / tokens.clamp(min=1.0)).sum(),
    }

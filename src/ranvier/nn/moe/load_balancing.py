"""Load balancing: how many tokens the experts of all layers got in a step, and the router bias.

Each layer counts its own tokens. At the optimizer's step the counts of all ranks and layers are
summed, as one small tensor, so that every rank knows those of the global batch: metrics read them,
and layers with a bias (router_bias) move it by sign(mean - count). A skipped step leaves the bias
unchanged.
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
"""Axes whose ranks route different tokens, or hold other layers."""


@dataclass
class LoadBalancer:
    """The MoE layers of a model."""

    layer_names: list[str]
    """Names of all MoE layers, on all stages, in order."""
    local_layers: Mapping[str, MoELayer]
    """Those on this stage."""
    num_experts: int
    axis: Axis
    last_stats: Tensor | None = field(default=None)
    """Loads and ROUTING_STATS of the last step, of the global batch: `[layers, E + stats]`."""

    @torch.no_grad()
    def step(self, good: Tensor) -> None:
        """Sum the counts of a step, and update biases unless the step is skipped.

        Communicates: all-reduce over all axes whose ranks have other tokens or layers.
        """
        device = good.device
        width = self.num_experts + len(ROUTING_STATS)
        # One row per layer of the whole model: those of other stages stay zero and come in with the
        # sum. float64 counts tokens exactly.
        rows = torch.zeros(len(self.layer_names), width, dtype=torch.float64, device=device)
        for name, leaf in self.local_layers.items():
            rows[self.layer_names.index(name)] = leaf.routing_stats.to(device)
            # In place: a captured CUDA graph keeps adding to this tensor.
            leaf.routing_stats.zero_()
        with self.axis.trace.named_scope("experts"):
            self.last_stats = collectives.all_reduce(rows, self.axis).wait()
        for name, leaf in self.local_layers.items():
            if leaf.bias is not None:
                loads = self.last_stats[self.layer_names.index(name), : self.num_experts]
                by = (loads.mean() - loads).sign().to(leaf.bias.dtype)
                # `good` is 0 for a skipped step; multiplying avoids reading it on the host.
                leaf.bias += leaf.rule.bias_update_rate * by * good

    @property
    def aux_loss_sum(self) -> Tensor:
        """Auxiliary losses of all layers in the last step, summed over tokens."""
        assert self.last_stats is not None, "no step was made yet"
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
    """Metrics of a step from its stats `[layers, E + stats]`, on the device.

    load: of the busiest expert of any layer, relative to the mean. idle: fraction of experts
    without a token. drops: fraction of choices beyond the capacity. entropy: of scores, in nats.
    extra: the mean auxiliary loss per token, summed over layers.
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

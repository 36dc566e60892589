"""Balance: what the experts of all layers were given in a step, and the bias that evens it out.

Each leaf counts its own tokens. With the optimizer's step the counts of all ranks and layers are
summed, one small tensor, so that every rank knows those of the global batch: metrics read them, and
layers with a bias (router_bias) move it by sign(mean - count). A step that is not made moves none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.grid import Axis
from ranvier.nn.moe.layer import NOTES, Experts
from ranvier.sharding import Place, State

AXES = ("pipe", "data", "expert", "context", "depth", "row")
"""Axes whose ranks route different tokens, or have other layers."""


@dataclass
class Balance:
    """The mixtures of a model."""

    names: list[str]
    """Of all layers with experts, on all stages, in order."""
    here: Mapping[str, Experts]
    """Those of them that are on this stage."""
    experts: int
    axis: Axis
    last: Tensor | None = field(default=None)
    """Loads of the last step and NOTES, of the global batch: `[layers, E + notes]`."""

    @torch.no_grad()
    def step(self, good: Tensor) -> None:
        """Sum the counts of a step, and move biases if it is made.

        Communicates: all-reduce over all axes whose ranks have other tokens or layers.
        """
        device = good.device
        width = self.experts + len(NOTES)
        rows = torch.zeros(len(self.names), width, dtype=torch.float64, device=device)
        for name, leaf in self.here.items():
            rows[self.names.index(name)] = leaf.tally.to(device)
            leaf.tally.zero_()  # in place: a recorded step goes on adding to it
        with self.axis.trace.at("experts"):
            self.last = collectives.all_reduce(rows, self.axis).wait()
        for name, leaf in self.here.items():
            if leaf.bias is not None:
                loads = self.last[self.names.index(name), : self.experts]
                by = (loads.mean() - loads).sign().to(leaf.bias.dtype)
                leaf.bias += leaf.rule.bias * by * good

    @property
    def extra(self) -> Tensor:
        """What the layers have added to the loss of the last step, a sum over tokens."""
        assert self.last is not None, "no step was made yet"
        return self.last[:, self.experts + NOTES.index("extra")].sum()

    @property
    def state(self) -> State:
        """The biases, which all ranks have alike."""
        whole = (self.experts,)
        place = Place(whole, (0,), whole, whole)
        return {
            f"{name}.bias": (leaf.bias, place)
            for name, leaf in self.here.items()
            if leaf.bias is not None
        }


def told(rows: Tensor, experts: int) -> dict[str, Tensor]:
    """What is worth knowing of a step: `[layers, E + notes]`, on the device.

    load: of the busiest expert of any layer, in means. idle: share of experts without a token.
    drops: share of choices without a slot. entropy: of scores, in nats. extra: the mean auxiliary
    loss of a token, all layers together.
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

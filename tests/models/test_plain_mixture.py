"""The plain mixture of experts against its formulas, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.models.config import DecoderConfig
from ranvier.models.moe import MoELayer

B, S, D, E, K, WIDTH = 2, 6, 8, 5, 2, 4
KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "sigmoid": {"router": "sigmoid", "router_scale": 2.5, "expert_bias_update_rate": 0.1},
    "raw": {"router_norm": False, "activation": "gelu", "router_logit_scale": 0.5},
    "capacity": {"capacity_factor": 0.75, "shared_expert_mlp": 3},
}


def formula(model: MoELayer, config: DecoderConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and what is added to the loss."""
    slots = math.ceil(config.capacity_factor * S * K / E) if config.capacity_factor else S
    rows, extra = [], x.new_zeros(())
    for sequence in x:
        taken, logits = (
            [0] * E,
            [config.router_logit_scale * model.router.weight @ one for one in sequence],
        )
        found = [one.softmax(0) if config.router == "softmax" else one.sigmoid() for one in logits]
        bias = torch.zeros(E) if model.bias is None else model.bias
        for one, p in zip(sequence, found, strict=True):
            wanted = (p.detach() + bias).tolist()
            best = sorted(range(E), key=wanted.__getitem__)[-K:]
            whole = sum(p[e] for e in best) if config.router_norm else 1.0
            y = torch.zeros_like(one) if model.shared is None else model.shared(one)
            for e in best:
                taken[e] += 1
                if taken[e] <= slots:
                    y = y + config.router_scale * p[e] / whole * expert(model, e, one)
            rows.append(y)
        shares = torch.tensor([n / (S * K) for n in taken])
        mean = sum(p / p.sum() for p in found) / S
        extra = extra + S * config.aux_loss_coeff * E * (shares * mean).sum()
        extra = extra + config.z_loss_coeff * sum(torch.logsumexp(one, 0) ** 2 for one in logits)
    return torch.stack(rows).view_as(x), extra


def expert(model: MoELayer, e: int, x: Tensor) -> Tensor:
    if model.gate is None:
        return model.down[e] @ F.gelu(model.up[e] @ x, approximate="tanh")
    return model.down[e] @ (F.silu(model.gate[e] @ x) * (model.up[e] @ x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_mixture_is_its_formulas(kind: str) -> None:
    torch.manual_seed(3)
    shape = {"embed": D, "experts": E, "experts_per_token": K, "expert_mlp": WIDTH}
    config = DecoderConfig(**shape, aux_loss_coeff=0.3, z_loss_coeff=0.1, **KINDS[kind])
    model, x = MoELayer(config).double(), torch.randn(B, S, D, dtype=torch.float64)
    if model.bias is not None:
        model.bias.uniform_(-0.2, 0.2)
    x.requires_grad_()
    learned = [x, *model.parameters()]
    y = model(x)
    assert model.aux_loss is not None
    weight = torch.randn_like(y)
    want, extra = formula(model, config, x)
    assert torch.allclose(y, want, atol=1e-13) and torch.allclose(model.aux_loss, extra, atol=1e-13)
    have = torch.autograd.grad((y * weight).sum() + model.aux_loss, learned)
    for a, b in zip(have, torch.autograd.grad((want * weight).sum() + extra, learned), strict=True):
        assert torch.allclose(a, b, atol=1e-12)

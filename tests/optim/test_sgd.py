"""SGD has the bits of `torch.optim.SGD`."""

from __future__ import annotations

import pytest
import torch

from ranvier.optim import sgd
from ranvier.optim.adamw import UpdateScalars

LR, BETA = 0.05, 0.9


def scalars(*, good: bool = True) -> UpdateScalars:
    step = torch.ones((), dtype=torch.float64)
    return UpdateScalars.for_update(step, torch.tensor(good), None, (0.9, 0.95), LR)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weights_have_the_bits_of_torch(decay: float) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(37, 5))
    weight = theirs.detach().clone().flatten()
    momentum = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([theirs], lr=LR, momentum=BETA, weight_decay=decay)
    for step in range(20):
        theirs.grad = torch.randn(37, 5)
        optimizer.step()
        grad = theirs.grad.flatten()
        sgd.sgd_update(weight, momentum, grad, now=scalars(), beta=BETA, decay=decay)
        assert torch.equal(weight.view(37, 5), theirs.detach()), step


def test_a_skipped_update_changes_nothing() -> None:
    weight, momentum, grad = torch.ones(4), torch.ones(4), torch.full((4,), torch.nan)
    sgd.sgd_update(weight, momentum, grad, now=scalars(good=False), beta=BETA, decay=0.1)
    assert torch.equal(weight, torch.ones(4)) and torch.equal(momentum, torch.ones(4))

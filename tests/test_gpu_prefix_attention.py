"""On a GPU, attention with a prefix uses the flash kernel and equals float64 within bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranvier.models.document_attention import Documents, can_use_flash_kernel
from ranvier.models.prefix_attention import prefixed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLES, SEQ, HEADS, KV_HEADS, HEAD_DIM = 3, 192, 8, 2, 64


def draw_inputs(prefix_tokens: int) -> list[Tensor]:
    """Queries, keys and values of tokens, and keys and values of the prefix, in bf16 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (SAMPLES, SEQ, HEADS, HEAD_DIM),
        (SAMPLES, SEQ, KV_HEADS, HEAD_DIM),
        (SAMPLES, SEQ, KV_HEADS, HEAD_DIM),
        (SAMPLES * prefix_tokens, KV_HEADS, HEAD_DIM),
        (SAMPLES * prefix_tokens, KV_HEADS, HEAD_DIM),
    ]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def attend(inputs: list[Tensor], is_packed: bool, window: int) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    device = leaves[0].device
    documents = None
    if is_packed:
        # Sample 0 has three documents, sample 1 has two.
        numbers = torch.zeros(SAMPLES, SEQ, dtype=torch.long)
        numbers[0, 50:] = 1
        numbers[0, 130:] = 2
        numbers[1, 7:] = 1
        documents = Documents.from_ids(numbers, device)
    y = prefixed_attention(*leaves, documents, window)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).sin()
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y))]


def relative(found: Tensor, want: Tensor) -> float:
    return float((found.cpu().double() - want).norm() / want.norm())


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("is_packed", [False, True], ids=["samples", "packed"])
@pytest.mark.parametrize("prefix_tokens", [1, 48])
def test_equals_float64(prefix_tokens: int, is_packed: bool, window: int) -> None:
    inputs = draw_inputs(prefix_tokens)
    want = attend([x.double() for x in inputs], is_packed, window)
    on_device = [x.cuda() for x in inputs]
    assert can_use_flash_kernel(on_device[0].flatten(0, 1))
    found = attend(on_device, is_packed, window)
    names = ("y", "dq", "dk", "dv", "d prefix k", "d prefix v")
    for name, have, wanted in zip(names, found, want, strict=True):
        assert have.dtype == torch.bfloat16 and have.isfinite().all(), name
        assert relative(have, wanted) < 1e-2, name

"""Matmuls for few rows on a CPU are those of torch."""

from __future__ import annotations

import pytest
import torch

from ranvier.nn.matmul import MAX_COLUMNS, WeightFirstMatmul


@pytest.mark.parametrize("rows", [0, 1, 2, MAX_COLUMNS, MAX_COLUMNS + 1])
def test_weights_first_is_the_product(rows: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(12, 8, dtype=torch.float64)
    x = torch.randn(rows, 8, dtype=torch.float64)
    y = WeightFirstMatmul().forward(x, w)
    assert y.is_contiguous()
    torch.testing.assert_close(y, x @ w.T, rtol=1e-12, atol=1e-12)

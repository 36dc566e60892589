"""The matmuls of inference are those of torch, and rows do not depend on each other."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ranvier.nn.inference_matmul import BatchInvariantMatmul, ThinMatmul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(4096, 4096), (192, 4096), (1000, 136), (2048, 8192), (4096, 1000), (70_003, 264)]
"""Outputs and inputs."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 32, 33, 104, 129])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", [ThinMatmul(), BatchInvariantMatmul()])
def test_products(
    backend: ThinMatmul | BatchInvariantMatmul,
    dtype: torch.dtype,
    rows: int,
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape, device="cuda", dtype=dtype)
    x = torch.randn(rows, shape[1], device="cuda", dtype=dtype)
    want = x.double() @ w.double().T
    far = float((backend.forward(x, w).double() - want).abs().max()) / shape[1] ** 0.5
    assert far < (3e-2 if dtype == torch.bfloat16 else 1e-4), far


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_do_not_depend_on_their_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape, device="cuda", dtype=dtype)
    x = torch.randn(1500, shape[1], device="cuda", dtype=dtype)
    whole = BatchInvariantMatmul().forward(x, w)
    for rows in (1, 2, 15, 16, 17, 33, 64, 65, 200, 1000):
        assert torch.equal(BatchInvariantMatmul().forward(x[:rows], w), whole[:rows]), rows


def test_a_weight_that_is_stored_transposed() -> None:
    torch.manual_seed(0)
    w = torch.randn(136, 192, device="cuda").T
    x = torch.randn(5, 136, device="cuda")
    assert torch.equal(
        BatchInvariantMatmul().forward(x, w), BatchInvariantMatmul().forward(x, w.contiguous())
    )


def test_a_weight_that_is_not_aligned() -> None:
    """Loads of tiles need an aligned first element, and such a weight goes another way."""
    torch.manual_seed(0)
    flat = torch.randn(64 * 128 + 1, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(5, 128, device="cuda", dtype=torch.bfloat16)
    w = flat[1:].view(64, 128)
    expected = x.double() @ w.double().T
    assert float((ThinMatmul().forward(x, w).double() - expected).abs().max()) < 0.3


def test_the_library_of_the_process_stays(capfd: pytest.CaptureFixture[str]) -> None:
    preferred = torch.backends.cuda.preferred_blas_library()
    x, w = (torch.randn(n, 128, device="cuda", dtype=torch.bfloat16) for n in (48, 4096))
    libraries = []
    linear = torch.nn.functional.linear

    def record_library(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        libraries.append(torch.backends.cuda.preferred_blas_library())
        return linear(x, w)

    with mock.patch.object(torch.nn.functional, "linear", record_library):
        ThinMatmul().forward(x, w)
    assert libraries == [torch._C._BlasBackend.Cublaslt]
    assert torch.backends.cuda.preferred_blas_library() == preferred
    assert capfd.readouterr().err == "", "torch says that the setting is experimental"


def test_nothing_to_compute() -> None:
    for num_rows, num_outputs in ((0, 64), (5, 0), (40, 0)):
        x, w = (
            torch.randn(n, 128, device="cuda", dtype=torch.bfloat16)
            for n in (num_rows, num_outputs)
        )
        assert ThinMatmul().forward(x, w).shape == (num_rows, num_outputs)

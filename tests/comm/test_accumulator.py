"""Sums of gradients: kept as they come, widened only where something is added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equivalence import batch_of
from ranvier.comm.accumulator import GradientAccumulator, flatten_pieces
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import forward_backward

WIDE, CPU = torch.float32, torch.device("cpu")


def half(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def covered(total: GradientAccumulator) -> list[tuple[int, list[float]]]:
    """Pieces that lie one after the other and make up the whole."""
    pieces = total.covering_pieces(CPU)
    ends = [start + piece.numel() for start, piece in pieces]
    assert [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] == total.size
    return [(start, piece.tolist()) for start, piece in pieces]


def test_what_came_once_is_kept_as_it_came() -> None:
    total, grad = GradientAccumulator(4, WIDE), half(1, 2, 3, 4)
    total.add_grad(0, grad)
    ((start, piece),) = total.covering_pieces(CPU)
    assert start == 0 and piece.dtype == torch.bfloat16
    assert piece.data_ptr() == grad.data_ptr()
    total = GradientAccumulator(6, WIDE)
    total.add_grad(0, torch.ones(2, 3))
    assert covered(total) == [(0, [1.0] * 6)]


def test_more_is_added_widely_and_not_in_place() -> None:
    total, first, second = GradientAccumulator(2, WIDE), half(256, 1), half(1, 2**-9)
    total.add_grad(0, first)
    total.add_grad(0, second)
    total.add_grad(0, second)
    ((_, piece),) = total.covering_pieces(CPU)
    # in bf16 256 + 1 is 256 and 1 + 2^-9 is 1
    assert piece.dtype == WIDE and piece.tolist() == [258.0, 1.0 + 2**-8]
    assert first.tolist() == [256.0, 1.0] and second.tolist() == [1.0, 2**-9]


def test_missing_ranges_are_zeros_and_pieces_are_in_order() -> None:
    total = GradientAccumulator(9, WIDE)
    total.add_grad(6, half(3, 4))
    total.add_grad(1, half(1, 2))
    assert covered(total) == [(0, [0]), (1, [1, 2]), (3, [0, 0, 0]), (6, [3, 4]), (8, [0])]
    assert (
        total.flat_grad(CPU).tolist() == [0, 1, 2, 0, 0, 0, 3, 4, 0]
        and total.flat_grad(CPU).dtype == WIDE
    )
    assert covered(GradientAccumulator(3, WIDE)) == [(0, [0, 0, 0])]


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_other_ranges_that_overlap_make_one(start: int) -> None:
    """As packed weights and their parts do."""
    total, first, other = GradientAccumulator(5, WIDE), half(1, 2), half(10, 20)
    total.add_grad(1, first)
    total.add_grad(4, half(5))
    total.add_grad(start, other)
    want = torch.tensor([0.0, 1, 2, 0, 5])
    want[start : start + 2] += other
    if start == 1:  # the same range
        assert covered(total) == [(0, [0]), (1, [11, 22]), (3, [0]), (4, [5])]
    else:
        assert covered(total) == [(0, want.tolist())]
    assert torch.equal(total.flat_grad(CPU), want) and first.tolist() == [1.0, 2.0]


def test_one_piece_is_not_copied() -> None:
    x = torch.ones(3)
    assert flatten_pieces([(0, x)], WIDE) is x
    assert flatten_pieces([(0, x), (3, half(2))], WIDE).tolist() == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without products in bf16
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_a_step_in_bf16(micro_batches: int) -> None:
    """Of one micro-batch those of blocks stay in bf16; more are added in fp32."""
    config = DecoderConfig(layers=2, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=29)
    grid = Grid({})
    model = parallelize(Decoder(config), grid, dtype=torch.bfloat16)
    batch = batch_of("llama", samples=4, packed=False)
    forward_backward(model, batch.split_micro_batches(grid, 4 // micro_batches))
    found = {
        bucket.name: pieces
        for bucket, pieces in get_parallel_model(model).bucket_scheduler.finish_gradients()
    }
    assert {"blocks.0", "blocks.1", "vectors"} <= {*found}
    for name, pieces in found.items():
        kept = micro_batches == 1 and name.startswith("blocks.")
        assert {piece.dtype for _, piece in pieces} == {torch.bfloat16 if kept else WIDE}, name
        assert all(bool(piece.isfinite().all()) and bool(piece.any()) for _, piece in pieces), name

"""Dropout: equal to the bit on every grid and in recomputation, different elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equivalence import batch_of, copied, gradients, micros_of
from pool import Pool
from ranvier.config.plan import Plan
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import Shard, Sharding, ShardingTable
from ranvier.train.step import forward_backward
from states import assemble

SHAPE = (8, 8, 16)
DIMS = ("batch", "seq", "embed")


class Dropping(nn.Module):
    def __init__(self, p: float = 0.25, packed: int = 1) -> None:
        super().__init__()
        self.sizes = {"embed": 16 // packed}
        self.dims = {"drop": ((packed, "embed") if packed > 1 else "embed",)}
        self.drop = nn.Dropout(p)


def dropped(grid: Grid, seed: int, first: int, packed: int = 1) -> tuple[Tensor, Shard]:
    """My part of ones after dropout. packed: dims that are packed into the features."""
    model = parallelize(Dropping(packed=packed), grid, seed=seed)
    place = Sharding.from_dims(
        SHAPE,
        (*DIMS[:2], (packed, "embed")),
        ShardingTable().activation_rule("embed"),
        grid.degrees,
    ).shard_at(grid.index)
    rows = slice(place.global_offset[0], place.global_offset[0] + place.valid_shape[0])
    model.parallel.step_context.samples = torch.arange(first, first + 8)[rows]
    return model.drop(place.slice_from(torch.ones(SHAPE)).flatten(2)), place


def whole(parts: list[tuple[Tensor, Shard]]) -> Tensor:
    return assemble([{"x": part} for part in parts])["x"]


def test_mask_is_the_same_on_every_grid(pool: Pool) -> None:
    one = whole(pool.on_grid({}, dropped, 1, 0))
    assert 0.15 < (one == 0).float().mean().item() < 0.35
    assert torch.equal(one.unique(), torch.tensor([0.0, 1.0]) / 0.75)
    for degrees in ({"row": 2, "col": 2, "depth": 2}, {"row": 8}, {"col": 4, "data": 2}):
        assert torch.equal(whole(pool.on_grid(degrees, dropped, 1, 0)), one)


def test_mask_of_packed_dims_is_the_same_on_every_grid(pool: Pool) -> None:
    """A rank has its part of each of the packed dims."""
    one = whole(pool.on_grid({}, dropped, 1, 0))
    for degrees in ({"col": 2, "depth": 2}, {"row": 2, "col": 4}):
        packed = whole(pool.on_grid(degrees, dropped, 1, 0, 2))
        assert torch.equal(packed.view(SHAPE), one.view(SHAPE))


def test_mask_depends_on_seed_and_sample(pool: Pool) -> None:
    one = whole(pool.on_grid({}, dropped, 1, 0))
    assert not torch.equal(whole(pool.on_grid({}, dropped, 2, 0)), one)
    later = whole(pool.on_grid({}, dropped, 1, 4))
    assert torch.equal(later[:4], one[4:]) and not torch.equal(later[4:], one[:4])


def trained(
    grid: Grid, recompute: str, inner: str
) -> tuple[float, dict[str, tuple[Tensor, Shard]]]:
    """Loss and gradients of a decoder that drops."""
    torch.manual_seed(1)
    config = DecoderConfig(layers=2, embed=16, heads=8, head_dim=4, mlp=24, vocab=29, dropout=0.2)
    plan = Plan(recompute=recompute, col_splits=inner).with_degrees(grid.degrees)  # type: ignore[arg-type]
    model = parallelize(Decoder(config).double(), grid, plan)
    batch = batch_of("llama", samples=8, packed=False)
    loss = forward_backward(model, micros_of(batch, grid, 1)).item()
    return loss, copied(gradients(model.parallel))


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training_with_dropout_is_the_same_on_a_grid(pool: Pool, recompute: str) -> None:
    ((loss, grads),) = pool.on_grid({}, trained, "none", "samples")
    want = assemble([grads])
    for inner in ("samples", "features"):
        results = pool.on_grid({"depth": 2, "row": 2, "col": 2}, trained, recompute, inner)
        assert [found for found, _ in results] == pytest.approx([loss] * 8, rel=1e-12)
        have = assemble(grads for _, grads in results)
        for name, grad in want.items():
            assert torch.allclose(have[name], grad, rtol=0, atol=1e-12 * grad.abs().max().item()), (
                name
            )


def test_evaluation_drops_nothing_and_samples_must_be_known() -> None:
    model = parallelize(Dropping(), Grid({}))
    x = torch.ones(SHAPE)
    with pytest.raises(
        ShardingError,
        match=r"drop draws random numbers, .* Set model\.parallel\.step_context\.samples",
    ):
        model.drop(x)
    assert model.eval().drop(x) is x

"""Values from counters: equal to the bit on every grid, and as random as they should be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ranvier import counter_rng
from ranvier.config.plan import AXES
from ranvier.sharding import WEIGHT_RULE, Dim, Shard, Sharding

ONE = dict.fromkeys(AXES, 1)
KNOWN_KEY = 4264820010401239080
KNOWN_NORMAL = [-0.03887939453125, 1.4773406982421875, -0.6511383056640625, -0.0154876708984375]


def places(sharding: Sharding, degrees: dict[str, int]) -> Iterator[Shard]:
    for place in product(*(range(n) for n in degrees.values())):
        yield sharding.shard_at(dict(zip(degrees, place, strict=True)))


def draw(place: Shard, **options: Any) -> Tensor:
    return counter_rng.init_shard(place, **{"seed": 3, "name": "w", "std": 0.5, **options})


def whole(*shape: int, **options: Any) -> Tensor:
    """The values of a tensor on one rank."""
    sharding = Sharding.from_dims(shape, ["whole"] * len(shape), WEIGHT_RULE, ONE)
    return draw(next(places(sharding, ONE)), **options)


WEIGHT_DIMS: list[tuple[list[int], list[Dim]]] = [
    ([12, 12], ["heads", "embed"]),
    ([12, 12], ["embed", "mlp"]),
    ([7, 12], ["vocab", "embed"]),
    ([36, 12], [(3, "heads"), "embed"]),
    ([12, 36], ["embed", (3, "heads")]),
    ([12], ["embed"]),
]


@settings(max_examples=60)
@given(
    depth=st.sampled_from([1, 2, 5]),
    row=st.sampled_from([1, 2, 3, 4]),
    col=st.sampled_from([1, 2, 3]),
    case=st.sampled_from(WEIGHT_DIMS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_every_grid_starts_bitwise_equal(
    depth: int, row: int, col: int, case: Any, dtype: torch.dtype
) -> None:
    """The parts of all ranks are those of the tensor drawn on one rank, padding zero."""
    shape, dims = case
    degrees = ONE | {"depth": depth, "row": row, "col": col}
    expected = whole(*shape, dtype=dtype)
    sharding = Sharding.from_dims(shape, dims, WEIGHT_RULE, degrees, gather_axes=("depth",))
    for place in places(sharding, degrees):
        assert torch.equal(draw(place, dtype=dtype), place.slice_from(expected))


def test_constants_fill_the_part_but_not_the_padding() -> None:
    degrees = ONE | {"row": 4}
    sharding = Sharding.from_dims([5], ["vocab"], WEIGHT_RULE, degrees)
    held = [draw(place, std=0.0, mean=2.0).tolist() for place in places(sharding, degrees)]
    assert held == [[2.0, 2.0], [2.0, 2.0], [2.0, 0.0], [0.0, 0.0]]


def test_moments_and_shape_of_the_distribution() -> None:
    """Against the standard errors of a sample of a million; the fourth moment is Irwin-Hall's."""
    count = 1_000_000
    x = whole(count, std=1.0)
    assert abs(x.mean().item()) < 5 / math.sqrt(count)
    assert abs(x.square().mean().item() - 1.0) < 5 * math.sqrt(2 / count)
    assert abs(x.pow(3).mean().item()) < 5 * math.sqrt(15 / count)
    assert abs(x.pow(4).mean().item() - 2.9) < 5 * math.sqrt(96 / count)
    for bound, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
        assert abs((x.abs() < bound).double().mean().item() - share) < 0.004
    assert x.abs().max() <= 6.0
    for lag in (1, 2, 3, 1000):  # neighbours are independent
        assert abs((x[lag:] * x[:-lag]).mean().item()) < 5 / math.sqrt(count)


def test_mean_and_std_scale() -> None:
    x = whole(1000, std=1.0)
    assert torch.equal(whole(1000, std=0.02, mean=3.0), x * 0.02 + 3.0)


def test_dtype_rounds_the_same_numbers() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(whole(50, dtype=dtype), whole(50).to(dtype))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(37, 5)
    monkeypatch.setattr(counter_rng, "CHUNK", 8)
    assert torch.equal(whole(37, 5), expected)


def test_names_seeds_and_indices_differ() -> None:
    """No two of many streams agree at an index more often than by chance, or are correlated."""
    streams = [whole(500, name=name, seed=seed) for name in ("a", "b", "ab") for seed in (0, 1)]
    for one, other in combinations(streams, 2):
        assert (one == other).sum() < 3
        assert abs((one * other).mean().item()) < 0.25 * 5 / math.sqrt(500)
    assert (
        counter_rng.random_key(1, "2")
        != counter_rng.random_key(12)
        != counter_rng.random_key(1, 2, "")
    )
    assert counter_rng.random_key(0, "ab", "c") != counter_rng.random_key(0, "a", "bc")
    assert 0 <= counter_rng.random_key(5, "x") < 2**63


def test_known_values() -> None:
    """Checkpoints of the past were drawn from these: they must never change."""
    assert counter_rng.random_key(0, "w") == KNOWN_KEY
    assert (
        counter_rng.normal_values(torch.arange(4), counter_rng.random_key(0, "w")).tolist()
        == KNOWN_NORMAL
    )


def test_scramble_is_a_bijection_of_splitmix() -> None:
    """The finaliser of splitmix64 in Python's integers."""
    mask = 2**64 - 1
    for x in (0, 1, 2**63 - 1, 2**63, mask, 0x9E3779B97F4A7C15):
        z = x
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        signed = torch.tensor(x - 2**64 if x >= 2**63 else x)
        assert counter_rng.scramble_bits(signed).item() & mask == z


def test_a_range_of_a_box_is_refused() -> None:
    place = next(places(Sharding.from_dims([4], ["whole"], WEIGHT_RULE, ONE), ONE)).narrow_flat(
        0, 2
    )
    with pytest.raises(AssertionError):
        draw(place)


def mask(samples: range, tokens: range, features: range, p: float = 0.25) -> Tensor:
    """Which elements of a part of a batch are kept."""
    counters = [torch.tensor(samples).view(-1, 1, 1), torch.tensor(tokens).view(-1, 1)]
    shape = (len(samples), len(tokens), len(features))
    return counter_rng.dropout_mask(
        shape,
        [*counters, torch.tensor(features)],
        torch.tensor(counter_rng.random_key(1, "dropout")),
        p,
    )


def test_dropout_masks_are_equal_on_parts() -> None:
    full = mask(range(8), range(6), range(10))
    for b, s, d in (
        (slice(0, 4), slice(3, 6), slice(5, 10)),
        (slice(7, 8), slice(0, 6), slice(2, 3)),
    ):
        part = mask(range(8)[b], range(6)[s], range(10)[d])
        assert torch.equal(part, full[b, s, d])


def test_dropout_keeps_its_share_everywhere() -> None:
    full = mask(range(64), range(32), range(64), p=0.25).double()
    error = 5 * math.sqrt(0.25 * 0.75)
    assert abs(full.mean().item() - 0.75) < error / math.sqrt(full.numel())
    for dims in ((0, 1), (0, 2), (1, 2)):
        count = full.numel() / full.mean(dims).numel()
        assert (full.mean(dims) - 0.75).abs().max() < error / math.sqrt(count)
    assert mask(range(4), range(4), range(4), p=0.0).all()
    assert not mask(range(4), range(4), range(4), p=1.0).any()


def test_masks_of_different_places_differ() -> None:
    """Swapping the counters of two dims gives another mask: the counters are not just added."""
    rows = Counter(tuple(row.tolist()) for row in mask(range(6), range(6), range(40)).flatten(0, 1))
    assert max(rows.values()) == 1

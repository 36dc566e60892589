"""Input check: compares the inputs of all ranks with what their positions on the grid require.

A rank with the wrong part of a batch computes losses that look right: four ranks with the same
samples have the same mean loss, but the sum of their gradients is four times too large. In debug
mode a digest of every input is compared over the axes of the grid. Over some axes all ranks must
have the same values (`equal_over`); over others each rank must have different values
(`distinct_over`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.comm.consensus import world_axis
from ranvier.config.plan import AXES
from ranvier.errors import DataError
from ranvier.grid import Grid

Digests = npt.NDArray[np.int64]
CONSTANT_FLAG = 1
"""Flag of an input whose elements are all equal; its parts cannot be distinguished."""


@dataclass(frozen=True)
class InputExpectation:
    """Axes over which one input must be equal, and over which it must be distinct.

    If several inputs should be distinct over an axis, it is sufficient that one of them is.
    """

    name: str
    equal_over: tuple[str, ...]
    """Axes over which all ranks have the same values."""
    distinct_over: tuple[str, ...] = ()
    """Axes over which every rank has different values."""


def tensor_digest(x: Tensor) -> int:
    """Returns a 62-bit hash of the shape, dtype and elements of a tensor."""
    held = x.detach().cpu().contiguous()
    text = f"{tuple(held.shape)} {held.dtype}".encode()
    if held.numel():
        data = held.view(-1).view(torch.uint8).numpy().tobytes()
    else:
        data = b""
    # The shift makes it a non-negative int64.
    return int.from_bytes(hashlib.sha256(text + data).digest()[:8], "big") >> 2


def is_constant(x: Tensor) -> bool:
    """Whether all elements are equal, so that parts of the tensor cannot be distinguished."""
    flat = x.detach().flatten()
    return flat.numel() == 0 or bool((flat == flat[0]).all())


def check_inputs(
    inputs: Mapping[str, Tensor],
    expected: Sequence[InputExpectation],
    grid: Grid,
    device: torch.device | str,
    *,
    remedy: str,
) -> None:
    """Raises on all ranks if an input is equal or different over the wrong axis.

    remedy: the last sentence of the error.
    Communicates: all-gather of two numbers per input over all axes.
    """
    if grid.world_size == 1 or not grid.connected or not expected:
        return
    rows = [
        [tensor_digest(inputs[one.name]), CONSTANT_FLAG if is_constant(inputs[one.name]) else 0]
        for one in expected
    ]
    mine = torch.tensor(rows, dtype=torch.int64, device=device).flatten()
    axis = world_axis(grid)
    every = collectives.all_gather(mine, axis, 0).wait().cpu().numpy()
    by_rank = np.empty((grid.world_size, len(expected), 2), dtype=np.int64)
    # The order along the axis may differ from the order of the global ranks.
    by_rank[list(axis.ranks)] = every.reshape(by_rank.shape)
    places = by_rank[grid.ranks]  # (pipe, data, ..., col, inputs, 2)
    digests = places[..., 0]
    constant = places[..., 1] == CONSTANT_FLAG
    # Every rank has all digests and runs the same checks, so that all raise the same error.
    for number, one in enumerate(expected):
        for name in one.equal_over:
            _check_equal_over_axis(one.name, digests[..., number], name, grid, remedy)
    for name in AXES:
        numbers = [
            number
            for number, one in enumerate(expected)
            if name in one.distinct_over and not constant[..., number].any()
        ]
        if numbers:
            names = ", ".join(repr(expected[number].name) for number in numbers)
            _check_distinct_over_axis(names, digests[..., numbers], name, grid, remedy)


def _check_equal_over_axis(name: str, values: Digests, axis: str, grid: Grid, remedy: str) -> None:
    """Raises unless all ranks of an axis have the same digest."""
    first = np.take(values, [0], AXES.index(axis))
    odd = np.argwhere(values != first)
    if len(odd) == 0:
        return
    one, other = _coordinate_pair(odd[0], axis)
    raise DataError(
        f"Ranks {grid.ranks[one]} and {grid.ranks[other]} received different values of {name!r}. "
        f"They differ only in their index on the axis {axis} (size {grid.degrees[axis]}), and all "
        f"ranks of {axis} must receive the same values. {remedy}"
    )


def _check_distinct_over_axis(
    names: str, values: Digests, axis: str, grid: Grid, remedy: str
) -> None:
    """Raises if a rank of an axis has the same digests as the first rank for all inputs.

    Some inputs, e.g. positions, may be equal.
    """
    along = AXES.index(axis)
    size = grid.degrees[axis]
    if size == 1:
        return
    same = (values == np.take(values, [0], along)).all(-1)
    # The first rank equals itself.
    np.moveaxis(same, along, 0)[0] = False
    odd = np.argwhere(same)
    if len(odd) == 0:
        return
    one, other = _coordinate_pair(odd[0], axis)
    raise DataError(
        f"Ranks {grid.ranks[one]} and {grid.ranks[other]} received the same values of {names}. "
        f"They differ only in their index on the axis {axis} (size {size}), and each rank of "
        f"{axis} must receive its own part: gradients are summed over {axis}, so equal parts would "
        f"count {size} times. {remedy}"
    )


def _coordinate_pair(place: Digests, axis: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the coordinates of the first rank of an axis, and of the rank at `place`."""
    other = tuple(int(i) for i in place)
    along = AXES.index(axis)
    return (*other[:along], 0, *other[along + 1 :]), other

"""Line: the communicator of a kind of message between stages."""

from __future__ import annotations

from ranvier.grid import Axis, Grid
from ranvier.pipeline.messages import BACKWARD, FORWARD


def line(grid: Grid, way: str, tag: int, *, wraps: bool = False) -> Axis:
    """The pipe axis for messages of a way and tag; wraps: between the last stage and the first.

    Each direction has a communicator of its own. NCCL, which knows no tags and lets a send wait for
    a receive between the same two ranks, has one for each kind.
    """
    known = way if way in (FORWARD, BACKWARD) else FORWARD
    if grid.tagged:
        return grid.axis("pipe", channel=known)
    return grid.axis("pipe", channel=f"{way} {tag}{' around' * wraps}")

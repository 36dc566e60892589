"""Error messages for pipeline messages that do not arrive or cannot be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ranvier.comm.p2p import Key
from ranvier.pipeline.traffic import (
    BACKWARD,
    EMBEDDING_GRAD,
    EMBEDDING_ROWS,
    FORWARD,
    HEAD_GRAD_PART,
    HEAD_INPUT,
)

if TYPE_CHECKING:
    from ranvier.pipeline.executor import PipelineExecutor

MESSAGE_CONTENTS = {
    FORWARD: "activation",
    BACKWARD: "gradient",
    EMBEDDING_ROWS: "activation",
    HEAD_INPUT: "activation",
    HEAD_GRAD_PART: "gradient",
    EMBEDDING_GRAD: "gradient",
}
"""Content of each kind of message, as used in errors and job records."""


def describe_lost_message(
    at: PipelineExecutor, key: Key, number: int, error: BaseException | None
) -> str:
    """Describes a message that did not arrive. error: why its receive failed; None for a
    timeout.
    """
    if error is not None:
        why = f" ({error})"
    else:
        why = ""
    if error is not None:
        within = ""
    else:
        within = f" within {at.grid.timeout_seconds:g} s"
    return (
        f"Stage {at.stage.index} (rank {at.grid.rank}) did not receive "
        f"{describe_message(at, key, number)}"
        f"{within}{why}. {STAGES_RULE}"
    )


def describe_wait(at: PipelineExecutor, key: Key, number: int) -> str:
    """Describes the message that a stage waits for."""
    return f"stage {at.stage.index} waits for {describe_message(at, key, number)}"


def describe_message(at: PipelineExecutor, key: Key, number: int) -> str:
    """Describes a message to this stage and its sender."""
    (way, chunk), stage = key, at.stage
    # Except for messages between neighbors, the second part of a key is the sending stage.
    other = chunk
    if way in (FORWARD, BACKWARD):
        other = (stage.index + (-1 if way == FORWARD else 1)) % stage.num_stages
    between = len(stage.chunks) > 1 and way in (FORWARD, BACKWARD)
    if between:
        of_chunk = f" of chunk {chunk}"
    else:
        of_chunk = ""
    return (
        f"the {MESSAGE_CONTENTS[way]} of micro-batch {number}{of_chunk} from stage {other} ({way})"
    )


def describe_unsent_message(
    at: PipelineExecutor, way: str, number: int, error: Exception, to: int | None = None
) -> str:
    """Describes a message that cannot be sent."""
    stage = at.stage
    if to is None:
        other = (stage.index + (1 if way == FORWARD else -1)) % stage.num_stages
    else:
        other = to
    return (
        f"Stage {stage.index} (rank {at.grid.rank}) could not send the {MESSAGE_CONTENTS[way]} of "
        f"micro-batch {number} to stage {other} ({way}): {error}. {STAGES_RULE}"
    )


STAGES_RULE = (
    "All stages must stay alive and respond. Check the log of that stage first, or raise "
    "train.comm_timeout_seconds if it is only slow."
)

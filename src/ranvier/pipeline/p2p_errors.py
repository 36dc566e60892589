"""Lost: what is said of messages that do not come or cannot be sent."""

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
"""What messages bring."""


def describe_lost_message(
    at: PipelineExecutor, key: Key, number: int, error: BaseException | None
) -> str:
    """Of a message that does not come; error: what its receive says, else time is over."""
    if error is not None:
        why = f" ({error})"
    else:
        why = ""
    if error is not None:
        within = ""
    else:
        within = f" within {at.grid.timeout_seconds:g} s"
    return (
        f"Stage {at.stage.index} (rank {at.grid.rank}) did not get "
        f"{describe_message(at, key, number)}"
        f"{within}{why}. {STAGES_RULE}"
    )


def describe_wait(at: PipelineExecutor, key: Key, number: int) -> str:
    """Of a message that a stage waits for."""
    return f"stage {at.stage.index} waits for {describe_message(at, key, number)}"


def describe_message(at: PipelineExecutor, key: Key, number: int) -> str:
    """A message to this stage, and where it comes from."""
    (way, chunk), stage = key, at.stage
    other = chunk  # who sends what is no matter of a chunk
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
    """Of a message that cannot be sent."""
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
    "All stages must stay alive and answer. Look at the messages of that stage first; "
    "train.timeout says how long to wait."
)

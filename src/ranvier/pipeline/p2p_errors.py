"""Lost: what is said of messages that do not come or cannot be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ranvier.comm.p2p import Key
from ranvier.pipeline.traffic import BACKWARD, FINAL, FORWARD, PART, RETURN, ROWS

if TYPE_CHECKING:
    from ranvier.pipeline.executor import Runtime

WORDS = {
    FORWARD: "activation",
    BACKWARD: "gradient",
    ROWS: "activation",
    FINAL: "activation",
    PART: "gradient",
    RETURN: "gradient",
}
"""What messages bring."""


def lost_words(at: Runtime, key: Key, number: int, error: BaseException | None) -> str:
    """Of a message that does not come; error: what its receive says, else time is over."""
    why = f" ({error})" if error is not None else ""
    within = "" if error is not None else f" within {at.grid.timeout_seconds:g} s"
    return (
        f"Stage {at.stage.index} (rank {at.grid.rank}) did not get {message_words(at, key, number)}"
        f"{within}{why}. {RULE}"
    )


def waiting_words(at: Runtime, key: Key, number: int) -> str:
    """Of a message that a stage waits for."""
    return f"stage {at.stage.index} waits for {message_words(at, key, number)}"


def message_words(at: Runtime, key: Key, number: int) -> str:
    """A message to this stage, and where it comes from."""
    (way, chunk), stage = key, at.stage
    other = chunk  # who sends what is no matter of a chunk
    if way in (FORWARD, BACKWARD):
        other = (stage.index + (-1 if way == FORWARD else 1)) % stage.count
    between = len(stage.chunks) > 1 and way in (FORWARD, BACKWARD)
    of_chunk = f" of chunk {chunk}" if between else ""
    return f"the {WORDS[way]} of micro-batch {number}{of_chunk} from stage {other} ({way})"


def unsent_words(
    at: Runtime, way: str, number: int, error: Exception, to: int | None = None
) -> str:
    """Of a message that cannot be sent."""
    stage = at.stage
    other = (stage.index + (1 if way == FORWARD else -1)) % stage.count if to is None else to
    return (
        f"Stage {stage.index} (rank {at.grid.rank}) could not send the {WORDS[way]} of "
        f"micro-batch {number} to stage {other} ({way}): {error}. {RULE}"
    )


RULE = (
    "All stages must stay alive and answer. Look at the messages of that stage first; "
    "train.timeout says how long to wait."
)

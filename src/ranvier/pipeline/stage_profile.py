"""Stage profile: measured times of the parts of a model, used to balance its stages."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

from ranvier.errors import PlanError
from ranvier.system import safe_files

TIMELINE_FILE = "timeline.json"
"""File in a run directory with the jobs of all stages in one step."""
JOB_KINDS = ("forward", "backward", "weight")


def load_stage_times(path: Path) -> tuple[float, ...]:
    """Returns the seconds per part of a model, from the timeline of a run or from a TOML table."""
    remedy = "Pass a run directory with a timeline.json, or a TOML file with forward = [...]."
    try:
        if path.is_dir():
            found = json.loads(safe_files.read_text(path / TIMELINE_FILE))["part_seconds"]
            seconds = tuple(float(one) for one in found)
        else:
            table = tomllib.loads(path.read_text())
            # Per part, the sum of all kinds of jobs that the file has.
            sums = zip(*(table[kind] for kind in JOB_KINDS if kind in table), strict=True)
            seconds = tuple(float(sum(one)) for one in sums)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"plan.stage_profile={str(path)!r} cannot be read: {error}. It must contain the "
            f"measured times of the parts of the model. {remedy}"
        ) from None
    if not seconds or not all(0.0 <= one < math.inf for one in seconds) or not any(seconds):
        raise PlanError(
            f"plan.stage_profile={str(path)!r} has the times {list(seconds)}. Each part needs one "
            f"finite time, and not all can be 0. {remedy}"
        )
    return seconds

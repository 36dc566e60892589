"""Lines of JSON: the objects of a file, each with the number and the text of its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ranvier.errors import DataError


def read_json_lines(path: Path, what: str) -> Iterator[tuple[int, str, Any]]:
    """Number, text and value of each line that is not empty; None for what is no JSON.

    what: what the lines are, for the error if they cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other ends of lines may be in texts
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}. "
            f"{what} are lines of JSON. Check the path."
        ) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, line, json.loads(line)
            except (ValueError, RecursionError):
                yield number, line, None

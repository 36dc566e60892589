"""JSON lines: the values of a file, each with the number and the text of its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ranvier.errors import DataError


def read_json_lines(path: Path, what: str) -> Iterator[tuple[int, str, Any]]:
    """Yields number, text and value of each non-empty line; the value is None for invalid JSON.

    what: what the lines contain, for the error if the file cannot be read.
    """
    try:
        # Not splitlines(): JSON strings may contain other line separators, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}. "
            f"{what} must be in JSON Lines format. Check the path."
        ) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, line, json.loads(line)
            except (ValueError, RecursionError):
                yield number, line, None

"""Special tokens and settings from the files next to a `tokenizer.json`.

Special tokens have names such as `eos_token` in `tokenizer_config.json`, otherwise in
`special_tokens_map.json`. Code that these files name is never executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranvier.errors import DataError
from ranvier.system import safe_files

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"


def read_tokenizer_file(path: Path) -> str:
    """The text of a file of a tokenizer."""
    try:
        return safe_files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path} cannot be read: {reason}. It should contain special tokens or the chat "
            "template of a tokenizer. Check data.chat_template and the files next to the "
            "tokenizer.json."
        ) from None


def read_tokenizer_config(folder: Path | None, name: str = TOKENIZER_CONFIG) -> dict[str, Any]:
    """The JSON object of a file of a tokenizer; empty if the file does not exist."""
    if folder is None:
        path = None
    else:
        path = folder / name
    if path is None or not os.path.lexists(path):
        return {}
    try:
        content = json.loads(read_tokenizer_file(path))
        if not isinstance(content, dict):
            raise TypeError(f"it is a {type(content).__name__}, not an object")
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a valid JSON object: {error}. It names the special tokens of a "
            "tokenizer. Copy it again."
        ) from None
    return content


def read_special_tokens(folder: Path | None) -> dict[str, str]:
    """Special tokens by name, from the files of a directory."""
    return _parse_special_tokens(
        read_tokenizer_config(folder, SPECIAL_TOKENS_MAP)
        # The right side wins: tokenizer_config.json takes precedence.
    ) | _parse_special_tokens(read_tokenizer_config(folder))


def save_tokenizer_config(folder: Path, content: Mapping[str, Any]) -> None:
    """Atomically write a tokenizer_config.json."""
    # A hidden name with the process id, then an atomic rename: other ranks never see half a file.
    temporary = folder / f".{TOKENIZER_CONFIG}.{os.getpid()}"
    text = json.dumps(content, indent=1, sort_keys=True)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, folder / TOKENIZER_CONFIG)


def _parse_special_tokens(content: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: strings, or objects with a `content`."""
    extra = content.get("extra_special_tokens")
    values = {**content, **(extra if isinstance(extra, dict) else {})}
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            # Added tokens are objects with further settings.
            text = value.get("content")
        else:
            text = value
        if isinstance(name, str) and name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found

"""Directories written by `Dataset.save_to_disk` of Hugging Face datasets.

Such a directory holds its rows in arrow files, which `state.json` lists, and `dataset_info.json`. A
`DatasetDict` is a directory with `dataset_dict.json` and one such directory per split. The package
itself is not needed to read them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranvier.errors import DataError
from ranvier.system import safe_files

STATE_FILE = "state.json"
INFO_FILE = "dataset_info.json"
SPLITS_FILE = "dataset_dict.json"
ARROW_SUFFIX = ".arrow"


def saved_files(folder: Path, names: Sequence[str]) -> list[Path] | None:
    """The arrow files of a saved dataset, in order; None for other folders. names: its files."""
    if STATE_FILE not in names or not any(name.endswith(ARROW_SUFFIX) for name in names):
        return None
    table = _read_json_object(folder / STATE_FILE)
    listed = table.get("_data_files")
    # An indices mapping selects rows; ignoring it would train on rows that were filtered out.
    if table.get("_indices_data_files"):
        raise DataError(
            f"{folder} is a dataset that was saved with a selection of rows (_indices_data_files), "
            "but its arrow files contain all rows. Save it again with "
            "dataset.flatten_indices().save_to_disk(...)."
        )
    if isinstance(listed, list):
        each = listed
    else:
        each = []
    files = [one.get("filename") for one in each if isinstance(one, dict)]
    # Only names of files in this directory: a path could lead anywhere.
    sound = [name for name in files if isinstance(name, str) and name in names]
    if not sound or len(sound) != len(each):
        raise DataError(
            f"{folder / STATE_FILE} lists the files {listed!r:.120}. Each must be the name of an "
            "arrow file in the same folder. Save the dataset again with save_to_disk(...)."
        )
    return [folder / name for name in sound]


def only_split(folder: Path, names: Sequence[str]) -> str | None:
    """The single split of a saved DatasetDict; None for other folders."""
    if SPLITS_FILE not in names:
        return None
    splits = _read_json_object(folder / SPLITS_FILE).get("splits")
    if not isinstance(splits, list) or not all(isinstance(one, str) for one in splits):
        raise DataError(
            f"{folder / SPLITS_FILE} lists the splits {splits!r:.120}. Each must be the name of a "
            "folder next to it. Save the dataset again with save_to_disk(...)."
        )
    if len(splits) != 1:
        shown = ", ".join(splits) or "none"
        if "train" in splits:
            first = "train"
        else:
            first = (splits or ["train"])[0]
        raise DataError(
            f"{folder} is a saved DatasetDict with the splits {shown}. A corpus reads one split, "
            f"so that test data is not trained on. Use {folder / first}."
        )
    return str(splits[0])


def metadata_files(names: Sequence[str]) -> set[str]:
    """Files of a directory that describe arrow files and contain no rows."""
    arrow = any(name.endswith(ARROW_SUFFIX) for name in names)
    if arrow or SPLITS_FILE in names:
        return {STATE_FILE, INFO_FILE, SPLITS_FILE}
    return set()


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(safe_files.read_text(path))
        if not isinstance(table, dict):
            raise TypeError(f"it is a {type(table).__name__}, not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {error!s:.200}. It must describe a dataset that save_to_disk "
            "has written. Save the dataset again."
        ) from None
    return table

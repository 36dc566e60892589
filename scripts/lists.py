"""Writes the lists of layers of all built-in model sizes: `python scripts/lists.py`."""

from __future__ import annotations

import json
from dataclasses import replace

from ranvier.config.kinds import named_model
from ranvier.models import MODEL_SIZES, AdapterConfig
from ranvier.planner.model_spec import SPEC_FOLDER
from ranvier.planner.model_spec_torch import build_model_spec


def made(size: str) -> str:
    """Returns the list of a size, as stored in its file."""
    model = replace(build_model_spec(named_model(size), AdapterConfig()), name=size)
    return json.dumps(model.to_dict(), indent=1) + "\n"


if __name__ == "__main__":
    SPEC_FOLDER.mkdir(exist_ok=True)
    for size in MODEL_SIZES:
        (SPEC_FOLDER / f"{size}.json").write_text(made(size))

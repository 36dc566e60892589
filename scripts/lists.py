"""Write the lists of layers of all built-in sizes anew: `python scripts/lists.py`."""

from __future__ import annotations

import json
from dataclasses import replace

from ranvier.models import SIZES, AdapterConfig
from ranvier.planner.model_spec import FOLDER
from ranvier.planner.model_spec_torch import listed


def made(size: str) -> str:
    """The list of a size, as its file holds it."""
    model = replace(listed(SIZES[size], AdapterConfig()), name=size)
    return json.dumps(model.facts(), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for size in SIZES:
        (FOLDER / f"{size}.json").write_text(made(size))

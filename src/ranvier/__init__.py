"""Ranvier: trains models that are too large or too slow for one device, on a grid of seven named
axes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranvier.config.plan import Plan
    from ranvier.grid import Grid
    from ranvier.integrations.accelerate import Accelerator
    from ranvier.integrations.fabric import RanvierStrategy
    from ranvier.integrations.pretrained import from_pretrained
    from ranvier.parallel.full_batch import call_on_full_batch
    from ranvier.parallel.parallelize import parallelize

__version__ = "0.1.0"
__all__ = [
    "Accelerator",
    "Grid",
    "Plan",
    "RanvierStrategy",
    "call_on_full_batch",
    "from_pretrained",
    "parallelize",
]

_HOMES = {
    "Plan": "config.plan",
    "Grid": "grid",
    "parallelize": "parallel.parallelize",
    "call_on_full_batch": "parallel.full_batch",
    "from_pretrained": "integrations.pretrained",
    "RanvierStrategy": "integrations.fabric",
    "Accelerator": "integrations.accelerate",
}


def __getattr__(name: str) -> Any:
    """Imports public names lazily (PEP 562), because importing torch takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ranvier' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ranvier.{_HOMES[name]}"), name)

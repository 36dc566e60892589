"""Ranvier: train models too large or too slow for one device, on one grid with seven named axes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranvier.accelerator import Accelerator
    from ranvier.full_batch import call_on_full_batch
    from ranvier.grid import Grid
    from ranvier.parallel import parallelize
    from ranvier.plan import Plan
    from ranvier.pretrained import from_pretrained
    from ranvier.strategy import RanvierStrategy

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
    "Plan": "plan",
    "Grid": "grid",
    "parallelize": "parallel",
    "call_on_full_batch": "full_batch",
    "from_pretrained": "pretrained",
    "RanvierStrategy": "strategy",
    "Accelerator": "accelerator",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: torch takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ranvier' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ranvier.{_HOMES[name]}"), name)

"""Models in plain PyTorch with named dims. Sizes can be imported without torch, which is slow.

A new model needs one file, one line here and one line in EXAMPLES.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ranvier.models.config import MODEL_SIZES, AdapterConfig, DecoderConfig

if TYPE_CHECKING:
    from ranvier.models.decoder import Decoder
    from ranvier.models.examples import EXAMPLES
    from ranvier.models.lora import build_decoder
    from ranvier.models.recurrent_decoder import RecurrentDecoder

__all__ = [
    "EXAMPLES",
    "MODEL_SIZES",
    "AdapterConfig",
    "Decoder",
    "DecoderConfig",
    "RecurrentDecoder",
    "build_decoder",
]

_HOMES = {
    "Decoder": "decoder",
    "RecurrentDecoder": "recurrent_decoder",
    "build_decoder": "lora",
    "EXAMPLES": "examples",
}


def __getattr__(name: str) -> Any:
    """Imports attributes that need torch at their first access (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ranvier.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ranvier.models.{_HOMES[name]}"), name)

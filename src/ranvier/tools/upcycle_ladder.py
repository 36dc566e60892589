"""Upcycle to a ladder residual: a run whose last layers have one, with the weights of another run.

No weight changes, but the function of the model does: a ladder layer reads a stream without the
last output. So the held-out loss rises at first, and training adapts the layers (Zhang et al. 2025
convert the last 16 or 20 layers of Llama-3.1-8B with 3B tokens).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ranvier.errors import PlanError
from ranvier.models.config import DecoderConfig
from ranvier.tools.upcycle_architecture import upcycle_architecture


def ladder_config(config: DecoderConfig, ladder_layers: int) -> DecoderConfig:
    """Returns the config with a ladder residual in the last layers; raises if impossible."""
    if config.residual == "ladder":
        raise PlanError(
            "The model already has residual='ladder'. Only a model with serial residuals can be "
            "upcycled to a ladder. Use the run that it was made from."
        )
    if not 1 <= ladder_layers <= config.layers:
        raise PlanError(
            f"ladder_layers={ladder_layers} is out of range for a model with {config.layers} "
            "layers. The last layers of the model become ladder layers. Use --ladder-layers 1 to "
            f"{config.layers}, e.g. {max(config.layers // 2, 1)}."
        )
    chosen = tuple(range(config.layers - ladder_layers, config.layers))
    # Empty means all layers.
    layers = () if ladder_layers == config.layers else chosen
    made = replace(config, residual="ladder", ladder_layers=layers)
    problems = made.find_problems()
    if problems:
        raise PlanError(problems)
    return made


def upcycle_to_ladder(source: str, out: Path, *, ladder_layers: int, step: int = -1) -> list[str]:
    """Creates a run with a ladder residual from a run or published model; returns a summary in
    lines.
    """
    config, lines = upcycle_architecture(
        source,
        out,
        lambda dense: ladder_config(dense, ladder_layers),
        lambda config, weights: weights,
        step=step,
    )
    count = sum(config.is_ladder_layer(layer) for layer in range(config.layers))
    return [f"{count} of {config.layers} layers have a ladder residual, in {out}", *lines]

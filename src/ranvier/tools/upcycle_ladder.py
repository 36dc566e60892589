"""Upcycle to a ladder residual: a run whose last layers have one, with the weights of another run.

No weight changes, but the function of the model does: a ladder layer reads a stream without the
last output. So the held-out loss rises at first, and training adapts the layers (Zhang et al. 2025
convert the last 16 or 20 layers of Llama-3.1-8B with 3B tokens).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ranvier.checkpoint.hf.model import PublishedModel, TensorProvider
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.infer.load import find_checkpoint, load_config_from_dir
from ranvier.models.config import DecoderConfig
from ranvier.system import safe_files
from ranvier.system.model_hub import find_model
from ranvier.tools.extend_context import CheckpointWeights
from ranvier.tools.held_out_loss import compare_held_out_losses
from ranvier.tools.upcycle import TOKENIZER_FILES
from ranvier.train import import_export


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
    path = find_model(source)
    # A directory with config.toml is a run; anything else must be a published model.
    if not (path / "config.toml").exists():
        with PublishedModel.open(path) as model:
            run = import_export.build_imported_run(
                model, out, tokenizer=(model.folder / "tokenizer.json").exists()
            )
            config = ladder_config(model.config, ladder_layers)
            return _write_run(model.folder, out, model, run, config)
    run = load_config_from_dir(path)
    config = ladder_config(run.decoder, ladder_layers)
    chosen = None if step < 0 else step
    weights = CheckpointWeights.open(run, find_checkpoint(path, chosen))
    lines = _write_run(path, out, weights, run, config)
    losses, reason = compare_held_out_losses(run, [path, out], [chosen, None])
    if not losses:
        return [*lines, reason]
    dense, first = losses
    return [
        *lines,
        f"Held-out loss before training: {first:.4f} ({first / dense - 1.0:+.1%}), of {source}: "
        f"{dense:.4f}",
    ]


def _write_run(
    origin: Path, out: Path, weights: TensorProvider, run: RunConfig, config: DecoderConfig
) -> list[str]:
    made = RunConfig(model=import_export.to_model_config(config), data=run.data)
    # The run directory appears only once it is complete.
    with import_export.write_atomically(out) as here:
        for name in TOKENIZER_FILES:
            if safe_files.path_exists(origin / name):
                safe_files.copy_file(origin / name, here / name)
        import_export.copy_origin_files(str(origin), here)
        import_export.write_initial_run(here, made, weights, str(origin))
    count = sum(config.is_ladder_layer(layer) for layer in range(config.layers))
    return [f"{count} of {config.layers} layers have a ladder residual, in {out}"]

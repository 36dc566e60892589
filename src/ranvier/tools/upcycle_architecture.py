"""Creates a run with another architecture and the weights of a dense run or published model.

The function of the model changes, so the held-out loss before training is printed next to that of
the run that it begins from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ranvier.checkpoint.hf.model import PublishedModel, TensorProvider
from ranvier.config.run import RunConfig
from ranvier.infer.load import find_checkpoint, load_config_from_dir
from ranvier.models.config import DecoderConfig
from ranvier.system import safe_files
from ranvier.system.model_hub import find_model
from ranvier.tools.extend_context import CheckpointWeights
from ranvier.tools.held_out_loss import compare_held_out_losses
from ranvier.tools.upcycle import TOKENIZER_FILES
from ranvier.train import import_export

ChangeConfig = Callable[[DecoderConfig], DecoderConfig]
"""The config of the dense model to that of the new one."""
AddWeights = Callable[[DecoderConfig, TensorProvider], TensorProvider]
"""The new config and the weights of the dense model to the weights of the new one."""


def upcycle_architecture(
    source: str, out: Path, change: ChangeConfig, add_weights: AddWeights, *, step: int = -1
) -> tuple[DecoderConfig, list[str]]:
    """Creates the run; returns its model, and lines that compare held-out losses.

    source: a run or a published model. step: of the checkpoint of a run; -1 means the latest.
    """
    path = find_model(source)
    # A directory with config.toml is a run; anything else must be a published model.
    if not (path / "config.toml").exists():
        with PublishedModel.open(path) as model:
            run = import_export.build_imported_run(
                model, out, tokenizer=(model.folder / "tokenizer.json").exists()
            )
            config = change(model.config)
            _write_run(model.folder, out, add_weights(config, model), run, config)
        return config, [
            "The held-out loss is not known, as a published model has no data of a run."
        ]
    run = load_config_from_dir(path)
    config = change(run.decoder)
    chosen = None if step < 0 else step
    weights = CheckpointWeights.open(run, find_checkpoint(path, chosen))
    _write_run(path, out, add_weights(config, weights), run, config)
    losses, reason = compare_held_out_losses(run, [path, out], [chosen, None])
    if not losses:
        return config, [reason]
    dense, first = losses
    return config, [
        f"Held-out loss before training: {first:.4f} ({first / dense - 1.0:+.1%}), of {source}: "
        f"{dense:.4f}"
    ]


def _write_run(
    origin: Path, out: Path, weights: TensorProvider, run: RunConfig, config: DecoderConfig
) -> None:
    made = RunConfig(model=import_export.to_model_config(config), data=run.data)
    # The run directory appears only once it is complete.
    with import_export.write_atomically(out) as here:
        for name in TOKENIZER_FILES:
            if safe_files.path_exists(origin / name):
                safe_files.copy_file(origin / name, here / name)
        import_export.copy_origin_files(str(origin), here)
        import_export.write_initial_run(here, made, weights, str(origin))

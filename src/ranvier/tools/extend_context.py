"""Extend context: gives a model with rotary positions a larger maximum position.

Weights do not change; only the rotary frequencies do, which have no weights. With the factor
f = new / original maximum position there are two methods:

    yarn   frequencies with less than 1 rotation in the original length are divided by f, those
           with more than 32 rotations do not change, and cosines and sines are multiplied by
           0.1 · ln(f) + 1 (YaRN)
    theta  the base θ becomes θ · f^(k/(k-2)) for k rotated elements per head: the lowest frequency
           is divided by f, and the highest does not change (NTK-aware scaling)

The model has not seen the new positions before: train it on long sequences afterwards. Learned
positions and LongRoPE, whose factors are searched for one length, cannot be extended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ranvier.checkpoint.convert import CheckpointSource, open_checkpoint
from ranvier.checkpoint.hf.model import PublishedModel, RowPart, TensorProvider
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.infer.load import MASTER_SUFFIX, find_checkpoint, load_config_from_dir
from ranvier.models.config import DecoderConfig
from ranvier.models.lora import ADAPTER_INFIX
from ranvier.system import safe_files
from ranvier.system.model_hub import find_model
from ranvier.system.terminal import command_line
from ranvier.tools.upcycle import TOKENIZER_FILES
from ranvier.train import import_export

ExtensionMethod = Literal["yarn", "theta"]
YARN_BETA_SLOW = 1.0
"""Frequencies with fewer rotations in the original length are divided by the factor (YaRN)."""
YARN_BETA_FAST = 32.0
"""Frequencies with more rotations in the original length do not change (YaRN)."""
MAX_FACTOR = 128
"""Maximum ratio of the new to the original maximum position."""
MAX_POSITION_UNIT = 128
"""Maximum positions are multiples of this many tokens, if the original one is."""


@dataclass(frozen=True)
class CheckpointWeights:
    """The weights of a checkpoint of a run, with adapters merged, as a `TensorProvider`."""

    source: CheckpointSource
    read_tensor: Callable[[str], Tensor]

    @classmethod
    def open(cls, run: RunConfig, checkpoint: Path) -> CheckpointWeights:
        """Opens a checkpoint of a run."""
        source = open_checkpoint(checkpoint)
        return cls(source, import_export.weight_reader(source, run))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""
        return {
            name.removesuffix(MASTER_SUFFIX): tuple(shape)
            for name, (_, shape) in self.source.tensor_specs.items()
            if name.endswith(MASTER_SUFFIX) and ADAPTER_INFIX not in name
        }

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self.source.tensor_specs[f"{name}{MASTER_SUFFIX}"][0]

    def num_bytes(self, name: str) -> int:
        """Size of a tensor in bytes."""
        return math.prod(self.shapes[name]) * self.dtype_of(name).itemsize

    def row_parts(self, name: str) -> Iterator[RowPart]:
        """The whole tensor, as one part."""
        yield 0, self.read_tensor(name)


def extended_config(
    config: DecoderConfig,
    max_position: int,
    *,
    method: ExtensionMethod = "yarn",
    rope_theta: float = 0.0,
    original_max_position: int = 0,
) -> DecoderConfig:
    """Returns the config with the larger maximum position; raises if it is not possible.

    rope_theta: the base for method theta; 0 computes it. original_max_position: the length that the
    model was trained with; 0 means its maximum position.
    """
    original = original_max_position or _original_length(config, method)
    problems = [
        *_position_problems(config, max_position, original),
        *_rope_problems(config, method, rope_theta),
    ]
    if problems:
        raise PlanError(problems)
    longer = replace(config, max_seq=max_position)
    if _has_only_windows(config):
        # No two tokens of an attention are further apart than a window, so no angle is new.
        return longer
    factor = max_position / original
    if method == "theta":
        rotated = int(config.head_dim * config.partial_rotary_factor)
        return replace(longer, rope_theta=rope_theta or scaled_theta(config, factor, rotated))
    # A model that was extended by YaRN before keeps the ratio to the factor of the paper.
    attention = config.attention_factor / yarn_attention_factor(_present_scale(config))
    return replace(
        longer,
        rope="yarn",
        rope_scale=factor,
        original_max_position=original,
        low_freq_factor=config.low_freq_factor if _is_yarn(config) else YARN_BETA_SLOW,
        high_freq_factor=config.high_freq_factor if _is_yarn(config) else YARN_BETA_FAST,
        attention_factor=attention * yarn_attention_factor(factor),
    )


def yarn_attention_factor(factor: float) -> float:
    """Returns the factor of cosines and sines, 0.1 · ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0


def scaled_theta(config: DecoderConfig, factor: float, rotated: int) -> float:
    """Returns the base with which the lowest frequency is divided by the factor.

    rotated: rotated elements per head, at least 4.
    """
    return float(config.rope_theta * factor ** (rotated / (rotated - 2)))


def _is_yarn(config: DecoderConfig) -> bool:
    return config.rope == "yarn" and config.rope_scale != 1.0


def _present_scale(config: DecoderConfig) -> float:
    return config.rope_scale if _is_yarn(config) else 1.0


def _original_length(config: DecoderConfig, method: ExtensionMethod) -> int:
    """Returns the length from which the factor is counted."""
    if method == "yarn" and _is_yarn(config):
        return config.original_max_position
    return config.max_seq


def _has_only_windows(config: DecoderConfig) -> bool:
    windows = [config.window_of_layer(layer) for layer in range(config.layers)]
    return all(0 < window <= config.max_seq for window in windows)


def _position_problems(config: DecoderConfig, wanted: int, original: int) -> list[str]:
    """Returns what is wrong with the new maximum position."""
    present = config.max_seq
    problems = []
    if not 1 <= original <= present:
        problems.append(
            f"original_max_position={original} is invalid for a model with {present:,} positions. "
            f"It must be at least 1 and at most model.max_seq. Use {present}, or leave it out."
        )
        original = present
    if wanted <= present:
        problems.append(
            f"max_position={wanted} is not above the present maximum of {present} (model.max_seq). "
            "A model can only be extended; it reads shorter sequences as it is. Use "
            f"--max-position {2 * present} or more."
        )
        return problems
    if wanted > MAX_FACTOR * original:
        problems.append(
            f"max_position={wanted} is {wanted / original:.0f} times the original maximum of "
            f"{original}. An extension by more than {MAX_FACTOR} times leaves nothing of what the "
            f"model has learned. Use --max-position {MAX_FACTOR * original} or less, and train "
            "before you extend further."
        )
    unit = math.gcd(present, MAX_POSITION_UNIT)
    if wanted % unit:
        problems.append(
            f"max_position={wanted} is not a multiple of {unit}. Long sequences are split evenly "
            f"over devices. Use --max-position {-(-wanted // unit) * unit}."
        )
    return problems


def _rope_problems(config: DecoderConfig, method: ExtensionMethod, theta: float) -> list[str]:
    """Returns why the rotary positions of a model cannot be extended by a method."""
    if config.position_embedding == "learned":
        return [
            f"The model has {config.max_seq} learned positions. Each has weights of its own, so "
            "positions cannot be added without training. Use a model with rotary positions "
            "(model.position_embedding='rope')."
        ]
    if config.rope == "longrope":
        return [
            "The model uses LongRoPE (model.rope='longrope'). Its factors were searched for its "
            "own maximum position. Use the variant of the model with longer positions, or another "
            "model."
        ]
    if method == "yarn" and config.rope_scale != 1.0 and config.rope != "yarn":
        return [
            f"The frequencies of the model are already reduced (model.rope={config.rope!r}, "
            f"model.rope_scale={config.rope_scale:g}). YaRN replaces this and needs the original "
            "ones. Use --method theta."
        ]
    if method == "yarn" and theta != 0.0:
        return [
            f"rope_theta={theta:g} is given with method='yarn'. YaRN keeps the base. Use --method "
            "theta, or leave --rope-theta out."
        ]
    rotated = int(config.head_dim * config.partial_rotary_factor)
    if method == "theta" and theta == 0.0 and rotated < 4:
        return [
            f"A head has {rotated} rotated elements. The formula for theta needs at least 4. Use "
            "--method yarn, or give --rope-theta."
        ]
    if method == "theta" and theta != 0.0 and not config.rope_theta < theta < math.inf:
        return [
            f"rope_theta={theta:g} is not above the present base of {config.rope_theta:g} "
            "(model.rope_theta). Only a larger base extends positions. Use --rope-theta "
            f"{10 * config.rope_theta:g}, or leave it out."
        ]
    return []


def extend_model(
    source: str,
    out: Path,
    *,
    max_position: int,
    method: ExtensionMethod = "yarn",
    rope_theta: float = 0.0,
    original_max_position: int = 0,
    step: int = -1,
) -> list[str]:
    """Creates a run with a longer context from a run or published model; returns a summary in
    lines.
    """
    path = find_model(source)

    def extend(config: DecoderConfig) -> DecoderConfig:
        return extended_config(
            config,
            max_position,
            method=method,
            rope_theta=rope_theta,
            original_max_position=original_max_position,
        )

    # A directory with config.toml is a run; anything else must be a published model.
    if (path / "config.toml").exists():
        run = load_config_from_dir(path)
        config = extend(run.decoder)
        weights = CheckpointWeights.open(run, find_checkpoint(path, None if step < 0 else step))
        lines = _write_run(path, out, weights, run, config)
        is_imported = (path / import_export.ORIGIN_DIR).is_dir()
        if not (is_imported or original_max_position) and run.data.seq_len < run.decoder.max_seq:
            lines.append(
                f"The factor counts from model.max_seq={run.decoder.max_seq}, but the run was "
                f"trained with data.seq_len={run.data.seq_len}. To count from there, pass "
                f"--original-max-position {run.data.seq_len}."
            )
        return lines
    with PublishedModel.open(path) as model:
        run = import_export.build_imported_run(
            model, out, tokenizer=(model.folder / "tokenizer.json").exists()
        )
        return _write_run(model.folder, out, model, run, extend(model.config))


def _write_run(
    origin: Path, out: Path, weights: TensorProvider, run: RunConfig, config: DecoderConfig
) -> list[str]:
    longer = RunConfig(model=import_export.to_model_config(config), data=run.data)
    # The run directory appears only once it is complete.
    with import_export.write_atomically(out) as here:
        for name in TOKENIZER_FILES:
            if safe_files.path_exists(origin / name):
                safe_files.copy_file(origin / name, here / name)
        import_export.copy_origin_files(str(origin), here)
        import_export.write_initial_run(here, longer, weights, str(origin))
    command = command_line(
        *("ranvier", "train", "--train.init-from", out, "--data.seq-len", config.max_seq),
        *("--train.output-dir", f"{out}-trained"),
    )
    return [
        f"{run.decoder.max_seq} -> {config.max_seq} positions: "
        f"{describe_extension(run.decoder, config)}, in {out}",
        f"Train it on long sequences with:\n  {command}",
    ]


def describe_extension(before: DecoderConfig, after: DecoderConfig) -> str:
    """Returns what changed in the rotary positions of a model, as text."""
    if after.rope_theta != before.rope_theta:
        return f"theta {before.rope_theta:g} -> {after.rope_theta:.6g}"
    if after.rope_scale != before.rope_scale:
        return (
            f"YaRN with factor {after.rope_scale:g} from {after.original_max_position}, "
            f"attention factor {after.attention_factor:.4f}"
        )
    return "rotary frequencies are unchanged, as all layers have a sliding window"

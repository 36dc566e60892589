"""Writes LoRA adapters in PEFT's format, or merges them into their base weights.

See `peft_read` for the format. Merging holds one matrix at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.checkpoint.convert import open_checkpoint
from ranvier.checkpoint.hf.peft_read import CONFIG_FILE, NAME_PREFIX, NAME_SUFFIXES, WEIGHTS_FILE
from ranvier.errors import CheckpointError
from ranvier.models import AdapterConfig, DecoderConfig
from ranvier.models.hf.family import Family, TensorMapping
from ranvier.models.lora import AdaptedWeight, adapted_weights

ReadTensors = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Returns full tensors by name."""


def weight_reader(checkpoint: Path) -> ReadTensors:
    """A reader of full weights of a checkpoint by parameter name, on demand."""
    source = open_checkpoint(checkpoint)

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        lost = [name for name in names if f"{name}.master" not in source.tensor_specs]
        if lost:
            raise CheckpointError(
                f"{checkpoint} has no {lost[0]} ({len(lost)} weights are missing). A checkpoint "
                "only fits the settings it was trained with. Restore the config.toml of its run."
            )
        found = source.read_tensors([f"{name}.master" for name in names])
        return {name.removesuffix(".master"): tensor for name, tensor in found.items()}

    return read


def write_adapter(
    checkpoint: Path,
    config: DecoderConfig,
    lora: AdapterConfig,
    family: Family,
    out: Path,
    base_name: str | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write the adapter of a checkpoint in PEFT's format; return the names of its files.

    base_name: name or path of the model that it was trained on.
    """
    from safetensors.torch import save_file

    if lora.rank < 1:
        raise CheckpointError(
            f"{checkpoint} has no adapter: lora.rank={lora.rank}. Only runs with lora.rank > 0 "
            "have one. Export the whole model."
        )
    read = weight_reader(checkpoint)
    weights = adapted_weights(config, lora)
    tensors: dict[str, Tensor] = {}
    adapted = []
    for entry in family.tensor_mappings(config):
        owns = [weights.get(ours) for ours in entry.our_names]
        if any(owns):
            module = entry.name.removesuffix(".weight")
            adapted.append((module, len(owns)))
            for kind, tensor in _pack_adapter(owns, lora, read, entry).items():
                tensors[f"{NAME_PREFIX}{module}{NAME_SUFFIXES[kind]}"] = tensor.to(
                    dtype
                ).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    names = [e.name.removesuffix(".weight") for e in family.tensor_mappings(config)]
    table = _adapter_config(lora, adapted, names, family, base_name)
    (out / CONFIG_FILE).write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    return [CONFIG_FILE, WEIGHTS_FILE]


def _pack_adapter(
    owns: Sequence[AdaptedWeight | None],
    lora: AdapterConfig,
    read: ReadTensors,
    entry: TensorMapping,
) -> dict[str, Tensor]:
    """A, B and m of one PEFT layer, from the tensors of our layers that it packs."""
    # A zero block can stand for a layer without adapter, but not a zero DoRA magnitude or a part of
    # a shared A.
    if None in owns and (lora.dora or lora.shared):
        raise CheckpointError(
            f"lora.target_modules={list(lora.target_modules)} adapts only a part of {entry.name}, "
            f"which packs {len(owns)} layers into one. PEFT adapts such a layer as a whole. Adapt "
            "all of these layers, or none."
        )
    there = [own for own in owns if own is not None]
    kinds = ("a", "b", "m") if lora.dora else ("a", "b")
    values = read(list(dict.fromkeys(getattr(own, kind) for own in there for kind in kinds)))
    found = {}
    if lora.dora:
        found["m"] = torch.cat([values[own.m] for own in there])
    if lora.shared or len(owns) == 1:
        return {
            **found,
            "a": values[there[0].a],
            "b": torch.cat([values[own.b] for own in there]),
        }
    # Stacked: A is concatenated along the rank, B is block-diagonal.
    blank = torch.zeros_like(values[there[0].a])
    a = [blank if own is None else values[own.a] for own in owns]
    rows = [
        _diagonal_block(ours, owns, i, read, lora.rank) for i, ours in enumerate(entry.our_names)
    ]
    return {**found, "a": torch.cat(a), "b": torch.block_diag(*rows)}


def _diagonal_block(
    ours: str, owns: Sequence[AdaptedWeight | None], i: int, read: ReadTensors, rank: int
) -> Tensor:
    """The diagonal block of a layer in a packed B; zeros if the layer is not adapted."""
    own = owns[i]
    if own is not None:
        return read([own.b])[own.b]
    weight = read([ours])[ours]
    return weight.new_zeros(weight.shape[0], rank)


def _adapter_config(
    lora: AdapterConfig,
    adapted: Sequence[tuple[str, int]],
    names: Sequence[str],
    family: Family,
    base_name: str | None,
) -> dict[str, Any]:
    """Contents of adapter_config.json."""
    ends = {
        _shortest_suffix(module, [m for m, _ in adapted], names): count for module, count in adapted
    }
    # Stacked layers have n times the rank; alpha grows with it, so that the scale stays the same.
    packed = {end: n for end, n in ends.items() if n > 1 and not lora.shared}
    root = lora.rslora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": _shorten_number(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": sorted(ends),
        "layers_to_transform": list(lora.layers) or None,
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": family.is_transposed,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {end: n * lora.rank for end, n in packed.items()},
        "alpha_pattern": {
            end: _shorten_number(lora.alpha * (n**0.5 if root else n)) for end, n in packed.items()
        },
    }


def _shorten_number(value: float) -> float | int:
    if value == int(value):
        return int(value)
    return value


def _shortest_suffix(module: str, adapted: Sequence[str], names: Sequence[str]) -> str:
    """The shortest suffix of a name that matches adapted layers only, in any block."""
    parts = module.split(".")
    # Names without the block number.
    kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in adapted}
    for count in (1, 2, 3):
        end = ".".join(parts[-count:])
        meant = [name for name in names if name.endswith(f".{end}")]
        if all(re.sub(r"\.\d+\.", ".*.", name) in kinds for name in meant):
            return end
    return module


# ---- merging ----------------------------------------------------------------------------


def merge_adapter(
    name: str, read: ReadTensors, lora: AdapterConfig, known: Mapping[str, AdaptedWeight]
) -> Tensor:
    """A base weight with its adapter merged, in the dtype of the base.

    W + s · B A, with DoRA times m / its norm by rows. known: from `adapted_weights`; a weight that
    is not in it is returned unchanged.
    """
    own = known.get(name)
    weight = read([name])[name]
    if own is None:
        return weight
    # Merge in at least fp32 and round once: a bf16 sum would lose small updates.
    wide = torch.promote_types(weight.dtype, torch.float32)
    parts = read([own.a, own.b, *([own.m] if lora.dora else [])])
    delta = parts[own.b].to(wide) @ parts[own.a].to(wide)
    whole = weight.to(wide) + lora.scale * delta
    if lora.dora:
        whole *= (parts[own.m].to(wide) / torch.linalg.vector_norm(whole, dim=1)).unsqueeze(1)
    return whole.to(weight.dtype)

"""Reads LoRA adapters in PEFT's format, without PEFT itself.

A directory has adapter_config.json and adapter_model.safetensors. Names of layers come from the
mapping table of the model's family. Where a family packs several of our layers into one (q, k, v),
its adapter has one A for all of them (`lora.shared`), or n layers with one A each are stored as one
adapter of n times the rank, whose B is block-diagonal; the product is the same. Every rank reads
only its slices. Settings that cannot be represented are refused with key and value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ranvier.checkpoint.hf.model import open_weights
from ranvier.errors import CheckpointError, UnsafeInputError
from ranvier.models import AdapterConfig, DecoderConfig
from ranvier.models.hf.family import Family, TensorMapping, UnsupportedModelError
from ranvier.models.hf.registry import FAMILIES
from ranvier.models.lora import AdaptedWeight, adapted_weights
from ranvier.sharding import ShardedStateDict
from ranvier.system import safe_files

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 1 << 20
"""Upper limit of rank and scaling factors of an adapter."""
NAME_PREFIX = "base_model.model."
"""Prefix of the names of tensors."""
NAME_SUFFIXES = {"a": ".lora_A.weight", "b": ".lora_B.weight", "m": ".lora_magnitude_vector"}
LAYER_ORDER = ("q", "k", "v", "o", "gate", "up", "down")
ALLOWED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initializations change the base weights.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""Keys with the values that can be represented."""
KNOWN_KEYS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_dora"),
    *("use_rslora", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
)
"""Keys that are read, or that have no effect on the weights."""


@dataclass(frozen=True)
class AdapterSlice:
    """Location of one of our tensors within a PEFT tensor."""

    name: str
    start: tuple[int, ...]
    """First index in each dim."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredAdapter:
    """A PEFT adapter in a directory."""

    path: Path
    lora: AdapterConfig
    slices: Mapping[str, AdapterSlice]
    """By the names of our parameters."""

    def fill_state(self, state: ShardedStateDict) -> None:
        """Fill the local shards of the adapter's parameters, reading only these."""
        with open_weights(self.path / WEIGHTS_FILE) as file, torch.no_grad():
            for name, (tensor, place) in state.items():
                piece = self.slices[name]
                assert place.global_shape == piece.shape and place.flat_range is None, (name, place)
                begins = [a + b for a, b in zip(piece.start, place.global_offset, strict=True)]
                box = tuple(slice(a, a + n) for a, n in zip(begins, place.valid_shape, strict=True))
                # Ranks whose shard is all padding read nothing.
                if all(n > 0 for n in place.valid_shape):
                    part = file.get_slice(piece.name)[box]
                    tensor[tuple(slice(n) for n in place.valid_shape)].copy_(part)


def read_adapter(path: Path, config: DecoderConfig) -> StoredAdapter:
    """Read a PEFT adapter for a model with this config, of any family that fits it."""
    table = _read_config(path)
    shapes = _tensor_shapes(path)
    _refuse_unknown_keys(path, table)
    # The tensors in the file, not target_modules, define which layers are adapted.
    modules = {
        name[len(NAME_PREFIX) :].removesuffix(NAME_SUFFIXES["a"])
        for name in shapes
        if NAME_SUFFIXES["a"] in name
    }
    family = _find_family(path, config, modules)
    entries = {
        entry.name.removesuffix(".weight"): entry
        for entry in family.tensor_mappings(config)
        if entry.name.removesuffix(".weight") in modules
    }
    _refuse_missing_layers(path, table, family.tensor_mappings(config), modules)
    stacked = _find_stacked(path, table, entries, shapes)
    lora = AdapterConfig(
        rank=_parse_rank(path, table, "r"),
        alpha=_parse_number(path, table, "lora_alpha", 8),
        dropout=_parse_number(path, table, "lora_dropout", 0.0),
        dora=bool(table.get("use_dora")),
        rslora=bool(table.get("use_rslora")),
        shared=not stacked and any(len(entry.our_names) > 1 for entry in entries.values()),
        **_adapted_layers(path, config, entries.values()),
    )
    weights = adapted_weights(config, lora)
    pieces = {
        ours: piece
        for module, entry in entries.items()
        for ours, piece in _locate_slices(module, entry, weights, lora, module in stacked)
    }
    _check_tensors(path, pieces, shapes, entries, weights, lora)
    return StoredAdapter(path, lora, pieces)


def _read_config(path: Path) -> dict[str, Any]:
    """Contents of adapter_config.json."""
    try:
        table = json.loads(safe_files.read_text(path / CONFIG_FILE))
    except OSError as error:
        raise CheckpointError(
            f"{path / CONFIG_FILE} cannot be read: {error.strerror}. A PEFT adapter is a directory "
            f"with {CONFIG_FILE} and {WEIGHTS_FILE}. Pass its path."
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path / CONFIG_FILE} is not valid JSON: {error!s:.200}. Restore it."
        ) from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path / CONFIG_FILE} is not a JSON object. Restore it.")
    return table


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of an adapter."""
    if not safe_files.path_exists(path / WEIGHTS_FILE) and (path / "adapter_model.bin").exists():
        raise UnsafeInputError(
            f"{path} has an adapter_model.bin, which is a pickle file and can run code when it is "
            f"loaded. Weights are read from {WEIGHTS_FILE} only. Save the adapter as safetensors."
        )
    with open_weights(path / WEIGHTS_FILE) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _config_problem(path: Path, key: str, value: object, rule: str) -> str:
    return f"{path / CONFIG_FILE} has {key}={value!r:.120}. It must be {rule}."


def _refuse_unknown_keys(path: Path, table: Mapping[str, Any]) -> None:
    """Refuse keys that would change the model in an unknown way."""
    problems = [
        _config_problem(path, key, table[key], " or ".join(map(repr, values)))
        for key, values in ALLOWED_VALUES.items()
        if key in table and table[key] not in values
    ]
    for key, value in table.items():
        if (
            key not in KNOWN_KEYS
            and key not in ALLOWED_VALUES
            # New versions of PEFT add keys whose default is off.
            and value not in (None, False, [], {}, "")
        ):
            problems.append(_config_problem(path, key, value, "left out"))
    for key in ("r", "lora_alpha", "lora_dropout"):
        value = table.get(key, 1)
        # A bool is an int in Python, and JSON may hold NaN: both are refused.
        kind = int if key == "r" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            problems.append(_config_problem(path, key, value, "a number"))
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(table.get(key) or {}, dict):
            problems.append(_config_problem(path, key, table[key], "a JSON object"))
    if problems:
        raise CheckpointError(
            "\n".join(problems) + "\nSuch adapters are not supported. Train another adapter."
        )


def _parse_rank(path: Path, table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, 8)
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise CheckpointError(_config_problem(path, key, value, f"an integer from 1 to {MAX_RANK}"))
    return value


def _parse_number(path: Path, table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= MAX_RANK:
        raise CheckpointError(_config_problem(path, key, value, f"a number from 0 to {MAX_RANK}"))
    return float(value)


def _find_family(path: Path, config: DecoderConfig, modules: set[str]) -> Family:
    """The first family that represents the config and has all adapted layers."""
    for family in FAMILIES.values():
        try:
            names = {entry.name.removesuffix(".weight") for entry in family.tensor_mappings(config)}
        except UnsupportedModelError:
            continue
        if modules and modules <= names:
            return family
    some = ", ".join(sorted(modules)[:3]) or "none"
    raise CheckpointError(
        f"{path / WEIGHTS_FILE} adapts layers ({some}) that no family with the config of this "
        "model has. An adapter only fits the model that it was trained for. Use that model."
    )


def _refuse_missing_layers(
    path: Path, table: Mapping[str, Any], entries: Sequence[TensorMapping], modules: set[str]
) -> None:
    """Refuse an adapter whose file lacks layers that its config targets: tensors are missing."""
    names = [e.name.removesuffix(".weight") for e in entries if e.name.endswith(".weight")]
    try:
        lost = sorted(name for name in names if _is_targeted(table, name) and name not in modules)
    except re.error as error:
        raise CheckpointError(
            _config_problem(
                path, "target_modules", table.get("target_modules"), f"a valid pattern ({error})"
            )
        ) from None
    if lost:
        raise CheckpointError(
            f"{path / CONFIG_FILE} has target_modules={table.get('target_modules')!r:.120}, but "
            f"{WEIGHTS_FILE} has no adapter of {', '.join(lost[:3])} ({len(lost)} in all). "
            "Adapters of embeddings, heads and norms are not supported; all others must be in the "
            "file. Train another adapter."
        )


def _is_targeted(table: Mapping[str, Any], name: str) -> bool:
    """Whether the config of an adapter targets a layer, by PEFT's rules."""

    def named(what: Any) -> bool:
        # A string is a regular expression; a list holds names or suffixes.
        if isinstance(what, str):
            return re.fullmatch(what, name) is not None
        return any(name == one or name.endswith(f".{one}") for one in what or ())

    targets = table.get("target_modules")
    blocks = table.get("layers_to_transform")
    # all-linear does not name layers, so missing ones cannot be found.
    if targets == "all-linear" or named(table.get("exclude_modules")) or not named(targets):
        return False
    # layers_to_transform only applies to suffixes in a list.
    if blocks is None or blocks == [] or not isinstance(targets, list) or name in targets:
        return True
    number = re.search(r"\.(\d+)\.", name)
    return number is not None and int(number[1]) in (
        blocks if isinstance(blocks, list) else [blocks]
    )


def _find_stacked(
    path: Path,
    table: Mapping[str, Any],
    entries: Mapping[str, TensorMapping],
    shapes: Mapping[str, tuple[int, ...]],
) -> set[str]:
    """Packed layers with one A per layer of ours; refuses other differences of rank or scale."""
    rank = table.get("r", 8)
    root = bool(table.get("use_rslora"))
    stacked = set[str]()
    plain = set[str]()
    for module, entry in entries.items():
        # Stacked: n layers of rank r are stored as one adapter of rank n * r.
        have = shapes[f"{NAME_PREFIX}{module}{NAME_SUFFIXES['a']}"][0]
        configured = _match_pattern(table, "rank_pattern", module, rank)
        alpha = _match_pattern(table, "alpha_pattern", module, table.get("lora_alpha", 8))
        count = len(entry.our_names)
        if have != configured or have not in (rank, rank * count):
            raise CheckpointError(
                _config_problem(path, "rank_pattern", table.get("rank_pattern"), "left out")
                + f" {module} has rank {have}, but r={rank}. All layers must have the same rank."
            )
        # PEFT scales by alpha / rank (rsLoRA: alpha / sqrt(rank)); alpha must grow with the stacked
        # rank to keep the scale.
        times = have // rank
        if not math.isclose(alpha, table.get("lora_alpha", 8) * (times**0.5 if root else times)):
            raise CheckpointError(
                _config_problem(path, "alpha_pattern", table.get("alpha_pattern"), "left out")
                + f" {module} has alpha {alpha}. All layers must have the same scale."
            )
        if count > 1:
            (stacked if times > 1 else plain).add(module)
    # `lora.shared` is one setting for the whole model.
    if stacked and plain:
        raise CheckpointError(
            _config_problem(
                path,
                "rank_pattern",
                table.get("rank_pattern"),
                "set for all packed layers or none",
            )
        )
    return stacked


def _match_pattern(table: Mapping[str, Any], key: str, module: str, value: Any) -> Any:
    """The value of a pattern table for a layer, by PEFT's rule; `value` if none matches."""
    for pattern, own in (table.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return own
    return value


def _adapted_layers(
    path: Path, config: DecoderConfig, entries: Sequence[TensorMapping] | Any
) -> dict[str, Any]:
    """Which layers of which blocks are adapted; must be equal in all adapted blocks."""
    found: dict[int, set[str]] = {}
    for entry in entries:
        for ours in entry.our_names:
            parts = ours.split(".")
            if parts[0] != "blocks" or parts[-2] not in LAYER_ORDER:
                raise CheckpointError(
                    f"{path / WEIGHTS_FILE} adapts {entry.name}. Adapters are supported for "
                    f"{', '.join(LAYER_ORDER)}. Train one without it."
                )
            found.setdefault(int(parts[1]), set()).add(parts[-2])
    kinds = {frozenset(some) for some in found.values()}
    if len(kinds) != 1:
        raise CheckpointError(
            f"{path / WEIGHTS_FILE} adapts different layers in different blocks. All blocks with "
            "adapters must adapt the same layers. Train another adapter."
        )
    (names,) = kinds
    # An empty tuple means all blocks.
    layers = () if len(found) == config.layers else tuple(sorted(found))
    return {
        "target_modules": tuple(name for name in LAYER_ORDER if name in names),
        "layers": layers,
    }


def _locate_slices(
    module: str,
    entry: TensorMapping,
    weights: Mapping[str, AdaptedWeight],
    lora: AdapterConfig,
    stacked: bool,
) -> Iterator[tuple[str, AdapterSlice]]:
    """Yield our tensors of one PEFT layer, with their slices of its tensors."""
    row = 0
    rank = lora.rank
    for i, ours in enumerate(entry.our_names):
        own = weights[ours]
        out, into = own.shape
        # Offset along the rank dim: layer i has its own rank columns if stacked.
        at = i * rank if stacked else 0
        yield (
            own.a,
            AdapterSlice(f"{NAME_PREFIX}{module}{NAME_SUFFIXES['a']}", (at, 0), (rank, into)),
        )
        yield (
            own.b,
            AdapterSlice(f"{NAME_PREFIX}{module}{NAME_SUFFIXES['b']}", (row, at), (out, rank)),
        )
        if lora.dora:
            yield own.m, AdapterSlice(f"{NAME_PREFIX}{module}{NAME_SUFFIXES['m']}", (row,), (out,))
        row += out


def _check_tensors(
    path: Path,
    pieces: Mapping[str, AdapterSlice],
    shapes: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, TensorMapping],
    weights: Mapping[str, AdaptedWeight],
    lora: AdapterConfig,
) -> None:
    """Refuse tensors that are missing, unexpected, of another shape, or not block-diagonal."""
    expected: dict[str, tuple[int, ...]] = {}
    for module, entry in entries.items():
        owns = [weights[ours] for ours in entry.our_names]
        out = sum(own.shape[0] for own in owns)
        rank = shapes[f"{NAME_PREFIX}{module}{NAME_SUFFIXES['a']}"][0]
        theirs = {"a": (rank, owns[0].shape[1]), "b": (out, rank), "m": (out,)}
        for kind in "abm" if lora.dora else "ab":
            expected[f"{NAME_PREFIX}{module}{NAME_SUFFIXES[kind]}"] = theirs[kind]
    odd = sorted(n for n in {*expected, *shapes} if expected.get(n) != shapes.get(n))
    if odd:
        name = odd[0]
        raise CheckpointError(
            f"{path / WEIGHTS_FILE} has {name} of shape {list(shapes.get(name, ()))} instead of "
            f"{list(expected.get(name, ()))} ({len(odd)} such tensors; [] means missing). An "
            "adapter only fits the model that it was trained for. Use that model."
        )
    stacked = [m for m, e in entries.items() if len(e.our_names) > 1 and not lora.shared]
    for module in stacked:
        _refuse_mixed(
            path, f"{NAME_PREFIX}{module}{NAME_SUFFIXES['b']}", entries[module], weights, lora.rank
        )


def _refuse_mixed(
    path: Path, name: str, entry: TensorMapping, weights: Mapping[str, AdaptedWeight], rank: int
) -> None:
    """Refuse a B of packed layers with nonzero values outside of its diagonal blocks."""
    with open_weights(path / WEIGHTS_FILE) as file:
        b = file.get_tensor(name)
        row = 0
    for i, ours in enumerate(entry.our_names):
        out = weights[ours].shape[0]
        # Zero the diagonal blocks; everything that remains is outside of them.
        b[row : row + out, i * rank : (i + 1) * rank] = 0.0
        row += out
    if bool(b.any()):
        raise CheckpointError(
            f"{path / WEIGHTS_FILE} has {name} with nonzero values outside of the "
            f"{len(entry.our_names)} blocks on its diagonal. Packed layers must share one A of "
            "rank r, or have one each. Train another adapter."
        )

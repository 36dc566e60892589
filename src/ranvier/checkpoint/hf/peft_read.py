"""PEFT: adapters in the format of the library of that name, read and written without it.

A directory holds adapter_config.json and adapter_model.safetensors. Names of layers come from the
table of the model's family. Where a family packs several of our layers into one (q, k, v), its
adapter has one A for all (`lora.shared`); layers of ours that have an A each are written as one of
n times the rank, its B zero outside of blocks on the diagonal, which is the same product.
Every rank reads only its slices. What cannot be represented is refused with key and value.
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
from ranvier.errors import CheckpointError, RefusedError
from ranvier.models import AdapterConfig, DecoderConfig
from ranvier.models.hf.family import Entry, Family, UnknownError
from ranvier.models.hf.registry import FAMILIES
from ranvier.models.lora import Adapted, adapted_weights
from ranvier.sharding import State
from ranvier.system import safe_files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LARGEST = 1 << 20
"""Largest rank and factor of an adapter."""
BEFORE = "base_model.model."
"""How the names of tensors begin."""
ENDS = {"a": ".lora_A.weight", "b": ".lora_B.weight", "m": ".lora_magnitude_vector"}
ORDER = ("q", "k", "v", "o", "gate", "up", "down")
ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base
}
"""Keys with the values that can be ours."""
KNOWN = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_dora"),
    *("use_rslora", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
)
"""Keys that are read, or change nothing."""


@dataclass(frozen=True)
class Piece:
    """Where a tensor of ours lies in one of theirs."""

    name: str
    start: tuple[int, ...]
    """First index in each dim."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """An adapter in a directory."""

    path: Path
    lora: AdapterConfig
    pieces: Mapping[str, Piece]
    """By the names of our parameters."""

    def fill(self, state: State) -> None:
        """Fill my parts of the adapter's parameters, reading no more than these."""
        with open_weights(self.path / WEIGHTS) as file, torch.no_grad():
            for name, (tensor, place) in state.items():
                piece = self.pieces[name]
                assert place.whole == piece.shape and place.flat is None, (name, place)
                begins = [a + b for a, b in zip(piece.start, place.start, strict=True)]
                box = tuple(slice(a, a + n) for a, n in zip(begins, place.valid, strict=True))
                if all(n > 0 for n in place.valid):
                    part = file.get_slice(piece.name)[box]
                    tensor[tuple(slice(n) for n in place.valid)].copy_(part)


def read_adapter(path: Path, config: DecoderConfig) -> Stored:
    """An adapter of PEFT for a model with this config, of any family that can have it."""
    table, shapes = _table(path), _shapes(path)
    _refuse(path, table)
    modules = {name[len(BEFORE) :].removesuffix(ENDS["a"]) for name in shapes if ENDS["a"] in name}
    family = _family(path, config, modules)
    entries = {
        entry.name.removesuffix(".weight"): entry
        for entry in family.tensors(config)
        if entry.name.removesuffix(".weight") in modules
    }
    _refuse_lost(path, table, family.tensors(config), modules)
    stacked = _stacked(path, table, entries, shapes)
    lora = AdapterConfig(
        rank=_positive(path, table, "r"),
        alpha=_number(path, table, "lora_alpha", 8),
        dropout=_number(path, table, "lora_dropout", 0.0),
        dora=bool(table.get("use_dora")),
        rslora=bool(table.get("use_rslora")),
        shared=not stacked and any(len(entry.ours) > 1 for entry in entries.values()),
        **_where(path, config, entries.values()),
    )
    weights = adapted_weights(config, lora)
    pieces = {
        ours: piece
        for module, entry in entries.items()
        for ours, piece in _pieces(module, entry, weights, lora, module in stacked)
    }
    _compare(path, pieces, shapes, entries, weights, lora)
    return Stored(path, lora, pieces)


def _table(path: Path) -> dict[str, Any]:
    """What adapter_config.json says."""
    try:
        table = json.loads(safe_files.read_text(path / CONFIG))
    except OSError as error:
        raise CheckpointError(
            f"{path / CONFIG}: {error.strerror}. An adapter of PEFT is a directory with {CONFIG} "
            f"and {WEIGHTS}. Give its path."
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / CONFIG} is no JSON: {error!s:.200}. Restore it.") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path / CONFIG} is no table. Restore it.")
    return table


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter."""
    if not safe_files.exists(path / WEIGHTS) and (path / "adapter_model.bin").exists():
        raise RefusedError(
            f"{path} has an adapter_model.bin, which is a pickle: to read it runs what it says. "
            f"Weights are read from {WEIGHTS}. Save the adapter again with safetensors."
        )
    with open_weights(path / WEIGHTS) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _odd(path: Path, key: str, value: object, rule: str) -> str:
    return f"{path / CONFIG} has {key}={value!r:.120}. It must be {rule}."


def _refuse(path: Path, table: Mapping[str, Any]) -> None:
    """Refuse what would change the model in a way that is not known here."""
    problems = [
        _odd(path, key, table[key], " or ".join(map(repr, values)))
        for key, values in ONLY.items()
        if key in table and table[key] not in values
    ]
    for key, value in table.items():
        if key not in KNOWN and key not in ONLY and value not in (None, False, [], {}, ""):
            problems.append(_odd(path, key, value, "left out"))
    for key in ("r", "lora_alpha", "lora_dropout"):
        value = table.get(key, 1)
        kind = int if key == "r" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            problems.append(_odd(path, key, value, "a number"))
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(table.get(key) or {}, dict):
            problems.append(_odd(path, key, table[key], "a table"))
    if problems:
        raise CheckpointError(
            "\n".join(problems) + "\nAdapters of this kind are not known here. Train another."
        )


def _positive(path: Path, table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, 8)
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise CheckpointError(_odd(path, key, value, f"a whole number from 1 to {LARGEST}"))
    return value


def _number(path: Path, table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:
        raise CheckpointError(_odd(path, key, value, f"a number from 0 to {LARGEST}"))
    return float(value)


def _family(path: Path, config: DecoderConfig, modules: set[str]) -> Family:
    """The first family that has the layers of the config, and among them all adapted ones."""
    for family in FAMILIES.values():
        try:
            names = {entry.name.removesuffix(".weight") for entry in family.tensors(config)}
        except UnknownError:
            continue
        if modules and modules <= names:
            return family
    some = ", ".join(sorted(modules)[:3]) or "none"
    raise CheckpointError(
        f"{path / WEIGHTS} adapts layers ({some}) that no family with the config of this model "
        "has. An adapter fits the model that it was made for. Use that model."
    )


def _refuse_lost(
    path: Path, table: Mapping[str, Any], entries: Sequence[Entry], modules: set[str]
) -> None:
    """Refuse layers that the config names but the file has not: something was lost."""
    names = [e.name.removesuffix(".weight") for e in entries if e.name.endswith(".weight")]
    try:
        lost = sorted(name for name in names if _wanted(table, name) and name not in modules)
    except re.error as error:
        raise CheckpointError(
            _odd(path, "target_modules", table.get("target_modules"), f"a pattern ({error})")
        ) from None
    if lost:
        raise CheckpointError(
            f"{path / CONFIG} has target_modules={table.get('target_modules')!r:.120}, but "
            f"{WEIGHTS} has no adapter of {', '.join(lost[:3])} ({len(lost)} in all). Adapters of "
            "embeddings, heads and norms are not known here; others were lost. Train another."
        )


def _wanted(table: Mapping[str, Any], name: str) -> bool:
    """Whether the config of an adapter names a layer, by PEFT's own rules."""

    def named(what: Any) -> bool:
        if isinstance(what, str):
            return re.fullmatch(what, name) is not None
        return any(name == one or name.endswith(f".{one}") for one in what or ())

    targets, blocks = table.get("target_modules"), table.get("layers_to_transform")
    if targets == "all-linear" or named(table.get("exclude_modules")) or not named(targets):
        return False
    if blocks is None or blocks == [] or not isinstance(targets, list) or name in targets:
        return True
    number = re.search(r"\.(\d+)\.", name)
    return number is not None and int(number[1]) in (
        blocks if isinstance(blocks, list) else [blocks]
    )


def _stacked(
    path: Path,
    table: Mapping[str, Any],
    entries: Mapping[str, Entry],
    shapes: Mapping[str, tuple[int, ...]],
) -> set[str]:
    """Packed layers with an A for each of ours; refuse ranks and scales that differ otherwise."""
    rank, root = table.get("r", 8), bool(table.get("use_rslora"))
    stacked, plain = set[str](), set[str]()
    for module, entry in entries.items():
        have = shapes[f"{BEFORE}{module}{ENDS['a']}"][0]
        said = _pattern(table, "rank_pattern", module, rank)
        alpha = _pattern(table, "alpha_pattern", module, table.get("lora_alpha", 8))
        count = len(entry.ours)
        if have != said or have not in (rank, rank * count):
            raise CheckpointError(
                _odd(path, "rank_pattern", table.get("rank_pattern"), "left out")
                + f" {module} has rank {have}, r={rank}: all layers have the same rank here."
            )
        times = have // rank
        if not math.isclose(alpha, table.get("lora_alpha", 8) * (times**0.5 if root else times)):
            raise CheckpointError(
                _odd(path, "alpha_pattern", table.get("alpha_pattern"), "left out")
                + f" {module} has alpha {alpha}: all layers have the same scale here."
            )
        if count > 1:
            (stacked if times > 1 else plain).add(module)
    if stacked and plain:
        raise CheckpointError(
            _odd(path, "rank_pattern", table.get("rank_pattern"), "for all packed layers or none")
        )
    return stacked


def _pattern(table: Mapping[str, Any], key: str, module: str, value: Any) -> Any:
    """What a table of patterns says of a layer, by PEFT's own rule."""
    for pattern, own in (table.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return own
    return value


def _where(path: Path, config: DecoderConfig, entries: Sequence[Entry] | Any) -> dict[str, Any]:
    """Which layers of which blocks are adapted; the same in each."""
    found: dict[int, set[str]] = {}
    for entry in entries:
        for ours in entry.ours:
            parts = ours.split(".")
            if parts[0] != "blocks" or parts[-2] not in ORDER:
                raise CheckpointError(
                    f"{path / WEIGHTS} adapts {entry.name}. Adapters are known beside "
                    f"{', '.join(ORDER)}. Train one without it."
                )
            found.setdefault(int(parts[1]), set()).add(parts[-2])
    kinds = {frozenset(some) for some in found.values()}
    if len(kinds) != 1:
        raise CheckpointError(
            f"{path / WEIGHTS} adapts other layers in some blocks than in others. Here they are "
            "the same in all that have adapters. Train another."
        )
    (names,) = kinds
    layers = () if len(found) == config.layers else tuple(sorted(found))
    return {"on": tuple(name for name in ORDER if name in names), "layers": layers}


def _pieces(
    module: str, entry: Entry, weights: Mapping[str, Adapted], lora: AdapterConfig, stacked: bool
) -> Iterator[tuple[str, Piece]]:
    """Where our tensors lie in those of one of their layers."""
    row, rank = 0, lora.rank
    for i, ours in enumerate(entry.ours):
        own = weights[ours]
        out, into = own.shape
        at = i * rank if stacked else 0
        yield own.a, Piece(f"{BEFORE}{module}{ENDS['a']}", (at, 0), (rank, into))
        yield own.b, Piece(f"{BEFORE}{module}{ENDS['b']}", (row, at), (out, rank))
        if lora.dora:
            yield own.m, Piece(f"{BEFORE}{module}{ENDS['m']}", (row,), (out,))
        row += out


def _compare(
    path: Path,
    pieces: Mapping[str, Piece],
    shapes: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, Entry],
    weights: Mapping[str, Adapted],
    lora: AdapterConfig,
) -> None:
    """Refuse tensors that are missing, too many, of another shape, or not on the diagonal."""
    expected: dict[str, tuple[int, ...]] = {}
    for module, entry in entries.items():
        owns = [weights[ours] for ours in entry.ours]
        out, rank = sum(own.shape[0] for own in owns), shapes[f"{BEFORE}{module}{ENDS['a']}"][0]
        theirs = {"a": (rank, owns[0].shape[1]), "b": (out, rank), "m": (out,)}
        for kind in "abm" if lora.dora else "ab":
            expected[f"{BEFORE}{module}{ENDS[kind]}"] = theirs[kind]
    odd = sorted(n for n in {*expected, *shapes} if expected.get(n) != shapes.get(n))
    if odd:
        name = odd[0]
        raise CheckpointError(
            f"{path / WEIGHTS} has {name} of shape {list(shapes.get(name, ()))}, but it should be "
            f"{list(expected.get(name, ()))} ({len(odd)} such in all; [] is not there). An adapter "
            "fits the model that it was made for. Use that model."
        )
    stacked = [m for m, e in entries.items() if len(e.ours) > 1 and not lora.shared]
    for module in stacked:
        _refuse_mixed(path, f"{BEFORE}{module}{ENDS['b']}", entries[module], weights, lora.rank)


def _refuse_mixed(
    path: Path, name: str, entry: Entry, weights: Mapping[str, Adapted], rank: int
) -> None:
    """Refuse a B of packed layers that is not zero outside of the blocks on its diagonal."""
    with open_weights(path / WEIGHTS) as file:
        b, row = file.get_tensor(name), 0
    for i, ours in enumerate(entry.ours):
        out = weights[ours].shape[0]
        b[row : row + out, i * rank : (i + 1) * rank] = 0.0
        row += out
    if bool(b.any()):
        raise CheckpointError(
            f"{path / WEIGHTS} has {name} that is not zero outside of {len(entry.ours)} blocks on "
            "its diagonal. Packed layers have one A of rank r, or one each. Train another."
        )

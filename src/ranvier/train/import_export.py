"""Import of Hugging Face models as runs, and export of runs as Hugging Face models.

An imported run has the same parts as any run: a config, a checkpoint (of weights only, at step 0)
and a tokenizer. So it can be trained, generated from, evaluated and exported like any other. Files
of the model that Ranvier does not use itself (config.json, tokenizer files, generation settings)
are kept in `published/` and exported unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.checkpoint import checksummed_file, directory
from ranvier.checkpoint.convert import DTYPES_BY_NAME, CheckpointSource, open_checkpoint
from ranvier.checkpoint.hf import model as published
from ranvier.checkpoint.hf import safetensors
from ranvier.checkpoint.hf.model import PublishedModel
from ranvier.checkpoint.hf.peft_write import merge_adapter, write_adapter
from ranvier.config import run as runs
from ranvier.config.plan import AXES
from ranvier.config.run import RunConfig
from ranvier.config.sections import (
    IMPORTED_SIZE,
    DataConfig,
    DecoderModelConfig,
    ModelConfig,
)
from ranvier.errors import CheckpointError, PlanError, WriteError
from ranvier.infer.load import find_checkpoint, load_config_from_dir
from ranvier.models.config import DecoderConfig
from ranvier.models.hf.family import (
    SPECIAL_TOKEN_KEYS,
    TRAINING_SETTINGS,
    Family,
    UnsupportedModelError,
)
from ranvier.models.hf.registry import FAMILIES, find_family, find_fitting_family
from ranvier.models.lora import adapted_weights
from ranvier.system import safe_files
from ranvier.system.model_hub import find_model
from ranvier.system.terminal import print
from ranvier.train.progress import show_progress
from ranvier.train.resume.checkpointing import run_to_dict

ORIGIN_DIR = "published"
"""Directory in a run with the original files of the imported model."""
ORIGIN_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "vocab.txt", "tekken.json"),
    *("LICENSE", "NOTICE"),
)
"""Files of a model that are kept in addition to weights; code is not kept."""
ORIGIN_PATH_FILE = "origin.txt"
"""File in that directory with the path of the imported model."""
DEFAULT_SEQ_LIMIT = 512
"""Upper bound of the default `data.seq_len` of an imported run, in tokens."""
PROGRESS_MIN_BYTES = 1 << 30
"""Minimum size of a model, in bytes, for a progress display."""
MAX_SHARD_BYTES = 5 * 10**9
"""Maximum bytes of a safetensors file."""


def import_model(source: str, out: Path) -> list[str]:
    """Import a Hugging Face model as a run; returns lines to print. `out` is created atomically."""
    with PublishedModel.open(find_model(source)) as model:
        with write_atomically(out) as here:
            lines = [
                *_copy_model_files(model.folder, here),
                *_dropout_notes(model),
                *_check_tokenizer_files(model, here),
            ]
            run = build_imported_run(model, out, tokenizer=(here / "tokenizer.json").exists())
            write_initial_run(here, run, model, str(model.folder))
        parameters = sum(torch.Size(shape).numel() for shape in model.shapes.values())
        word = next(name for name, dtype in DTYPES_BY_NAME.items() if dtype == model.dtype)
        return [f"{model.family.model_type}: {parameters:,} parameters ({word}) in {out}", *lines]


def write_initial_run(
    here: Path, run: RunConfig, weights: published.TensorProvider, source: str
) -> None:
    """Write the config of a run and its checkpoint of step 0, which holds weights only."""
    (here / "config.toml").write_text(runs.to_toml(run), encoding="utf-8")
    inside = here / "checkpoints" / "step-00000000"
    inside.mkdir(parents=True)
    facts = {
        "weights": True,
        "source": source,
        "samples": 0,
        "fingerprint": "",
        "config": {"format": runs.SETTINGS_FORMAT, "model": run_to_dict(run)["model"]},
    }
    with transfer_progress("importing") as progress:
        count = published.write_weights(weights, inside, progress)
    directory.write_manifest(inside, 0, dict.fromkeys(AXES, 1), facts, files=count)
    # Their content is part of the manifest by now.
    for rank_report in inside.glob("rank-*.json"):
        rank_report.unlink()
    directory.write_latest_pointer(here / "checkpoints", inside.name)


def _dropout_notes(model: PublishedModel) -> list[str]:
    """Lines on training settings in a model's config that are not imported."""
    names = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "router_jitter_noise")
    drops = [f"{name}={model.hf_config[name]}" for name in names if model.hf_config.get(name)]
    if not drops:
        return []
    return [f"not imported: {', '.join(drops)} (see model.dropout, model.router_jitter)"]


def build_imported_run(model: PublishedModel, out: Path, *, tokenizer: bool) -> RunConfig:
    """The config of an imported run."""
    data = DataConfig(seq_len=min(DEFAULT_SEQ_LIMIT, model.config.max_seq))
    if tokenizer:
        data = replace(data, tokenizer=str(out.absolute() / "tokenizer.json"))
    return RunConfig(model=to_model_config(model.config), data=data)


def to_model_config(config: DecoderConfig) -> DecoderModelConfig:
    """The `model` section of a run config."""
    return DecoderModelConfig(**{**asdict(config), "size": IMPORTED_SIZE})


def _check_tokenizer_files(model: PublishedModel, here: Path) -> list[str]:
    """Raise on damaged tokenizer files; returns lines on what they lack."""
    for name in ORIGIN_FILES:
        path = here / ORIGIN_DIR / name
        if path.suffix == ".json" and name != "tokenizer.json" and path.exists():
            published.read_json_table(path)
    from ranvier.data.tokenizer import check_tokenizer

    words = here / "tokenizer.json"
    if words.exists():
        return check_tokenizer(words, model.config.vocab)
    return []


def _copy_model_files(source: Path, here: Path) -> list[str]:
    """Copy the files of a model other than weights; returns lines on what is missing."""
    (here / ORIGIN_DIR).mkdir()
    (here / ORIGIN_DIR / ORIGIN_PATH_FILE).write_text(f"{source.absolute()}\n", encoding="utf-8")
    for name in ORIGIN_FILES:
        _copy_if_present(source / name, here / ORIGIN_DIR / name, source)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        # A second copy where a run keeps its tokenizer.
        _copy_if_present(here / ORIGIN_DIR / name, here / name, here)
    _copy_if_present(here / ORIGIN_DIR / "chat_template.jinja", here / "chat_template.jinja", here)
    if (here / "tokenizer.json").exists():
        return []
    return [
        f"{source} has no tokenizer.json: set data.tokenizer, or use tokenized corpora. "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) creates one from older files."
    ]


def _copy_if_present(source: Path, target: Path, root: Path) -> None:
    """Copy a file if it exists. root: the directory of the model or run that it belongs to."""
    if safe_files.path_exists(source):
        safe_files.copy_file(source, target, root=root)


@contextmanager
def write_atomically(out: Path) -> Iterator[Path]:
    """Yield a hidden directory that is renamed to `out` on success and removed on failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PlanError(f"{out} already exists. It is not overwritten. Choose another --output.")
    hidden = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.writing")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        # Contents must be on disk before the rename makes them visible, and the rename itself
        # afterwards.
        for path in sorted(hidden.rglob("*")):
            checksummed_file.fsync_path(path)
        # Only an empty directory gets here; `os.replace` needs it gone.
        if out.is_dir():
            out.rmdir()
        os.replace(hidden, out)
        checksummed_file.fsync_path(out.absolute().parent)
    except OSError as error:
        raise WriteError(
            f"{error.filename or out}: {error.strerror}. The whole model is written there. Free "
            "disk space, or choose another --output."
        ) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def copy_origin_files(start: str, into: Path) -> None:
    """Copy the original files of the model that a new run starts from, for its later export."""
    source = Path(start)
    if directory.CHECKPOINT_NAME.fullmatch(source.name):
        origin = source.parent.parent
    else:
        origin = source
    if safe_files.path_exists(origin / ORIGIN_DIR) and not (into / ORIGIN_DIR).exists():
        (into / ORIGIN_DIR).mkdir()
        for name in (ORIGIN_PATH_FILE, *ORIGIN_FILES):
            _copy_if_present(origin / ORIGIN_DIR / name, into / ORIGIN_DIR / name, origin)
    elif not (origin / "config.toml").exists() and not (into / ORIGIN_DIR).exists():
        _copy_model_files(origin if origin.is_dir() else origin.parent, into)


def init_from(run: RunConfig) -> RunConfig:
    """The config of a new run with the model and tokenizer that it starts from."""
    source = find_model(run.train.init_from)
    if directory.CHECKPOINT_NAME.fullmatch(source.name):
        origin = source.parent.parent
    else:
        origin = source
    if (origin / "config.toml").exists():
        model: ModelConfig = load_config_from_dir(origin).model
        words = origin / "tokenizer.json"
    else:
        with PublishedModel.open(source) as there:
            model = to_model_config(there.config)
            words = there.folder / "tokenizer.json"
    data = run.data
    # A tokenizer that the user has chosen is not replaced.
    if words.exists() and data.tokenizer == DataConfig().tokenizer:
        data = replace(data, tokenizer=str(words.absolute()))
    return replace(run, model=model, data=data, train=replace(run.train, init_from=str(source)))


# ---- out --------------------------------------------------------------------------------


def export_model(
    origin: Path,
    out: Path,
    *,
    step: int = -1,
    dtype: str = "",
    family: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Export the weights of a run as a Hugging Face model; returns lines to print.

    dtype: of the weights; if empty, the dtype of the imported model or of the checkpoint.
    """
    if dtype and dtype not in DTYPES_BY_NAME:
        raise PlanError(
            f"dtype={dtype!r} is not supported. Use one of {', '.join(DTYPES_BY_NAME)}."
        )
    if max_shard_bytes < 1:
        raise PlanError(
            f"max_shard_bytes={max_shard_bytes} is too small. A file must hold at least one "
            "tensor. Use 5000000000 or another positive number."
        )
    run = load_config_from_dir(origin)
    checkpoint = find_checkpoint(origin, None if step < 0 else step)
    kind, theirs = resolve_family(origin, run, family)
    source = open_checkpoint(checkpoint)
    sizes = {n.removesuffix(".master"): kind_ for n, kind_ in source.tensor_specs.items()}
    entries = kind.tensor_mappings(run.decoder)
    lost = [name for entry in entries for name in entry.our_names if name not in sizes]
    if lost:
        raise CheckpointError(
            f"{checkpoint} has no {lost[0]} ({len(lost)} weights are missing). A checkpoint only "
            "fits the settings it was trained with. Restore the config.toml of its run."
        )
    stored = {name: sizes[name][0] for entry in entries for name in entry.our_names}
    wanted = DTYPES_BY_NAME.get(dtype) or _config_dtype(theirs) or torch.float32
    types = dict.fromkeys(stored, wanted)
    if source.facts.get("weights") and not dtype:
        # An imported model that was not trained is exported in its original dtypes.
        types = stored
    # config.json has one dtype for all weights: the most frequent one.
    main = max(set(types.values()), key=lambda one: list(types.values()).count(one))
    with write_atomically(out) as here:
        config = {**theirs, **token_ids(origin, theirs), "dtype": str(main).removeprefix("torch.")}
        # `torch_dtype` is the former name of `dtype`; `auto_map` refers to code that is not copied.
        for key in ("torch_dtype", "auto_map"):
            config.pop(key, None)
        _write_json(here / "config.json", config)
        copy_tokenizer_files(origin, here, config)
        shapes = {name: sizes[name][1] for name in stored}
        tensors = safetensors.list_hf_tensors(entries, shapes, types)
        read = weight_reader(source, run)
        with transfer_progress("exporting") as progress:
            names = safetensors.write_safetensors(
                here, tensors, read, most=max_shard_bytes, progress=progress
            )
    size = sum(one.num_bytes for one in tensors)
    return [
        f"{kind.model_type}: {len(tensors)} tensors, {size:,} bytes in {len(names)} file(s) in "
        f"{out}"
    ]


def export_adapter(origin: Path, out: Path, *, step: int = -1, dtype: str = "") -> list[str]:
    """Export the adapters of a run in PEFT's format; returns lines to print."""
    if dtype and dtype not in DTYPES_BY_NAME:
        raise PlanError(
            f"dtype={dtype!r} is not supported. Use one of {', '.join(DTYPES_BY_NAME)}."
        )
    run = load_config_from_dir(origin)
    checkpoint = find_checkpoint(origin, None if step < 0 else step)
    kind, _ = resolve_family(origin, run)
    told_by = origin / ORIGIN_DIR / ORIGIN_PATH_FILE
    base = None
    if safe_files.path_exists(told_by):
        base = safe_files.read_text(told_by, root=origin, errors="replace").strip()
    with write_atomically(out) as here:
        names = write_adapter(
            checkpoint, run.decoder, run.lora, kind, here, base, dtype=DTYPES_BY_NAME.get(dtype)
        )
    return [f"{kind.model_type}: an adapter of rank {run.lora.rank} ({', '.join(names)}) in {out}"]


def resolve_family(origin: Path, run: RunConfig, wanted: str = "") -> tuple[Family, dict[str, Any]]:
    """The family of a run's model and its config.json: the original one if it still fits."""
    kept = origin / ORIGIN_DIR / "config.json"
    if safe_files.path_exists(kept):
        before = published.read_json_table(kept, root=origin)
    else:
        before = {}
    config = DecoderConfig(**{f.name: getattr(run.decoder, f.name) for f in fields(DecoderConfig)})
    try:
        if before and wanted in ("", before.get("model_type")):
            kind = find_family(before)
            if _is_same_model(kind.config_from_hf(before), config):
                return kind, before
        if wanted and wanted not in FAMILIES:
            raise PlanError(
                f"family={wanted!r} is not supported. Use one of {', '.join(FAMILIES)}."
            )
        if wanted:
            return find_family(wanted), find_family(wanted).config_to_hf(config)
        return find_fitting_family(config, str(before.get("model_type", "")))
    except UnsupportedModelError as error:
        raise PlanError([f"The model of {origin} cannot be exported.", str(error)]) from None


def _is_same_model(one: DecoderConfig, other: DecoderConfig) -> bool:
    """Whether two model configs are equal except for training settings."""
    names = [f.name for f in fields(DecoderConfig) if f.name not in TRAINING_SETTINGS]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def weight_reader(source: CheckpointSource, run: RunConfig) -> Callable[[str], Tensor]:
    """Return a function that reads a full weight by name, with its adapter merged."""
    there = run.lora.rank > 0 and any(".adapters." in name for name in source.tensor_specs)
    if there:
        known = adapted_weights(run.decoder, run.lora)
    else:
        known = {}

    def some(names: Sequence[str]) -> Mapping[str, Tensor]:
        found = source.read_tensors([f"{name}.master" for name in names])
        return {name: found[f"{name}.master"] for name in names}

    return lambda name: merge_adapter(name, some, run.lora, known)


def _config_dtype(theirs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype given in a config.json; None if there is none."""
    word = str(theirs.get("dtype") or theirs.get("torch_dtype") or "")
    return next((x for x in DTYPES_BY_NAME.values() if str(x) == f"torch.{word}"), None)


def token_ids(origin: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The bos, eos and pad token ids for a generated config.json that has none.

    They come from the imported model, of any family, because ids belong to its tokenizer; for
    other runs the eos id comes from the tokenizer. A missing id is written as null: otherwise the
    default of the family would apply.
    """
    if (origin / "config.toml").exists():
        kept = origin / ORIGIN_DIR
    else:
        kept = origin
    # `kept` is the directory of the original files: inside a run, or the published model itself.
    if (kept / "config.json").exists():
        before = published.read_json_table(kept / "config.json")
        # The original config.json is exported unchanged.
        if before == theirs:
            return {}
        family = FAMILIES.get(str(before.get("model_type")))
        if family is not None:
            meant = dict(zip(SPECIAL_TOKEN_KEYS, family.token_ids, strict=True))
        else:
            meant = {}
        known = range(int(theirs["vocab_size"]))
        # The default ids of the family, where they are inside the vocabulary.
        default = {key: number for key, number in meant.items() if number in known}
        return {
            key: before.get(key, default.get(key))
            for key in SPECIAL_TOKEN_KEYS
            if key not in theirs
        }
    from ranvier.data.tokenizer import load_tokenizer

    words = origin / "tokenizer.json"
    if words.exists():
        end = load_tokenizer(str(words), origin).eos_token_id
    else:
        end = None
    return {**dict.fromkeys(SPECIAL_TOKEN_KEYS), "eos_token_id": end}


def copy_tokenizer_files(origin: Path, here: Path, config: Mapping[str, Any]) -> None:
    """Write tokenizer and generation settings: the original files, otherwise files of the run."""
    if (origin / "config.toml").exists():
        kept = origin / ORIGIN_DIR
    else:
        kept = origin
    for name in ORIGIN_FILES:
        if name != "config.json":
            _copy_if_present(kept / name, here / name, origin)
    if not (here / "generation_config.json").exists():
        known = {key: config[key] for key in SPECIAL_TOKEN_KEYS if config.get(key) is not None}
        _write_json(here / "generation_config.json", known)
    if (origin / "tokenizer.json").exists() and not (here / "tokenizer.json").exists():
        _copy_if_present(origin / "chat_template.jinja", here / "chat_template.jinja", origin)
        from ranvier.data.tokenizer import load_tokenizer

        words = load_tokenizer(str(origin / "tokenizer.json"), origin)
        _copy_if_present(origin / "tokenizer.json", here / "tokenizer.json", origin)
        table = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": words.token_name(words.eos_token_id),
        }
        _write_json(here / "tokenizer_config.json", table)


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


@contextmanager
def transfer_progress(what: str) -> Iterator[published.ByteProgress]:
    """Show progress in GiB for large models."""
    with show_progress(what, least=PROGRESS_MIN_BYTES) as show:
        yield lambda done, total: show(
            done, total, f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB"
        )


# ---- commands ---------------------------------------------------------------------------


def print_lines(lines: Sequence[str]) -> int:
    """Print lines; returns the exit code 0."""
    print("\n".join(lines))
    return 0

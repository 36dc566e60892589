"""Help of commands with many settings: a short page first, then sections, then everything.

`--help` shows the common settings and the names of the sections, `--help SECTION` shows one
section, and `--help-all` shows all of them. tyro parses the options; this module only formats help,
and suggests the Ranvier name for options of other frameworks.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any

from ranvier.errors import PlanError
from ranvier.setting import setting_info
from ranvier.system.terminal import print

COMMON_SETTINGS = (
    "model.size",
    "data.sources",
    "data.seq_len",
    "train.steps",
    "train.output_dir",
    "train.init_from",
    "train.device",
    "optim.lr",
    "plan.global_batch",
    "plan.data",
    "plan.depth",
    "plan.row",
    "plan.pipe",
    "checkpoint.interval",
)
"""Settings that users change most often, in the order of the help page."""

SYNONYMS = {
    "tp": ("plan.row", "tensor parallelism"),
    "tensor_parallel": ("plan.row", "tensor parallelism"),
    "tensor_parallel_size": ("plan.row", "tensor parallelism"),
    "tensor_model_parallel_size": ("plan.row", "tensor parallelism"),
    "sp": ("plan.row", "sequence parallelism"),
    "pp": ("plan.pipe", "pipeline parallelism"),
    "pipeline_parallel_size": ("plan.pipe", "pipeline parallelism"),
    "pipeline_model_parallel_size": ("plan.pipe", "pipeline parallelism"),
    "dp": ("plan.data", "data parallelism"),
    "ddp": ("plan.data", "data parallelism"),
    "data_parallel_size": ("plan.data", "data parallelism"),
    "fsdp": ("plan.depth", "fully sharded data parallelism"),
    "zero3": ("plan.depth", "fully sharded data parallelism"),
    "dp_shard": ("plan.depth", "fully sharded data parallelism"),
    "ep": ("plan.expert", "expert parallelism"),
    "expert_parallel_size": ("plan.expert", "expert parallelism"),
    "cp": ("plan.context", "context parallelism"),
    "context_parallel_size": ("plan.context", "context parallelism"),
    "learning_rate": ("optim.lr", "the learning rate"),
    "wd": ("optim.weight_decay", "the weight decay"),
    "grad_clip": ("optim.max_grad_norm", "the maximum gradient norm"),
    "clip_grad": ("optim.max_grad_norm", "the maximum gradient norm"),
    "max_steps": ("train.steps", "the number of steps"),
    "train_iters": ("train.steps", "the number of steps"),
    "iters": ("train.steps", "the number of steps"),
    "batch_size": ("plan.global_batch", "the global batch"),
    "global_batch_size": ("plan.global_batch", "the global batch"),
    "micro_batch_size": ("plan.micro_batch", "the micro-batch"),
    "per_device_train_batch_size": ("plan.micro_batch", "the micro-batch"),
    "seq_length": ("data.seq_len", "the sequence length"),
    "max_seq_len": ("data.seq_len", "the sequence length"),
    "block_size": ("data.seq_len", "the sequence length"),
    "dataset": ("data.sources", "the training data"),
    "save": ("train.output_dir", "the directory of the run"),
    "save_interval": ("checkpoint.interval", "the checkpoint interval"),
    "save_steps": ("checkpoint.interval", "the checkpoint interval"),
    "eval_steps": ("train.eval_interval", "the evaluation interval"),
    "gradient_checkpointing": ("plan.recompute", "activation checkpointing"),
    "activation_checkpoint": ("plan.recompute", "activation checkpointing"),
    "precision": ("train.dtype", "the data type"),
    "bf16": ("train.dtype", "the data type"),
    "fp16": ("train.dtype", "the data type"),
    "nproc_per_node": ("nproc", "the number of local ranks"),
}
"""Option of another framework, without its section -> our setting, and its description."""


def option_names(default: Any, path: str = "") -> dict[str, Any]:
    """Returns the dotted names of all options of a command, with their default values."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        value = getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            found |= option_names(value, f"{path}{field.name}.")
        else:
            found[f"{path}{field.name}"] = value
    return found


def check_option_names(words: Sequence[str], default: Any) -> None:
    """Raises for an option that has a different name here, with its name here.

    Other unknown options are left to the parser, which suggests similar spellings.
    """
    known = option_names(default)
    sections = {name.partition(".")[0] for name in known}
    for word in words:
        name = word[2:].partition("=")[0].replace("-", "_")
        if not word.startswith("--") or not name or name in known or name in sections:
            continue
        section, _, last = name.rpartition(".")
        ours, meaning = SYNONYMS.get(last, ("", ""))
        if not ours:
            # A setting without its section, or in the wrong one: `--train.lr`, `--steps`. If
            # several sections have it, the parser lists them.
            same = [one for one in known if one.rpartition(".")[2] == last]
            if len(same) == 1 and (section in sections or not section):
                ours = same[0]
        if ours in known:
            shown = "--" + ours.replace("_", "-")
            given = "--" + name.replace("_", "-")
            if meaning:
                explanation = f" Here, {meaning} is {shown}."
            else:
                explanation = ""
            raise PlanError(f"{given} is not an option.{explanation} Use {shown}.")


def print_short_help(usage: str, default: Any) -> None:
    """Prints the options of the command, the common settings, and the names of all sections."""
    known = option_names(default)
    common = [name for name in COMMON_SETTINGS if name in known]
    own = [name for name in known if "." not in name]
    print(f"usage: ranvier {usage} [--SECTION.NAME VALUE ...]\n")
    summary = inspect.getdoc(type(default))
    if summary:
        print(summary + "\n")
    # Two lines per setting keep the page short; `--help SECTION` has the whole text.
    for title, names, limit in (("Options", own, None), ("Common settings", common, 2)):
        if names:
            print(f"{title}:")
            for name in names:
                print(_format_option(name, known[name], _setting_text(default, name), limit))
            print()
    sections = dict.fromkeys(name.partition(".")[0] for name in known if "." in name)
    print(f"Sections: {', '.join(sections)}.")
    print("  --help SECTION   show all settings of a section")
    print("  --help-all       show all settings")
    print("The same names are keys in a TOML file: --plan.row 2 is row = 2 under [plan].")


def _format_option(name: str, value: Any, text: str, max_lines: int | None) -> str:
    """Formats an option, its default and the sentences of its description that fit."""
    option = "--" + name.replace("_", "-")
    shown = _format_value(value)
    first, *rest = text.rstrip(".").split(". ")
    lines = textwrap.wrap(first, 100 - 36, max_lines=max_lines, placeholder=" ...")
    for sentence in rest:
        first += f". {sentence}"
        longer = textwrap.wrap(first, 100 - 36)
        if max_lines is not None and len(longer) > max_lines:
            break
        lines = longer
    return f"  {option:<22} {shown[:10]:<10} " + f"\n{'':<36}".join(lines)


def _format_value(value: Any) -> str:
    if value in (None, "", ()):
        return "-"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


def field_texts(kind: type) -> dict[str, str]:
    """Returns the docstring under each field of a dataclass and of its base classes."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef), cls
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(field.target, ast.Name), ast.dump(field)
                texts[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


def _setting_text(default: Any, name: str) -> str:
    """Returns the description of a setting by its dotted name."""
    *sections, last = name.split(".")
    for section in sections:
        default = getattr(default, section)
    return field_texts(type(default)).get(last, "")


def section_names(default: Any) -> list[str]:
    """Returns the sections of a command's settings."""
    return [
        field.name
        for field in dataclasses.fields(default)
        if dataclasses.is_dataclass(getattr(default, field.name))
    ]


def print_section_help(default: Any, section: str) -> None:
    """Prints all settings of a section: default, values, bounds, unit and description."""
    if section not in section_names(default):
        raise PlanError(
            f"{section!r} is not a section. Sections are {', '.join(section_names(default))}. Use "
            "one of them, or --help-all."
        )
    config = getattr(default, section)
    texts = field_texts(type(config))
    hints = typing.get_type_hints(type(config))
    print(f"{section}: {inspect.getdoc(type(config))}\n")
    for field in dataclasses.fields(config):
        value = _format_value(getattr(config, field.name))
        values = ", ".join(
            filter(None, (describe_type(hints[field.name]), setting_info(field).describe_bounds()))
        )
        print(f"  --{section}.{field.name.replace('_', '-')} {value}   ({values})")
        for line in textwrap.wrap(texts.get(field.name, ""), 100 - 6):
            print(f"      {line}")
    print()


def describe_type(hint: Any, quote: str = "") -> str:
    """Returns the type of a setting as text: its choices, or its type."""
    # `X | None` is a value that is derived if it is not given.
    if isinstance(hint, types.UnionType):
        return describe_type(typing.get_args(hint)[0], quote)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"{quote}{word}{quote}" for word in arguments)
    if typing.get_origin(hint) is tuple:
        one = describe_type(arguments[0], quote)
        return f"list of {one}" if typing.get_args(arguments[0]) else f"list of {one}s"
    if hint is bool:
        return f"{quote}true{quote}, {quote}false{quote}"
    return {int: "integer", float: "number", str: "string"}[hint]

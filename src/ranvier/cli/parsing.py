"""Parses the settings of a command line, on top of defaults, a file or a run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast, get_args

from ranvier.cli import help
from ranvier.config import run as runs
from ranvier.config.kinds import named_model
from ranvier.config.plan import AXES
from ranvier.config.run import RunConfig
from ranvier.config.sections import OptimizerName
from ranvier.errors import PlanError
from ranvier.system.terminal import escape_controls, print

USAGE_ERROR = PlanError.exit_code
ConfigT = TypeVar("ConfigT")
RunT = TypeVar("RunT", bound=RunConfig)


@dataclass(frozen=True)
class NoOptions:
    """No settings."""


def parse_options(
    kind: type[ConfigT], default: ConfigT, verb: str, words: Sequence[str], about: str | None = None
) -> ConfigT:
    """Returns `default` overridden by the options in `words`.

    A boolean option can be used alone, or followed by true or false, in all commands.

    about: the text at the top of the help, instead of the docstring of `kind`.
    """
    if not words:
        return default
    help.check_option_names(words, default)
    # A run has more settings than fit on a screen; other commands have one page of options.
    if isinstance(default, RunConfig):
        asked = next((i for i, word in enumerate(words) if word in ("--help", "-h")), None)
        if "--help-all" in words:
            help.print_short_help(verb, default)
            print()
            for section in help.section_names(default):
                help.print_section_help(default, section)
            raise SystemExit(0)
        if asked is not None and words[asked + 1 :]:
            help.print_section_help(default, words[asked + 1])
            raise SystemExit(0)
        if asked is not None:
            help.print_short_help(verb, default)
            raise SystemExit(0)
    # Imported here: without options a command starts faster.
    import tyro

    words = with_boolean_values(words, default)
    # tyro repeats words in its messages and adds colors, which escaping would destroy. So its
    # output is only escaped if a word contains control characters.
    odd = any(escape_controls(word) != word for word in words)
    try:
        with _escaped_output() if odd else contextlib.nullcontext():
            settings: ConfigT = tyro.cli(
                kind,
                prog=f"ranvier {verb}",
                description=about,
                args=words,
                default=default,
                # Searching comments for help texts takes time.
                config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
            )
    except SystemExit as stop:
        raise SystemExit(USAGE_ERROR if stop.code else 0) from None
    return settings


@contextlib.contextmanager
def _escaped_output() -> Iterator[None]:
    """Buffers everything printed inside, then prints it with control characters escaped."""
    texts = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    try:
        with (
            contextlib.redirect_stdout(texts["stdout"]),
            contextlib.redirect_stderr(texts["stderr"]),
        ):
            yield
    finally:
        for name, text in texts.items():
            print(text.getvalue(), end="", file=getattr(sys, name), flush=True)


def with_boolean_values(words: Sequence[str], default: object) -> list[str]:
    """Returns the words with each boolean option and its value joined into one word.

    An option alone means True: `--adapter`, `--adapter true` and `--adapter=True` are the same. Any
    other value is left to the parser, which reports it.
    """
    booleans = set(_boolean_options(default))
    found = []
    rest = list(words)
    while rest:
        option, sign, text = rest.pop(0).partition("=")
        if option in booleans and not sign:
            following = rest[0] if rest else "-"
            if following.startswith("-"):
                sign = "="
                text = "True"
            elif following.lower() in ("true", "false"):
                sign = "="
                text = rest.pop(0)
        if option in booleans and text.lower() in ("true", "false"):
            text = text.capitalize()
        found.append(f"{option}{sign}{text}")
    return found


def _boolean_options(default: object, path: str = "--") -> Iterator[str]:
    """Yields the options of boolean settings, with underscores and with hyphens."""
    for name, value in vars(default).items():
        if dataclasses.is_dataclass(value):
            yield from _boolean_options(value, f"{path}{name}.")
        elif isinstance(value, bool):
            yield from (f"{path}{name}", f"{path}{name.replace('_', '-')}")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words before the first option, and the rest."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:first]), list(words[first:])


def load_run_with_options(
    kind: type[RunT],
    usage: str,
    words: Sequence[str],
    change: Callable[[RunConfig], RunConfig] = lambda run: run,
) -> RunT:
    """Returns settings from defaults, then the file or the run, then options.

    change: applied to the run before the options.
    """
    files, options = split_words(_expand_plan_auto(words))
    if len(files) > 1:
        raise PlanError(
            f"Two paths are given: {files[0]!r} and {files[1]!r}. Only one file or run is read. "
            "Remove one of them."
        )
    # Kind and size determine the defaults of the whole model section, so they are needed before
    # the file is read.
    named = {key: option_value(options, f"--model.{key}") for key in ("size", "kind")}
    model = {key: value for key, value in named.items() if value is not None}
    if files and os.path.isdir(files[0]):
        if not (Path(files[0]) / "config.toml").exists():
            raise PlanError(
                f"{files[0]} is a directory without config.toml. Pass a TOML file, or the "
                "directory of a run to resume it."
            )
        run = runs.load_run_config(Path(files[0]) / "config.toml", model=model, in_run=True)
        # The run may be resumed on other nodes than before.
        here = replace(run.launch, nnodes=1, node_rank=0, rdzv_endpoint="")
        # These settings were meant for the first launch; a resumed run starts from its own
        # checkpoints.
        own = replace(
            run.checkpoint,
            resume="auto",
            allow_data_mismatch=False,
            allow_config_mismatch=False,
            strict=True,
        )
        run = replace(
            run, train=replace(run.train, output_dir=files[0]), launch=here, checkpoint=own
        )
        run = _with_other_optimizer(run, option_value(options, "--optim.name"))
        own_words = Path(files[0]) / "tokenizer.json"
        # The directory of an imported run may have been moved together with its tokenizer.
        if own_words.exists() and (Path(files[0]) / "published").is_dir():
            run = replace(run, data=replace(run.data, tokenizer=str(own_words.absolute())))
        if any(option_value(options, name) for name in ("--nproc", *(f"--plan.{a}" for a in AXES))):
            # Another grid is requested: infer data, unless it is given as well.
            run = replace(run, plan=replace(run.plan, data=-1))
    elif files:
        run = runs.load_run_config(Path(files[0]), model=model)
    else:
        run = RunConfig(model=named_model(**model))
    # A new run that starts from a pretrained model takes over its architecture; a resumed run
    # already has it.
    start = option_value(options, "--train.init-from") or run.train.init_from
    if start and not (files and os.path.isdir(files[0])):
        from ranvier.system.model_hub import find_model

        # A missing model is reported before torch is imported.
        find_model(start)
        from ranvier.train import import_export

        run = import_export.init_from(replace(run, train=replace(run.train, init_from=start)))
    run = change(run)
    default = kind(**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)})
    return parse_options(kind, default, usage, options)


def _with_other_optimizer(run: RunConfig, name: str | None) -> RunConfig:
    """Returns a stored run whose learning rate is open if it does not suit the new optimizer.

    It suits optimizers that have the same default: AdamW and Muon, or SGD and Jorge.
    """
    # An unknown name is reported when all options are parsed.
    if name not in get_args(OptimizerName):
        return run
    other = cast(OptimizerName, name)
    before, after = (
        replace(run, optim=replace(run.optim, lr=None, name=one)) for one in (run.optim.name, other)
    )
    if before.peak_lr == after.peak_lr:
        return run
    return replace(run, optim=replace(run.optim, lr=None))


def _expand_plan_auto(words: Sequence[str]) -> list[str]:
    """Returns the words with `--plan auto` replaced by `--plan.auto=True`."""
    # NUL cannot occur in an argument, so it separates words safely.
    text = "\0".join(words).replace("--plan\0auto", "--plan=auto")
    found = text.split("\0") if text else []
    return ["--plan.auto=True" if word == "--plan=auto" else word for word in found]


def given_settings(words: Sequence[str]) -> set[str]:
    """Returns the dotted names of the settings that a file or options set.

    The file of a run contains all settings, so only its batch and sequence length count.
    """
    files, options = split_words(words)
    names = {word[2:].partition("=")[0].replace("-", "_") for word in options if word[:2] == "--"}
    if files and os.path.isdir(files[0]):
        return names | {"plan.global_batch", "data.seq_len"}
    for file in files:
        for section, table in tomllib.loads(Path(file).read_text(encoding="utf-8")).items():
            names |= {f"{section}.{key}" for key in table} if isinstance(table, dict) else set()
    return names


def drop_options(words: Sequence[str], names: Iterable[str]) -> list[str]:
    """Returns the words without these options and their values."""
    found = []
    skip = False
    for word in words:
        if word.startswith("--"):
            skip = word[2:].partition("=")[0].replace("-", "_") in names
        if not skip:
            found.append(word)
    return found


def option_value(words: Sequence[str], name: str) -> str | None:
    """Returns the last value given to an option; None if it is not given."""
    found = None
    for i, word in enumerate(words):
        if word.startswith(f"{name}="):
            found = word.partition("=")[2]
        if word == name and i + 1 < len(words):
            found = words[i + 1]
    return found


def two_paths(usage: str, words: Sequence[str], about: str | None = None) -> tuple[Path, Path]:
    """Returns the two paths of a command."""
    names, options = split_words(words)
    if options:
        # Prints the help, or reports the unknown option.
        parse_options(NoOptions, NoOptions(), usage, options, about)
    if len(names) != 2:
        raise PlanError(
            f"{len(names)} path(s) given. The command needs two paths. Use: ranvier {usage}."
        )
    return Path(names[0]), Path(names[1])


def one_path(
    verb: str, what: str, words: Sequence[str], about: str | None = None, name: str = "PATH"
) -> str:
    """Returns the only path of a command, or another word that `name` describes."""
    names, options = split_words(words)
    if options:
        parse_options(NoOptions, NoOptions(), f"{verb} {name}", options, about)
    if len(names) != 1:
        raise PlanError(
            f"{verb} was given {len(names)} arguments. It needs {what}. Use: ranvier {verb} {name}."
        )
    return names[0]

"""Writes the generated pages of docs/reference from the code.

Usage: python scripts/reference.py [--check]
Settings, options, commands and launcher variables come from the classes and docstrings that
`ranvier --help` prints, so they are described once. --check writes nothing and returns 1 if a page
is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ranvier import errors
from ranvier.cli import generate as cli_generate
from ranvier.cli import main as cli
from ranvier.cli import plan as cli_plan
from ranvier.cli import serve as cli_serve
from ranvier.cli.completion import find_option_class
from ranvier.cli.help import describe_type, field_texts
from ranvier.config import arguments as cli_arguments
from ranvier.config.refusals import REFUSALS
from ranvier.config.run import RunConfig
from ranvier.launch import environment
from ranvier.models import MODEL_SIZES
from ranvier.setting import setting_info
from ranvier.train.metrics import Meter
from ranvier.train.report import memorization, moe, work

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"

NOTE = "<!-- Written by scripts/reference.py. Change the code or that script, not this page. -->"
SECTIONS = dataclasses.fields(RunConfig)
SERVE_SECTIONS = ("engine", "serve")
"""Sections of `ranvier serve` that a run does not have."""
INTERNAL_OPTIONS = ("replica", "replica_socket")
"""Options with which a server starts its own processes."""

CONFIGURATION = f"""\
# Configuration

A run has {len(SECTIONS)} sections of settings. They are read from a TOML file, and options of the
same names override the file:

```toml
[model]
size = "llama3-1b"

[data]
sources = ["data/books", "data/code"]
mixture_weights = [0.7, 0.3]
seq_len = 4096

[plan]
row = 2
global_batch = 64
```

```bash
ranvier train run.toml --plan.row 2 --train.steps 2000
```

* **Precedence:** options override the file, the file overrides the named size of the model, and
  the size overrides the defaults below. `--model.size` replaces the size in the file; other model
  settings in the file keep their values.
* **Resuming:** `ranvier train RUN` reads `config.toml` in the run directory and continues the
  run. Options that follow change the run.
* **Errors:** an unknown key or option is an error that suggests the nearest known name. All
  values are checked before anything starts, and all problems are reported together.
* **Resolved values:** the run directory contains `config.toml` with every setting. Settings that
  were left open, for example the learning rate or the micro-batch, have the values that were
  used. `ranvier train --dry-run` prints these decisions without training.
* **Booleans** are `true` and `false`; an option alone means `true`: `--train.trace-comm`.
* **Lists** are several words: `--data.sources a.jsonl b.jsonl`. An option without words is the
  empty list: `--plan.overlap`.
* **Names** can have dashes or underscores: `--plan.micro-batch` is `--plan.micro_batch`.
* **Order:** options follow the file: `ranvier train run.toml --plan.row 2`.
* **Paths** are relative to the working directory.

`--nproc N` starts N local ranks. It is an option of the [command](commands.md#train), not a
setting of the run.

The last two sections, [engine](#engine) and [serve](#serve), are not settings of a run, but options
of [`ranvier serve`](commands.md#serve): `--engine.max-num-seqs 64`.
[`ranvier generate`](commands.md#generate) takes those of `engine` as well.
"""

METRICS = {
    "step": "Index of the step, starting at 0.",
    "tokens": "Tokens processed so far, including this step and padding.",
    "supervised_tokens": "Targets of the loss so far, including this step: tokens without padding, "
    "prompts, and what the goldfish loss drops.",
    "loss": "Mean loss over all targets of the step. Null if it is not finite.",
    "lr": "Learning rate of this step, before the factor of a parameter group.",
    "grad_norm": "Gradient norm of the whole model before clipping. Null if it is not finite.",
    "step_seconds": "Seconds from the end of the previous step to the end of this one. After an "
    "evaluation or a checkpoint the time starts with the step itself.",
    "tokens_per_second": "Throughput of all ranks together.",
    "mfu": "Model FLOPs utilization with causal attention. Null if the peak of the device is "
    "not known (CPU, fp32, GPUs that are not in the list).",
    "mfu_noncausal": "Model FLOPs utilization with full attention, the convention of many papers.",
    "peak_memory_bytes": "Peak memory of any rank so far: of its GPU, or of the process on a CPU.",
    "exposed_communication_seconds": "Seconds that rank 0 waited for communication.",
    "data_seconds": "Seconds that rank 0 waited for its batch.",
    "val_loss": "Mean loss of the validation samples. Null in steps without an evaluation.",
    "loss_scale": "Loss scale of fp16 training. Null for other types.",
    "skipped": "True if the update was skipped: the loss or a gradient was not finite and a "
    "smaller loss scale does not help, or the step is a spike and `guard.on_spike` is `skip`.",
    "spike": "True if the loss is above the spike limit, see `guard.spike_threshold`.",
    "skipped_total": "Number of skipped updates so far.",
}
MOE_METRICS = {
    "expert_load": "Tokens of the busiest expert of any layer, relative to the mean of its layer.",
    "expert_idle": "Fraction of experts that received no token.",
    "expert_drops": "Fraction of routing choices that the capacity limit dropped.",
    "expert_entropy": "Entropy of the router scores of a token in nats, mean over tokens and "
    "layers.",
    "expert_loss": "Auxiliary losses of all layers, per token.",
    "expert_loads": "List: fraction of all choices per expert, mean over layers.",
}
WORK_METRICS = {
    "attention_imbalance": "Scores that the rank with the most attention work computes, relative "
    "to the mean of all ranks.",
    "token_imbalance": "Tokens without padding of the rank with the most, relative to the mean.",
    "keys_fetched": "Keys that ranks get from others over `context`, as a fraction of all keys of "
    "the others, mean over ranks and layers. Null without `context` or with `ulysses`.",
    "efficiency_lost_to_imbalance": "Fraction of the compute that ranks wait for others with more "
    "work, predicted from FLOPs.",
    "rank_attention": "List: attention work of each rank relative to the mean, by data, expert, "
    "depth, col and context. Ranks that differ in `pipe` and `row` only have the same. Missing for "
    "more than 64.",
}
CANARY_METRICS = {
    "canary_match": "Object: fraction of the canaries of each bucket whose last "
    "`train.canary_suffix` tokens follow by greedy decoding from the tokens before them.",
    "canary_loss": "Object: mean loss of the canaries of each bucket, in nats per token.",
}
FILES = {
    "config.toml": "All settings with the values that were used. `ranvier train RUN` reads it.",
    "run.json": "Facts on the run, see below.",
    "metrics.jsonl": "One JSON object per step, see [Metrics](metrics.md).",
    "checkpoints/step-NNNNNNNN/": "A checkpoint after that many steps: `rank-NNNNN.safetensors` "
    "per rank and `manifest.json` with checksums. It can be loaded on any grid.",
    "checkpoints/latest": "Name of the latest complete checkpoint.",
    "tokenizer.json": "The tokenizer of the corpora, if it is known.",
    "report.html": "Plots and facts in one self-contained file.",
    "timeline.json": "Measured times of the last step of a pipeline, for `ranvier simulate "
    "pipeline`.",
    "tensorboard/, wandb/": "Logs of the loggers in `train.loggers`.",
    "trace-rank*.json": "Communication of the last step, with `train.trace_comm`. Open it in "
    "Perfetto.",
    "eval-STEP.json": "Results of `ranvier eval`.",
    "eval-STEP.html, needle-STEP.jsonl": "Heat map and answers of `ranvier eval --tasks needle`.",
    "canaries-STEP.jsonl": "Canaries and answers of `ranvier eval --canaries`.",
    "profile/": "Results of `ranvier profile`.",
    "published/": "Files of an imported model except its weights.",
    "before-N-*": "Checkpoints and metrics of an earlier run in the same directory, moved by "
    "`checkpoint.resume=never`.",
    ".lock": "The lock of the process that writes the directory. The kernel releases it when "
    "the process ends.",
}
RUN_JSON = {
    "status": "`finished`, `stopped by signal N`, `failed: ...`, or `unfinished` during "
    "training and if all processes were killed.",
    "started, finished": "Time of the first start and of the end.",
    "command, versions, device, world, grid": "How and where the run was started.",
    "model, parameters, groups, corpora, fingerprint": "What is trained on which data.",
    "decisions": "Settings that were left open, with their values and reasons.",
    "algorithms": "Algorithms of collectives: the setting, what was measured, and its source.",
    "phases": "Seconds by phase: compute, exposed communication, data, evaluation, checkpoints.",
    "memory": "Predicted and measured memory by category.",
    "prediction": "Predicted and measured step time, if the planner chose the layout.",
    "launches, goodput": "Each launch with the reasons for its restarts, and the fraction of "
    "the time that was spent in steps that counted.",
    "restarts": "Steps at which the run was resumed.",
    "nonfinite_steps, spikes, skipped_total, rewinds": "Counters of the loss guard.",
}
CODES: dict[int, tuple[type[errors.RanvierError] | None, str, str]] = {
    0: (
        None,
        "The command succeeded.",
        "",
    ),
    1: (
        None,
        "`ranvier verify` found a difference or a rank crashed; `ranvier doctor` misses "
        "something essential; `ranvier checkpoint diff` found a difference.",
        "Read the output.",
    ),
    64: (
        errors.PlanError,
        "A setting, option, plan or model is invalid.",
        "Fix the command.",
    ),
    65: (
        errors.DataError,
        "Training data or a tokenizer cannot be used.",
        "Fix the data.",
    ),
    66: (
        errors.CheckpointError,
        "A checkpoint is missing, damaged, or of another model.",
        "Run `ranvier checkpoint verify RUN`.",
    ),
    70: (
        errors.DeviceMemoryError,
        "Internal error with a traceback, or a step that does not fit on its device.",
        "See [Out of memory](../troubleshooting/out-of-memory.md), or report it.",
    ),
    71: (
        errors.CommunicationError,
        "Ranks could not connect, disagree, or were lost. A rank that a signal kills has this "
        "code.",
        "See [Hangs](../troubleshooting/hangs.md).",
    ),
    72: (
        errors.HangError,
        "A rank made no progress. The stacks of all ranks were printed.",
        "See [Hangs](../troubleshooting/hangs.md).",
    ),
    73: (
        errors.WriteError,
        "A file cannot be written: full disk, no permission, or a directory that was removed.",
        "Free space or choose another directory.",
    ),
    74: (
        errors.NumericError,
        "Too many non-finite losses or gradients, or too many spikes.",
        "See [NaN and loss spikes](../troubleshooting/nan.md).",
    ),
    75: (
        None,
        "A signal stopped the run. A checkpoint was saved.",
        "Run the same command again.",
    ),
    76: (
        errors.VersionError,
        "A file has another format version.",
        "Use the matching release.",
    ),
    77: (
        errors.UnsafeInputError,
        "Unsafe input was refused: path traversal, symlink, pipe, device, file that is too "
        "large, pickle, chat template beyond its limits, or a run directory that another "
        "process writes.",
        "Read the message.",
    ),
    93: (
        None,
        "Ranks were restarted repeatedly without completing a new step.",
        "Fix the cause first. Do not restart.",
    ),
    130: (
        None,
        "SIGINT (Ctrl-C) twice, or once for a command that does not train.",
        "",
    ),
    141: (
        None,
        "The output pipe of a command other than `train` was closed.",
        "",
    ),
    143: (
        None,
        "SIGTERM twice, or once for a command that does not train.",
        "",
    ),
}
VARIABLES = {
    "RANVIER_API_KEY": "API keys that `ranvier serve` accepts, separated by commas, in addition to "
    "those in `serve.api_key_file`.",
    "RANVIER_ADDOPTS": "Options appended to those of `ranvier train`, `verify` and `profile`. "
    "They override what is written on the command line, as `PYTEST_ADDOPTS` does for pytest. "
    "The tests of this documentation use it to run every command with small sizes.",
    "RANVIER_CACHE": "Cache directory for tokenized corpora, compiled kernels, measured "
    "clusters and plans. Default: `ranvier` in `XDG_CACHE_HOME` or `~/.cache`; if that is not "
    "writable, a directory in the temporary directory.",
    "RANVIER_COMPILE_ERRORS": "What happens if a block cannot be compiled or a step cannot be "
    "captured as a CUDA graph, where `plan.compile_errors` is `auto`: `fallback` (the default; it "
    "runs without a graph, and a warning says why) or `raise`, for checks and benchmarks.",
    "RANVIER_KEY": "Secret that all ranks of a run on several nodes share, at least 32 "
    "characters. Create it with `openssl rand -hex 32`.",
    "RANVIER_KEY_FILE": "File that contains the secret; only its owner may have access to it "
    "(`chmod 600`). Default: `ranvier/key` in `XDG_CONFIG_HOME` or `~/.config`, created when it "
    "is first needed.",
    "RANVIER_LISTEN": "Address at which rank 0 or node 0 listens if other nodes reach it at a "
    "different address (port mapping, NAT). `0.0.0.0` means all interfaces.",
    "RANVIER_ERROR_FILE": "File to which a rank writes its error as JSON instead of printing it.",
    "RANVIER_LAUNCHER": "Set by Ranvier for the processes it starts. Do not set it.",
}
LIBRARY_VARIABLES = {
    "OMP_NUM_THREADS": "Threads per rank on a CPU. If it is not set, local ranks divide the "
    "cores. torchrun sets it to 1.",
    "CUDA_VISIBLE_DEVICES": "GPUs that a rank can use. Rank r uses GPU (local rank) modulo "
    "(number of visible GPUs).",
    "XDG_CACHE_HOME": "Parent of the default cache directory.",
    "XDG_CONFIG_HOME": "Parent of the directory of the default key file.",
    "CC": "C compiler that Triton uses; gcc, cc and clang are tried as well.",
    "CXX": "C++ compiler for compiled blocks on a CPU; g++ and clang++ are tried as well.",
    "TORCHELASTIC_RUN_ID": "Set by torchrun (`--rdzv-id`); part of the key prefix of the store.",
    "TORCHELASTIC_USE_AGENT_STORE": "Set by torchrun if its agent hosts the store.",
    "NCCL_DEBUG": "Passed to NCCL; the communicator test of `ranvier doctor` then prints NCCL's "
    "log.",
}
DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": "`expandable_segments:True`, which reduces fragmentation.",
    "THP_MEM_ALLOC_ENABLE": "`1`: huge pages for CPU tensors.",
    "GLOO_SOCKET_IFNAME": "The network interface that leads to rank 0.",
    "NCCL_SOCKET_IFNAME": "`lo` if all ranks are on one node.",
    "NCCL_RUNTIME_CONNECT": "`0`: communicators connect when they are created.",
    "NCCL_HOSTID": "A different value per rank, only with `launch.share_gpu`.",
    "NCCL_IB_DISABLE": "`1`, only with `launch.share_gpu`.",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "`1`, only with `launch.share_gpu`.",
    "TORCH_NCCL_ENABLE_MONITORING": "`0`: Ranvier's watchdog detects hangs.",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "`0`.",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "`false`.",
    "CUBLAS_WORKSPACE_CONFIG": "`:4096:8`, only with `train.deterministic`.",
    "TORCHINDUCTOR_CACHE_DIR": "A directory in the cache of Ranvier.",
    "TRITON_CACHE_DIR": "A directory in the cache of Ranvier.",
}

EXAMPLES = {
    "train": "ranvier train --data.sources my.jsonl --train.output-dir runs/mine",
    "import": "ranvier import path/to/model --output runs/base",
    "export": "ranvier export runs/mine --output exported",
    "upcycle": "ranvier upcycle runs/base --experts 4 --output runs/base-moe",
    "extend-context": "ranvier extend-context runs/base --max-position 2048 --output runs/long",
    "generate": 'ranvier generate runs/mine --prompt "def main(" --max-new-tokens 20',
    "serve": "ranvier serve runs/mine --dry-run",
    "eval": "ranvier eval runs/mine --corpus texts",
    "bench": "ranvier bench http://127.0.0.1:8000 --rate 4 --goodput ttft=200 tpot=50",
    "scaling-laws": "ranvier scaling-laws --design 6 --budget 1e17 --cluster dgx-h100",
    "report": "ranvier report runs/mine",
    "profile": "ranvier profile runs/mine --steps 1",
    "simulate pipeline": "ranvier simulate pipeline --plan.pipe 4 --plan.global-batch 32",
    "simulate serving": "ranvier simulate serving --model.size llama3-8b --cluster dgx-h200 "
    "--num-requests 50",
    "plan": "ranvier plan --model.size llama3-8b --cluster dgx-h100 --nodes 1",
    "dry-run": "ranvier dry-run --model.size gpt2 --plan.row 4 --plan.global-batch 8",
    "data prepare": "ranvier data prepare my.jsonl --output data/mine",
    "data needles": "ranvier data needles texts --tokens 100000 --output data/needles",
    "data canaries": "ranvier data canaries --documents 2 --buckets 0 8 --length 20 "
    "--output canaries.jsonl",
    "data show": "ranvier data show data/mine",
    "checkpoint ls": "ranvier checkpoint ls runs/mine",
    "checkpoint verify": "ranvier checkpoint verify runs/mine",
    "checkpoint diff": "ranvier checkpoint diff runs/mine runs/mine",
    "checkpoint convert": "ranvier checkpoint convert runs/mine weights --form weights",
    "verify": "ranvier verify --plan.row 2",
    "measure": "ranvier measure",
    "doctor": "ranvier doctor",
    "completion": "ranvier completion bash > ranvier-completion.bash",
}
"""An example per command. They run from top to bottom in one directory."""
NOT_RUN = {"measure": "gpu: needs an idle machine", "bench": "network: needs a server"}


# ---- tables -----------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


def paragraph(text: str) -> Iterator[str]:
    """Yields the lines of a paragraph."""
    yield from textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def described(head: Sequence[str], texts: dict[str, str]) -> Iterator[str]:
    """Yields a table of names and their descriptions; a key may have several names."""
    rows = [(", ".join(f"`{name}`" for name in key.split(", ")), v) for key, v in texts.items()]
    return table(head, rows)


def _default(value: Any) -> str:
    return "derived" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


# ---- configuration ----------------------------------------------------------------------


def section(name: str, config: Any) -> Iterator[str]:
    """Yields the settings of a section."""
    kind = type(config)
    hints, texts = typing.get_type_hints(kind), field_texts(kind)
    infos = {field.name: setting_info(field) for field in dataclasses.fields(config)}
    names = [*infos]
    names.sort(key=lambda key: key != "size")  # it sets the defaults of the others
    rows = [
        (
            f"`{name}.{key}`",
            ", ".join(filter(None, (describe_type(hints[key], "`"), infos[key].describe_bounds()))),
            _default(getattr(config, key)),
            texts[key],
        )
        for key in names
    ]
    yield from ("", f"## {name}", "", inspect.cleandoc(kind.__doc__ or ""), "")
    yield from table(("setting", "values", "default", "description"), rows)


def sizes() -> Iterator[str]:
    """Yields the named sizes of the model."""
    keys = (
        "layers",
        "embed",
        "heads",
        "kv_heads",
        "head_dim",
        "mlp",
        "experts",
        "vocab",
        "tie_embeddings",
    )
    rows = [
        [f"`{name}`", *(_toml(getattr(MODEL_SIZES[name], key)) for key in keys)]
        for name in MODEL_SIZES
    ]
    yield from ("", "The defaults above are for `tiny`. The named sizes are:", "")
    # A rule instead of a size: see `gemstone_size`.
    rule = ["`gemstone-WxD`", "D", "W", "W / 128", "W / 256", "128", "4 W", "0", "50304", "false"]
    yield from table(("size", *keys), [*rows, rule])


def refusals() -> Iterator[str]:
    """Yields the combinations of settings that are refused."""
    yield from ("", "## Combinations that are refused", "")
    yield "These are checked before anything starts. Names in braces stand for the values of a run."
    yield ""
    rows = [(f"`{one.says}`", one.rule, one.remedy) for one in REFUSALS]
    yield from table(("refused", "reason", "remedy"), rows)


def configuration() -> Iterator[str]:
    """Yields the page of all settings."""
    run = RunConfig()
    yield from CONFIGURATION.splitlines()
    for field in SECTIONS:
        yield from section(field.name, getattr(run, field.name))
        yield from sizes() if field.name == "model" else ()
    for name in SERVE_SECTIONS:
        yield from section(name, getattr(cli_serve.ServeOptions(), name))
    yield from refusals()


# ---- commands ---------------------------------------------------------------------------


def usage_lines() -> dict[str, tuple[str, str]]:
    """Returns the usage and the summary of each command, as `ranvier --help` prints them."""
    found: dict[str, tuple[str, str]] = {}
    verb = ""
    for line in cli.USAGE.split("\n\n")[1].splitlines():
        continued = re.fullmatch(r" {20,}(\S.*)", line)
        if continued:
            usage, summary = found[verb]
            found[verb] = (usage, f"{summary} {continued[1]}".strip())
            continue
        usage, _, summary = line.strip().partition("  ")
        words = usage.split()
        verb = " ".join(words[: 2 if words[0] in cli.SUBCOMMANDS else 1])
        found[verb] = (usage, summary.strip())
    return found


def command_functions() -> dict[str, cli.Command]:
    """Returns the function of each command and subcommand."""
    found: dict[str, cli.Command] = {}
    for name, command in cli.COMMANDS.items():
        if name in cli.SUBCOMMANDS:
            found |= {f"{name} {word}": one for word, one in cli.SUBCOMMANDS[name].items()}
        else:
            found[name] = command
    return found


def option_class(command: Callable[..., Any]) -> type | None:
    """Returns the class with the options of a command, found in the source of its function."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(command)))):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) in ("parse_options", "load_run_with_options"):
            name = ast.unparse(node.args[0]).rpartition(".")[2]
            found = [getattr(one, name, None) for one in (cli_arguments, cli_plan, cli_serve)]
            (kind,) = (one for one in found if isinstance(one, type))
            return kind
        # Functions that parse the options of one command.
        for parse in (
            cli.parse_train_options,
            cli_generate.parse_generate_options,
            cli_serve.parse_serve_options,
        ):
            if ast.unparse(node.func).rpartition(".")[2] == parse.__name__:
                return option_class(parse)
    return None


def options(kind: type) -> Iterator[str]:
    """Yields the table of a command's own options."""
    texts, hints = field_texts(kind), typing.get_type_hints(kind)
    nested = {one.name for one in SECTIONS} | {*SERVE_SECTIONS}
    own = [
        one
        for one in dataclasses.fields(kind)
        if one.name not in nested and one.name not in INTERNAL_OPTIONS
    ]
    rows = [
        (
            f"`--{one.name.replace('_', '-')}`",
            # Some choices include the empty text, which means "not given".
            describe_type(hints[one.name], "`").removeprefix("``, "),
            "-" if one.default in (None, "", ()) else f"`{_toml(one.default)}`",
            texts[one.name],
        )
        for one in own
    ]
    if rows:
        yield from table(("option", "values", "default", "description"), rows)
        yield ""
    if issubclass(kind, RunConfig):
        also = "also " if rows else ""
        yield (
            f"It {also}takes every [setting](configuration.md) of a run as an option, for example "
            "`--train.steps 100`."
        )
        yield ""
    elif kind is cli_serve.ServeOptions:
        yield from paragraph(
            "It also takes `--model.size`, the size of random weights, and the settings of the "
            "sections [plan](configuration.md#plan), [engine](configuration.md#engine) and "
            "[serve](configuration.md#serve), for example `--serve.port 8001`."
        )
        yield ""
    elif issubclass(kind, cli_arguments.InferenceOptions):
        yield from paragraph(
            "It also takes the settings of the sections [plan](configuration.md#plan) and "
            "[engine](configuration.md#engine), for example `--plan.row 2`."
        )
        yield ""


def commands() -> Iterator[str]:
    """Yields the page of all commands."""
    usages, functions = usage_lines(), command_functions()
    assert {*usages} == {*functions}, f"USAGE lists {[*usages]}, but commands are {[*functions]}"
    assert {*EXAMPLES} == {*functions}, f"EXAMPLES are {[*EXAMPLES]}, not {[*functions]}"
    yield from ("# Commands", "")
    yield from paragraph(
        "`ranvier COMMAND --help` prints the options of a command. Commands that take the "
        "settings of a run have a short page first: `--help SECTION` prints one section, "
        "`--help-all` everything. `python -m ranvier` is the same program, for launchers such "
        "as torchrun. The examples use the results of the examples before them."
    )
    yield ""
    rows = [
        (f"[`{name}`](#{name.replace(' ', '-')})", _sentence(text))
        for name, (_, text) in usages.items()
    ]
    yield from table(("command", "what it does"), rows)
    for name, (usage, summary) in usages.items():
        kind = option_class(functions[name])
        assert kind or name not in cli.COMMANDS or not find_option_class(name), name
        yield from ("", f"## {name}", "", _sentence(summary), "")
        yield from ("```text", f"ranvier {usage}", "```", "")
        more = inspect.cleandoc((kind and kind.__doc__) or "").partition("\n\n")[2]
        if more:
            yield from (*more.splitlines(), "")
        if kind is not None:
            yield from options(kind)
        if name in NOT_RUN:
            yield f"<!-- not run: {NOT_RUN[name]} -->"
        yield from ("```bash", EXAMPLES[name], "```")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


# ---- results ----------------------------------------------------------------------------


def known_metrics() -> list[str]:
    """Returns the keys of a row of metrics.jsonl, from the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Meter.step_metrics)))
    (made,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    assert isinstance(made, ast.Dict), made
    # Names that contain the unit of a kind of model are expressions.
    unit = {"meter": Meter(1, (1, 1), None)}
    return [
        str(eval(ast.unparse(key).replace("self", "meter"), unit))
        for key in made.keys
        if key is not None
    ]


def metrics() -> Iterator[str]:
    """Yields the page of the metrics."""
    assert [*METRICS] == known_metrics(), f"METRICS are {[*METRICS]}, not {known_metrics()}"
    routed = [*(f"expert_{name}" for name in moe.STATISTIC_NAMES), moe.LOADS_KEY]
    assert [*MOE_METRICS] == routed, f"MOE_METRICS are {[*MOE_METRICS]}, not {routed}"
    yield from ("# Metrics", "")
    yield from paragraph(
        "`metrics.jsonl` in the run directory has one JSON object per step, each on one line. "
        "TensorBoard and Weights & Biases (`train.loggers`) get the same names."
    )
    yield ""
    yield "```python"
    yield "import json"
    yield "from pathlib import Path"
    yield ""
    yield 'for path in sorted(Path("runs").glob("*/metrics.jsonl")):'
    yield "    rows = [json.loads(line) for line in path.read_text().splitlines()]"
    yield '    print(path.parent, rows[-1]["step"], rows[-1]["loss"])'
    yield "```"
    yield ""
    yield from described(("field", "description"), METRICS)
    yield from ("", "Mixtures of experts have these fields in addition:", "")
    yield from described(("field", "description"), MOE_METRICS)
    assert [*WORK_METRICS] == [*work.METRIC_LABELS, work.RANKS_KEY]
    yield from ("", "Ranks with different documents have these fields in addition:", "")
    yield from described(("field", "description"), WORK_METRICS)
    assert [*CANARY_METRICS] == [memorization.MATCH_KEY, memorization.LOSS_KEY]
    yield from ("", "Steps with an evaluation of canaries have these fields in addition:", "")
    yield from described(("field", "description"), CANARY_METRICS)


def run_directory() -> Iterator[str]:
    """Yields the page of the files of a run."""
    yield from ("# Run directory", "")
    yield from paragraph(
        "A run writes all of its files to `train.output_dir`. Without that setting it creates "
        "`runs/SIZE`, `runs/SIZE-2` and so on. One process writes a directory at a time."
    )
    yield ""
    yield from described(("path", "content"), FILES)
    yield from ("", "## run.json", "")
    yield from described(("field", "content"), RUN_JSON)


def exit_codes() -> Iterator[str]:
    """Yields the page of the exit codes."""
    known = {kind.exit_code for kind in _error_classes(errors.RanvierError)}
    known |= {errors.INTERNAL_EXIT_CODE, errors.STOPPED_EXIT_CODE, errors.NO_PROGRESS_EXIT_CODE}
    assert known <= {*CODES}, f"CODES lack {sorted(known - {*CODES})}"
    yield from ("# Exit codes", "")
    yield from paragraph(
        "A job script can decide by the exit code. 0 means done, and 75 means stopped and saved: "
        "start it again. After 70, 71 and 72 a restart can help. All others need a fix first."
    )
    yield ""
    rows = []
    for code, (kind, meaning, remedy) in CODES.items():
        assert kind is None or kind.exit_code == code, (kind, code)
        name = f"[`{kind.__name__}`](api/errors.md#ranvier.errors.{kind.__name__})" if kind else ""
        rows.append((str(code), meaning, name, remedy))
    yield from table(("code", "meaning", "error class", "what to do"), rows)


def _error_classes(kind: type[errors.RanvierError]) -> Iterator[type[errors.RanvierError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _error_classes(one)


def environment_variables() -> Iterator[str]:
    """Yields the page of the environment variables."""
    yield from ("# Environment variables", "")
    yield from ("## Ranvier", "")
    yield from described(("variable", "description"), VARIABLES)
    yield from ("", "## Launchers", "")
    yield from paragraph(
        "Ranvier reads the rank and the number of ranks from the variables of the launcher. All "
        "four of `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` must be set for "
        "torchrun; they take precedence over mpirun, and mpirun over srun. Of several variables "
        "in a cell the first that is set counts. `ranvier doctor`, started by the launcher in "
        "place of `ranvier train`, prints what was read."
    )
    yield ""
    launchers = (environment.TORCHRUN, *environment.LAUNCHERS)
    fields = {
        "rank": "rank_variable",
        "number of ranks": "world_size_variables",
        "local rank": "local_rank_variable",
        "ranks per node": "local_world_size_variables",
        "index of the node": "node_variable",
        "hosts": "host_list_variables",
        "job": "job_variables",
    }
    rows = [
        (name, *(_names(getattr(one, key)) for one in launchers)) for name, key in fields.items()
    ]
    yield from table(("", *(one.name for one in launchers)), rows)
    yield ""
    yield from paragraph(
        "`MASTER_ADDR` is the address of rank 0. Without it srun's first host is used, and "
        "127.0.0.1 on one node; mpirun on several nodes needs it. `MASTER_PORT` is the port. "
        "Without it the port is derived from the job, in the range 20000 to 39999, or 29500 if "
        "the job has no name."
    )
    yield from ("", "## Other variables that Ranvier reads", "")
    yield from described(("variable", "description"), LIBRARY_VARIABLES)
    yield from ("", "## Variables that Ranvier sets", "")
    yield from paragraph(
        "Ranvier sets these variables for other libraries unless they are already set. "
        "Variables that start with `MALLOC_` or `GLIBC_TUNABLES` switch off its tuning of the "
        "CPU allocator."
    )
    yield ""
    yield from described(("variable", "value"), DEFAULTS)
    yield from (
        "",
        "NCCL, torch, Hugging Face libraries and Weights & Biases read further variables.",
    )


def _names(value: str | tuple[str, ...]) -> str:
    names = (value,) if isinstance(value, str) else value
    return ", ".join(f"`{name}`" for name in names if name) or "-"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "metrics.md": metrics,
    "exit-codes.md": exit_codes,
    "run-directory.md": run_directory,
    "environment-variables.md": environment_variables,
}


@functools.cache
def page(name: str) -> str:
    """Returns the text of a page."""
    return "\n".join([NOTE, "", *PAGES[name](), ""])


def main(arguments: Sequence[str]) -> int:
    """Writes the pages or compares them; returns the exit code."""
    stale = []
    for name in PAGES:
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == page(name):
            continue
        if "--check" in arguments:
            stale.append(path)
        else:
            path.write_text(page(name), encoding="utf-8")
    for path in stale:
        print(f"{path} is out of date. Run: python scripts/reference.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

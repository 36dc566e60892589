"""The page docs/reference/configuration.md, made from the config classes and the docstrings of their fields.

Usage: python scripts/reference.py [--check]
Writes the page; --check writes nothing and returns 1 if the page is not what would be written.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ranvier import errors
from ranvier.cli.help import describe_type, field_texts
from ranvier.config.refusals import REFUSALS
from ranvier.config.run import RunConfig
from ranvier.models import MODEL_SIZES
from ranvier.setting import setting_info
from ranvier.train.metrics import Meter

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "configuration.md"

SECTIONS = dataclasses.fields(RunConfig)
HEAD = f"""\
<!-- Written by scripts/reference.py from the config classes; change those, not this page. -->

# Configuration

A run is one tree of settings in {len(SECTIONS)} sections. It is read from a TOML file and changed
by options of the same names:

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
ranvier train run.toml --plan.row 4 --train.steps 2000
```

* **What wins:** an option, then the file, then the named size of the model, then the defaults
  below. A size given as `--model.size` replaces that of the file; fields of the model that the file
  names stay as they are there.
* **Going on:** `ranvier train RUN` reads `config.toml` in the directory of a run and continues it.
* **Mistakes:** an unknown key or option is an error that names the nearest known one. Values are
  checked together and before anything is tokenized or started; all problems are told at once.
* **What was used:** the settings are saved as `config.toml` in the directory of the run, all
  written out; what was left to be derived (a degree, the micro-batch, learning
  rate and warm-up, device and type) has its value there.
* **On the command line** booleans are written `true` and `false` as in TOML (or as in Python):
  `--train.trace-comm true`; lists as several words (`--data.sources a.jsonl b.jsonl`); no word is
  the empty list (`--plan.overlap`). A dash may stand for an underscore: `--plan.micro-batch 2`.
  Options follow the file: `ranvier train run.toml --plan.row 2`.
* **Paths** are relative to the directory in which the command is started.

`--nproc N`, the number of local ranks to start, belongs to the command and not to the run: see
[Several nodes](../guides/several-nodes.md).
"""

METRICS = {
    "step": "Number of the step, from 0.",
    "tokens": "Tokens of the run so far, this step included (padding too).",
    "loss": "Mean over the tokens with a target of the whole step; null if it is not finite.",
    "lr": "Learning rate of this step, before the factor of a group.",
    "grad_norm": "Norm of the gradient of the whole model before clipping; null if not finite.",
    "step_seconds": "Seconds from the end of the step before, or from its own start after an "
    "evaluation or a checkpoint, to its end.",
    "tokens_per_second": "Of all ranks together.",
    "mfu": "Share of the device's peak that is used, attention counted causally; null where the "
    "peak is not known (CPU, fp32, unknown GPUs).",
    "mfu_noncausal": "The same with attention counted fully, as many papers do.",
    "peak_memory_bytes": "Peak memory of any rank so far, in bytes: of its GPU, or of the process "
    "on a CPU.",
    "exposed_communication_seconds": "Seconds in which rank 0 waited for communication.",
    "data_seconds": "Seconds in which rank 0 waited for its batch.",
    "val_loss": "Mean loss of the held-out samples; null where this step has no evaluation.",
    "loss_scale": "Factor of the loss in fp16; null in other types.",
    "skipped": "Whether the update of this step was left out: its loss or a gradient is no number "
    "(and no smaller loss scale mends that), or it is a spike and `guard.on_spike` is `skip`.",
    "spike": "Whether the loss lies far above those before it, see `guard.spike_threshold`.",
    "skipped_total": "Steps of the run so far whose update was left out.",
}
FILES = {
    "config.toml": "The resolved settings.",
    "run.json": "Device, grid, versions, data, command, times, where the time went, status "
    "(`finished`, `stopped by signal N`, `failed: ...`, or `unfinished` while it trains and if all "
    "its processes were killed), launches and why ranks were started again, goodput.",
    "metrics.jsonl": "One object a step, see below.",
    "checkpoints/step-NNNNNNNN/": "What the run goes on from, after that many steps: "
    "`rank-NNNNN.safetensors` for each rank, and `manifest.json`.",
    "tokenizer.json": "The tokenizer of the corpora, if it is known.",
    "report.html": "Plots and facts in one file that needs no network.",
    "tensorboard/, wandb/": "Logs that `train.loggers` asked for.",
    "trace-rank*.json": "The communication of the last step, with `train.trace_comm`.",
}
CODES = {
    0: "The run ended as planned.",
    errors.RanvierError.exit_code: "A setting, an option, a plan or a model that cannot run.",
    errors.DataError.exit_code: "Training data or a tokenizer that cannot be used.",
    errors.CheckpointError.exit_code: "No checkpoint to load: missing, damaged, of another model.",
    errors.INTERNAL_EXIT_CODE: "An error that is not yours; it comes with a traceback.",
    errors.CommunicationError.exit_code: "Ranks that did not meet, disagree, or were lost.",
    errors.HangError.exit_code: "A rank gave no sign of life; all stacks were shown.",
    errors.WriteError.exit_code: "A file could not be written: a full disk, no permission, "
    "a directory that is gone.",
    errors.NumericError.exit_code: "Too many losses or gradients that are no numbers, or spikes.",
    errors.STOPPED_EXIT_CODE: "Told to stop (a signal); saved. Start it again and it goes on.",
    errors.VersionError.exit_code: "A checkpoint of another version of the format.",
    errors.UnsafeInputError.exit_code: "Unsafe input refused: a path out of its directory, a link, "
    "a pipe or device, a file that is too large, a pickle, a chat template beyond its limits, or a "
    "directory that another run writes.",
    errors.NO_PROGRESS_EXIT_CODE: "Ranks were lost again and again without getting further.",
    130: "Ctrl-C (SIGINT) twice, or a command that does not train: ended at once.",
    143: "SIGTERM twice, or a command that does not train: ended at once.",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


def section(name: str, config: Any) -> Iterator[str]:
    """The settings of a section."""
    kind = type(config)
    hints, texts = typing.get_type_hints(kind), field_texts(kind)
    infos = {field.name: setting_info(field) for field in dataclasses.fields(config)}
    names = [*infos]
    names.sort(key=lambda key: key != "size")  # it decides about the others
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
    yield from table(("setting", "values", "default", "what it is"), rows)


def _default(value: Any) -> str:
    return "derived" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def sizes() -> Iterator[str]:
    """The named sizes of the model."""
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
    yield from ("", "The defaults above are those of `tiny`. The named sizes:", "")
    yield from table(("size", *keys), rows)


def known_metrics() -> list[str]:
    """The keys of a line of metrics.jsonl, from the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Meter.step_metrics)))
    (made,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    assert isinstance(made, ast.Dict), made
    # Names with the unit of a kind of model are expressions.
    unit = {"meter": Meter(1, (1, 1), None)}
    return [
        str(eval(ast.unparse(key).replace("self", "meter"), unit))
        for key in made.keys
        if key is not None
    ]


def refusals() -> Iterator[str]:
    """The combinations of settings that are refused."""
    yield from ("", "## Combinations that are refused", "")
    yield "Checked before anything starts; names in braces stand for values of a run."
    yield ""
    rows = [(f"`{one.says}`", one.rule, one.remedy) for one in REFUSALS]
    yield from table(("refused", "because", "instead"), rows)


def results() -> Iterator[str]:
    """What a run leaves behind."""
    assert [*METRICS] == known_metrics(), f"METRICS are {[*METRICS]}, not {known_metrics()}"
    yield from ("", "## The directory of a run", "")
    yield from table(("file", "what it holds"), [(f"`{k}`", v) for k, v in FILES.items()])
    yield from ("", "## metrics.jsonl", "", "One JSON object a step, on one line:", "")
    yield from table(("field", "what it is"), [(f"`{k}`", v) for k, v in METRICS.items()])
    yield from ("", "## Exit codes", "")
    yield from table(("code", "meaning"), [(str(k), v) for k, v in CODES.items()])
    yield from (
        "",
        "`ranvier verify` exits with 1 if anything differs or a rank crashes, `ranvier doctor` if "
        "something essential is missing.",
        "A rank that is killed by a signal makes it 71, and the signal is named.",
    )


def page() -> str:
    """The whole page."""
    run = RunConfig()
    lines = HEAD.splitlines()
    for field in SECTIONS:
        lines += section(field.name, getattr(run, field.name))
        lines += sizes() if field.name == "model" else ()
    return "\n".join([*lines, *refusals(), *results(), ""])


def main(arguments: Sequence[str]) -> int:
    """Write the page or compare it; the exit code."""
    text = page()
    if "--check" in arguments:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        if stale:
            print(f"{PAGE} is stale. Run: python scripts/reference.py", file=sys.stderr)
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

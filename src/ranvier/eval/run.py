"""`ranvier eval`: run tasks, needles, perplexity, canaries or code generation on any grid."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ranvier.checkpoint.directory import step_of
from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.comm.consensus import run_and_raise_together
from ranvier.config.arguments import EvalOptions
from ranvier.config.plan import Plan
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.config.sections import suggest_nearest
from ranvier.data.corpus import Corpus
from ranvier.errors import DataError, PlanError
from ranvier.eval import canaries, lm_eval_harness, needle, perplexity, recurrence
from ranvier.eval.code import generate, metrics, sandbox
from ranvier.eval.model_server import GenerationConfig, ModelServer
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.grid import Grid
from ranvier.infer.load import find_checkpoint, inference_dtype, load_model, saved_dtype
from ranvier.infer.sampling_params import SamplingParams
from ranvier.launch import ProcessInfo, join_process_group
from ranvier.sharding import ShardingTable, round_up
from ranvier.system.terminal import escape_controls, print
from ranvier.train import prepare_data
from ranvier.train.build_model import DTYPES
from ranvier.train.resolve import resolve_backend, resolve_device
from ranvier.train.resume.run_directory import write_text_atomically

FIRST_COLUMNS = {
    "code": "k",
    "needle": "length",
    "canaries": "bucket",
    "recurrence": "iterations",
}
"""Headings of the first column of tables, where they are not the name of the results."""
REPLACED_RESULTS = ("canaries", "runs")
"""Results that replace earlier ones as a whole: their buckets are those of one file of canaries."""


def parse_pass_at_k(wanted: EvalOptions) -> tuple[int, ...]:
    """Returns the values of k for pass@k."""
    try:
        if wanted.pass_at_k:
            found = tuple(int(word) for word in wanted.pass_at_k.split(","))
        else:
            found = (1,)
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise PlanError(
            f"pass_at_k={wanted.pass_at_k!r} is invalid. It must be positive integers, separated "
            "by commas. Use 1,10."
        )
    return found


EVALUATIONS = ("tasks", "corpus", "canaries", "code", "samples_file")
"""Options that select an evaluation."""


def check_options(wanted: EvalOptions, *folders: str) -> None:
    """Check the options and raise all problems at once. folders: of the runs to evaluate."""
    asked = [n for n in EVALUATIONS if getattr(wanted, n)]
    problems = []
    folder = folders[0] if folders else None
    if len(folders) > 1 and asked != ["canaries"]:
        problems.append(
            f"{len(folders)} runs are given: {', '.join(folders)}. Only --canaries compares runs. "
            "Evaluate one run at a time."
        )
    # With different spellings, too, such as a slash at the end.
    known = [Path(one).resolve() for one in folders]
    twice = [one for one, path in zip(folders, known, strict=True) if known.count(path) > 1]
    if twice:
        problems.append(
            f"{' and '.join(twice)} are the same run. Runs are compared with each other. Name each "
            "run once."
        )
    if len(asked) != 1:
        problems.append(
            "The options select "
            f"{' and '.join('--' + n.replace('_', '-') for n in asked) or 'no evaluation'}. eval "
            "runs one evaluation at a time. Use one of --tasks, --corpus, --canaries, --code or "
            "--samples-file."
        )
    # Samples were run elsewhere and do not need a model; everything else does.
    if (folder is None) != (asked == ["samples_file"]) and len(asked) == 1:
        problems.append(
            "--samples-file does not use a model. Remove RUN."
            if folder is not None
            else f"--{asked[0]} needs a model. Pass its RUN: ranvier eval RUN --{asked[0]} ..."
        )
    least = {"limit": 0, "fewshot": -1, "stride": 0, "samples_per_task": 1, "max_new_tokens": 1}
    for name, low in {**least, "batch": 1, "max_length": 0, "step": -1, "seed": 0}.items():
        value = getattr(wanted, name)
        if not low <= value < 2**31:
            problems.append(
                f"{name}={value} is out of range. It must be at least {low} and less than 2^31. "
                f"Use {low} or more."
            )
    params = SamplingParams(temperature=wanted.temperature, top_p=wanted.top_p)
    problems += [text for _, text in params.problems(1)]
    if wanted.include and not Path(wanted.include).is_dir():
        problems.append(
            f"include={wanted.include!r} is not a directory. Custom tasks are YAML files in a "
            "directory. Check the path."
        )
    problems += _task_problems(wanted)
    if problems:
        raise PlanError(problems)
    if wanted.code and (most := max(parse_pass_at_k(wanted))) > wanted.samples_per_task:
        raise PlanError(
            f"pass_at_k={most} with samples_per_task={wanted.samples_per_task}. pass@k needs at "
            f"least k programs per task. Use --samples-per-task {most} or more."
        )
    # Fail before ranks start or weights are read.
    if is_needle_task(wanted):
        needle.check_options(wanted, Path(folder or ""))
    elif wanted.tasks:
        lm_eval_harness.check_installed()
    if wanted.code:
        generate.read_tasks(Path(wanted.code))
    if wanted.canaries:
        for one in folders:
            canaries.check_options(wanted, Path(one))


def is_needle_task(wanted: EvalOptions) -> bool:
    """Whether the task needle is requested, which does not need lm-evaluation-harness."""
    return needle.TASK_NAME in lm_eval_harness.task_names(wanted)


def _task_problems(wanted: EvalOptions) -> list[str]:
    """Returns what is wrong with the names of tasks and their own options."""
    names = lm_eval_harness.task_names(wanted)
    if is_needle_task(wanted):
        if len(names) > 1:
            return [
                f"tasks={wanted.tasks!r} has {needle.TASK_NAME} and other tasks. They use "
                f"different options. Use --tasks {needle.TASK_NAME} alone, and another command for "
                "the others."
            ]
        return []
    default = EvalOptions()
    changed = [n for n in canaries.OPTIONS if getattr(wanted, n) != getattr(default, n)]
    if changed and not wanted.canaries:
        return [
            f"--{changed[0]} is given without --canaries. Only the evaluation of canaries uses it. "
            "Leave it out, or use --canaries FILE."
        ]
    given = [n for n in needle.OPTIONS if getattr(wanted, n) != getattr(default, n)]
    if given:
        near = any(suggest_nearest(name, [needle.TASK_NAME]) for name in names)
        return [
            f"--{given[0]} is given with "
            f"{f'--tasks {wanted.tasks}' if names else 'another evaluation'}. Only the task "
            f"{needle.TASK_NAME} uses it. "
            + (f"Use --tasks {needle.TASK_NAME}." if near or not names else "Leave it out.")
        ]
    return []


def resolve_plan(run: RunConfig, world: int, wanted: EvalOptions) -> ResolvedRun:
    """Resolves the run on the grid of this evaluation, with its own batch."""
    model = run.decoder
    recurrence.check_options(wanted, model.mean_recurrence)
    if model.position_embedding == "learned" and wanted.max_length > model.max_seq:
        raise PlanError(
            f"max_length={wanted.max_length}, but the model has {model.max_seq} learned positions "
            "(model.max_seq). It cannot read more tokens. Use a --max-length of "
            f"{model.max_seq} or less."
        )
    plan = run.plan.resolve(world)
    table = ShardingTable.from_plan(plan)
    # The smallest batch that the grid divides; the training batch may not fit this grid.
    micro = table.batch_multiple(plan.degrees)
    plan = replace(plan, global_batch=plan.num_replicas * micro, micro_batch=micro)
    # Sequences are padded, and padding does not use additional positions. Only for the check, the
    # model gets room for it.
    seq = round_up(run.data.seq_len, table.seq_multiple(plan.degrees))
    fits = run.data.seq_len <= model.max_seq
    if fits:
        room = replace(model, max_seq=max(model.max_seq, seq))
    else:
        room = model
    filled = replace(run, plan=plan, model=room, data=replace(run.data, seq_len=seq))
    small = replace(run, plan=filled.check_and_resolve(world).plan)
    reason = "an evaluation has its own grid and batch"
    return ResolvedRun.from_config(run).adopt("evaluation", small, {"": reason})


def single_rank_run(run: RunConfig) -> RunConfig:
    """Returns the run on one rank of this machine; options may request more ranks."""
    here = replace(run.train, device="auto", backend="auto", dtype="auto")
    return replace(run, plan=Plan(data=-1, col_splits=run.plan.col_splits), train=here)


def eval_rank(
    runs: Sequence[ResolvedRun], folders: Sequence[Path], wanted: EvalOptions, me: ProcessInfo
) -> int:
    """Joins the other ranks, and evaluates one run after the other; returns the exit code."""
    first = runs[0]
    backend = resolve_backend(first, me, resolve_device(first, me))
    with join_process_group(
        me, backend, first.train.comm_timeout_seconds, share_gpu=first.launch.share_gpu
    ):
        # With several runs, --output is the file of their comparison.
        each = wanted if len(runs) == 1 else replace(wanted, output="")
        found = {
            str(folder): evaluate_run(run, folder, each, me)
            for run, folder in zip(runs, folders, strict=True)
        }
    if len(found) > 1 and me.rank == 0:
        _show_comparison(found, wanted)
    return 0


def _show_comparison(found: Mapping[str, Mapping[str, Any]], wanted: EvalOptions) -> None:
    """Prints the canaries of several runs side by side, and writes them to --output."""
    tables = {run: results["canaries"] for run, results in found.items()}
    for label, rows in canaries.compare_runs(tables).items():
        print(f"\n{label}")
        _print_table("canaries", rows)
    if wanted.output:
        save_results(Path(wanted.output), {"runs": found})
        print(f"Results: {wanted.output}")


def evaluate_run(
    run: ResolvedRun, folder: Path, wanted: EvalOptions, me: ProcessInfo
) -> dict[str, Any]:
    """Evaluates the model of a run as one rank of the grid; returns the results, on rank 0."""
    device = resolve_device(run, me)
    grid = Grid.from_plan(
        run.plan,
        connected=me.world_size > 1,
        ranks_per_node=me.local_world_size,
        algorithms=AlgorithmTable.parse(run.comm.algorithm),
        timeout_seconds=run.train.comm_timeout_seconds,
    )
    word = run.train.dtype
    if word == "auto":
        saved = saved_dtype(find_checkpoint(folder, None if wanted.step < 0 else wanted.step))
        if device.type == "cuda":
            dtype = torch.bfloat16
        else:
            dtype = inference_dtype(saved, device)
    else:
        dtype = DTYPES[word]
    # Settings that only training needs keep their defaults.
    plan = Plan(
        col_splits=run.plan.col_splits,
        virtual_stages=run.plan.virtual_stages,
        stage_starts=run.plan.stage_starts,
        vocab_over_pipe=run.plan.vocab_over_pipe,
        context_attention=run.plan.context_attention,
        shard_weights_over=run.plan.shard_weights_over,
        stage_time_jitter=0.0,
    ).with_degrees(grid.degrees)
    if wanted.step < 0:
        step = None
    else:
        step = wanted.step
    words = EvalTokenizer.from_run(folder)
    first = grid.rank == 0
    # Task names are checked before weights are read, which takes a while; an error of rank 0 is
    # raised on all ranks.
    manager = run_and_raise_together(
        lambda: (
            lm_eval_harness.build_task_manager(wanted)
            if first and wanted.tasks and not is_needle_task(wanted)
            else None
        ),
        grid,
        device,
    )
    start = time.perf_counter()
    model = load_model(
        folder, grid, device, step=step, plan=plan, seq_len=run.data.seq_len, dtype=dtype
    )
    at = step_of(find_checkpoint(folder, step))
    shown = _EvalProgress()
    if first:
        print(
            f"{folder} after step {at}, loaded in {time.perf_counter() - start:.1f} s", flush=True
        )
    served = ModelServer(model, words, wanted.batch, shown if first else None)

    # Runs on rank 0 only; the other ranks serve its requests.
    def work(served: ModelServer) -> dict[str, Any]:
        def evaluate() -> dict[str, dict[str, Any]]:
            return _run_evaluation(served, run, folder, at, wanted, manager)

        mean_recurrence = run.decoder.mean_recurrence
        try:
            if mean_recurrence:
                by_count = recurrence.evaluate_recurrences(
                    served, wanted, mean_recurrence, evaluate
                )
            else:
                by_count = {1: evaluate()}
        finally:
            shown.close()
        if wanted.output:
            path = Path(wanted.output)
        else:
            path = folder / f"eval-{at}.json"
        if len(by_count) > 1:
            return _show_recurrences(by_count, folder, path, at)
        ((_, found),) = by_count.items()
        whole = save_results(path, {"step": at, **found})
        for name, rows in found.items():
            _print_table(name, canaries.format_rows(rows) if name == "canaries" else rows)
        print(f"Results: {path}")
        if is_needle_task(wanted):
            page = path.with_suffix(".html")
            title = f"{folder.absolute().name}: needle in a haystack"
            write_text_atomically(page, needle.render_page(title, whole["needle"], at))
            print(f"Heat map: {page}")
        return {"step": at, **found}

    return served.run_on_first_rank(work) or {}


def _show_recurrences(
    by_count: Mapping[int, recurrence.Results], folder: Path, path: Path, step: int
) -> dict[str, Any]:
    """Prints and writes scores against the number of iterations; returns all results."""
    tables = recurrence.tabulate_recurrences(by_count)
    found = {"step": step, "recurrence": tables}
    save_results(path, found)
    for name, rows in tables.items():
        print(f"\n{name}")
        _print_table("recurrence", rows)
    print(f"Results: {path}")
    page = path.with_name(f"{path.stem}-recurrence.html")
    title = f"{folder.absolute().name}: scores against recurrence"
    write_text_atomically(page, recurrence.render_page(title, tables))
    print(f"Plot: {page}")
    return found


def _run_evaluation(
    served: ModelServer, run: RunConfig, folder: Path, step: int, wanted: EvalOptions, manager: Any
) -> dict[str, dict[str, Any]]:
    """Runs the requested evaluation; returns results by kind and name."""
    length = wanted.max_length or run.decoder.max_seq
    if is_needle_task(wanted):
        trials = needle.evaluate_needles(served, run, folder, wanted)
        write_text_atomically(folder / f"needle-{step}.jsonl", needle.render_trials(trials))
        return {"needle": needle.tabulate_accuracy(trials)}
    if wanted.tasks:
        return {"tasks": lm_eval_harness.evaluate_tasks(served, wanted, length, manager=manager)}
    if wanted.corpus:
        return {"corpora": _evaluate_corpora(served, run, folder, wanted)}
    if wanted.canaries:
        known = canaries.load_canaries(wanted.canaries, served.tokenizer.run_tokenizer)
        answers = canaries.evaluate_canaries(
            served, known, suffix=wanted.suffix, prefix=wanted.prefix
        )
        path = folder / f"canaries-{step}.jsonl"
        write_text_atomically(path, canaries.render_answers(answers))
        return {"canaries": canaries.tabulate_buckets(known, answers)}
    wish = GenerationConfig(
        max_new_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        seed=wanted.seed,
    )
    tasks = generate.read_tasks(Path(wanted.code))
    count = wanted.samples_per_task
    # Printed before the first program of the model runs.
    told = _print_protection()
    tried, lacks = generate.attempt_tasks(served, tasks, count=count, wish=wish, length=length)
    rows = [
        {**asdict(one.sample), "completion": one.completion, "why": one.failure} for one in tried
    ]
    write_text_atomically(
        folder / f"samples-{step}.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    )
    _warn_missing_guards(lack for lack in lacks if lack not in told)
    return {"code": metrics.compute_metrics([one.sample for one in tried], parse_pass_at_k(wanted))}


def _print_protection() -> tuple[str, ...]:
    """Prints which guards isolate programs here and which are missing; returns the latter."""
    # An empty program probes the sandbox.
    found = sandbox.run_program("python", "")
    if found.guards:
        print(f"Programs are isolated by {', '.join(found.guards)} and limits.", flush=True)
    if not any("bubblewrap" in word for word in (*found.guards, *found.missing_guards)):
        print(
            "bubblewrap (bwrap) is not installed. With it, programs could not see other files of "
            "this machine.",
            flush=True,
        )
    _warn_missing_guards(found.missing_guards)
    return found.missing_guards


def _warn_missing_guards(lacks: Iterable[str]) -> None:
    """Prints a warning for each missing guard."""
    for lack in lacks:
        print(f"Warning: programs are not fully isolated: {lack}.", file=sys.stderr, flush=True)


def _evaluate_corpora(
    served: ModelServer, run: RunConfig, folder: Path, wanted: EvalOptions
) -> dict[str, Any]:
    """Returns the perplexity of each corpus."""
    data = replace(run.data, sources=wanted.corpus, tokenizer=str(folder / "tokenizer.json"))
    found: dict[str, Any] = {}
    for name, stored in zip(
        wanted.corpus, prepare_data.tokenize_corpora(replace(run, data=data)), strict=True
    ):
        corpus = Corpus.open(stored)
        mine = served.tokenizer.run_tokenizer.fingerprint
        # A corpus without a fingerprint was given as tokens, and is trusted.
        if corpus.manifest.tokenizer not in (None, "", mine):
            raise DataError(
                f"{name} was tokenized by {corpus.manifest.tokenizer}, but the run uses {mine}. "
                "Both must use the same tokenizer. Pass the original texts instead."
            )
        corpus.check_vocab(run.decoder.vocab)
        seq = run.data.seq_len
        stride = wanted.stride
        if stride > seq:
            raise PlanError(
                f"stride={stride} is greater than data.seq_len={seq}. Windows must overlap or be "
                f"adjacent. Use --stride {seq} or less."
            )
        if wanted.held_out:
            aside = run.data.validation_fraction
        else:
            aside = 0.0
        worth = perplexity.compute_perplexity(
            served, corpus, seq=seq, stride=stride, held_out=aside
        )
        found[name] = {
            "loss": worth.loss,
            "perplexity": worth.perplexity,
            **({} if worth.bits_per_byte is None else {"bits_per_byte": worth.bits_per_byte}),
            "documents": worth.documents,
            "tokens": worth.tokens,
            "bytes": worth.bytes,
        }
    return found


def score_samples(wanted: EvalOptions) -> int:
    """Prints the metrics of programs that were run elsewhere; returns the exit code."""
    found = metrics.compute_metrics(
        metrics.read_samples(Path(wanted.samples_file)), parse_pass_at_k(wanted)
    )
    _print_table("code", found)
    if wanted.output:
        save_results(Path(wanted.output), {"code": found})
    return 0


def save_results(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Merges results into a file atomically, and returns all of them.

    Results with the same name are replaced; see also `REPLACED_RESULTS`.
    """
    known: Any = {}
    if path.exists():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            known = {}
    # Results of another step, or a file of something else, are not merged.
    if not (isinstance(known, dict) and known.get("step") == found.get("step")):
        known = {}
    for name, value in found.items():
        both = isinstance(value, Mapping) and isinstance(known.get(name), dict)
        if both and name not in REPLACED_RESULTS:
            known[name] = {**known[name], **value}
        else:
            known[name] = value
    try:
        write_text_atomically(path, json.dumps(known, indent=1) + "\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. The results are stored there. Use "
            "another --output."
        ) from None
    return dict(known)


def _print_table(name: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a row per name and a column per number, framed on a terminal."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    cells = [[one, *(_format_number(row.get(key)) for key in columns)] for one, row in rows.items()]
    heads = [FIRST_COLUMNS.get(name, name), *columns]
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*heads)
        for line in cells:
            # Text, not str: rich would interpret brackets in names as markup.
            table.add_row(*(Text(escape_controls(word)) for word in line))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, *cells):
        print(
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        )


def _format_number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4f}"
    if value is None:
        return ""
    return str(value)


class _EvalProgress:
    """Progress: a bar on a terminal, else a line at start, half and end."""

    def __init__(self) -> None:
        self._what = ""
        self._half = -1
        self._bar: Any = None
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            from rich import progress

            # The default first column would interpret markup in the description.
            _, *others = progress.Progress.get_default_columns()
            plain = progress.TextColumn("{task.description}", markup=False)
            self._bar = progress.Progress(plain, *others, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is not None:
            said = escape_controls(what)
            self._bar.update(self._task, description=said, completed=done, total=total)
            return
        half = 2 * done // max(total, 1)
        if (what, half) != (self._what, self._half):
            print(f"{what}: {done} of {total}", flush=True)
        self._what = what
        self._half = half

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

"""`ranvier generate`: continues a prompt, chats, or answers a file of prompts.

One rank runs in this process. Several ranks run in others, so that this process is free to read the
terminal and to handle Ctrl-C; under a launcher such as torchrun or srun the first rank does both.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranvier import launch
from ranvier.cli.inference import (
    engine_arguments,
    find_option_problems,
    resolve_inference_plan,
    with_engine_prefix,
)
from ranvier.config.arguments import GenerateOptions
from ranvier.errors import STOPPED_EXIT_CODE, DataError, PlanError
from ranvier.launch import ProcessInfo
from ranvier.system.terminal import print, write_raw

if TYPE_CHECKING:
    from ranvier.config.plan import Plan
    from ranvier.infer.batch import AnswerFile, BatchLine, BatchProgress
    from ranvier.infer.model_source import ModelSource
    from ranvier.infer.request import EngineInterface
    from ranvier.infer.sampling_params import SamplingParams
    from ranvier.infer.server.served_model import ServedModel

CONVERSATION = "-"
"""Value of --chat for a conversation in the terminal."""
SAMPLING_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)
"""Options with the names of sampling parameters."""
PROGRESS_SECONDS = (0.5, 10.0)
"""Time between lines of progress, on a terminal and in a log."""
ENGINE_PROGRAM = (
    "import sys; from ranvier.cli.generate import run_engine_ranks; "
    "sys.exit(run_engine_ranks(sys.argv[1:]))"
)


def with_chat_value(words: Sequence[str]) -> list[str]:
    """Returns the words with `--chat` alone, which starts a conversation, as `--chat=-`."""
    found = list(words)
    for i, word in enumerate(found):
        if word == "--chat" and (i + 1 == len(found) or found[i + 1].startswith("--")):
            found[i] = f"--chat={CONVERSATION}"
    return found


def parse_generate_options(words: Sequence[str]) -> tuple[str, GenerateOptions]:
    """Returns the path and the options of the command."""
    from ranvier.cli.parsing import one_path, parse_options, split_words

    names, options = split_words(with_engine_prefix(with_chat_value(words)))
    settings = parse_options(GenerateOptions, GenerateOptions(), "generate PATH", options)
    return one_path("generate", "a run or a model", names), settings


def check_is_model(path: Path) -> None:
    """Raises if a directory has no model; before torch is imported, which takes seconds."""
    from ranvier.config import run as runs

    if not (path / "config.json").exists():
        runs.check_is_run(path)


def generate(path: str, options: GenerateOptions, words: Sequence[str]) -> int:
    """Generates as the options ask for. Returns the exit code.

    words: the words of the command, with which the ranks are started.
    """
    _check_options(options)
    from ranvier.infer.engine_start import check_device

    check_device(options.device)
    me = launch.read_process_info()
    source = _find_source(path, options)
    plan = resolve_inference_plan(options, source.load_config(), me)
    if me is not None and me.rank > 0:
        with _open_engine(source, plan, options, words, me):
            return 0
    open_engine = functools.partial(_open_engine, source, plan, options, words, me)
    if options.input:
        return _answer_file(source, options, open_engine, is_alone=me is None)
    model = _load_model_files(source)
    if options.chat == CONVERSATION:
        from ranvier.cli.conversation import TerminalChat

        with open_engine() as engine:
            return TerminalChat(engine, model, _build_params(options)).run()
    tokens = _encode_prompt(model, options)
    _check_length(tokens, source, options)
    print(options.prompt, end="", flush=True)
    with open_engine() as engine:
        return _print_text(engine, model, tokens, _build_params(options))


def _check_options(options: GenerateOptions) -> None:
    """Raises for options that are invalid or contradict each other."""
    problems = find_option_problems(options)
    given = {name: getattr(options, name) for name in ("prompt", "chat", "input")}
    shown = [f"{name}={value!r}" for name, value in given.items() if value]
    if len(shown) > 1:
        problems.append(
            f"{' and '.join(shown)} are given together. Only one of them can be used. Remove the "
            "others."
        )
    if bool(options.input) != bool(options.output):
        problems.append(
            f"--input {options.input!r} and --output {options.output!r} need each other. Answers "
            "to a file of prompts are written to another file. Give both."
        )
    elif options.input and not os.path.isfile(options.input):
        problems.append(
            f"--input {options.input!r} is not a file. It must be a file in JSON Lines format. "
            "Check the path."
        )
    elif os.path.exists(options.output) and os.path.samefile(options.input, options.output):
        problems.append(
            f"--input and --output are both {options.output!r}. Answers are appended to the "
            "output. Use another --output."
        )
    # The number of tokens of the model is not known yet; only tokens depend on it.
    problems += [text for name, text in _build_params(options).problems(1) if name == "stop"]
    if problems:
        raise PlanError(problems)


def _build_params(options: GenerateOptions) -> SamplingParams:
    from ranvier.infer.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=options.max_new_tokens or None,
        stop=options.stop,
        **{name: getattr(options, name) for name in SAMPLING_OPTIONS},
    )


def _find_source(path: str, options: GenerateOptions) -> ModelSource:
    from ranvier.infer.model_source import ModelSource

    return ModelSource.find(Path(path), step=None if options.step < 0 else options.step)


def _load_model_files(source: ModelSource) -> ServedModel:
    """Returns tokenizer and chat template of a model."""
    from ranvier.infer.detokenizer import IncrementalDetokenizer
    from ranvier.infer.server.served_model import read_model_directory

    if not (source.folder / "tokenizer.json").exists():
        raise DataError(
            f"{source.folder} has no tokenizer.json, because its corpora were given as tokens. "
            "Generating text needs the tokenizer that was used. Copy its tokenizer.json to "
            f"{source.folder / 'tokenizer.json'}."
        )
    return read_model_directory(source.folder, IncrementalDetokenizer)


# ---- engine ------------------------------------------------------------------------------------


@contextmanager
def _open_engine(
    source: ModelSource,
    plan: Plan,
    options: GenerateOptions,
    words: Sequence[str],
    me: ProcessInfo | None,
) -> Iterator[EngineInterface]:
    """Context with the engine: in this process, or of ranks that are started.

    On the other ranks of a launcher, it runs until the first one has ended. Communicates: as the
    steps of the engine.
    """
    from ranvier.infer.engine_start import EngineOptions, choose_device, open_engine_on_rank

    if me is None and plan.world_size > 1:
        from ranvier.infer.server.remote_engine import open_remote_engine

        with open_remote_engine(functools.partial(_start_engine_ranks, words)) as remote:
            yield remote
        return
    me = me or ProcessInfo()
    device = choose_device(options.device, me)
    arguments = EngineOptions(**engine_arguments(source, plan, options))
    with open_engine_on_rank(arguments, me, device) as engine:
        if me.rank > 0:
            engine.runner.follow()
        yield engine


def _start_engine_ranks(words: Sequence[str], socket_path: str) -> subprocess.Popen[bytes]:
    # In its own session: Ctrl-C only concerns this process.
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE_PROGRAM, socket_path, *words],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def run_engine_ranks(words: Sequence[str]) -> int:
    """Runs the ranks of an engine for another process; words: its socket and its command."""
    from ranvier.infer.server import engine_process

    launch.die_with_parent()
    # The other process decides when its engine ends. The ranks inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    with launch.report_errors(ProcessInfo()):
        path, options = parse_generate_options(words[1:])
        source = _find_source(path, options)
        plan = resolve_inference_plan(options, source.load_config(), None)
        replica = engine_process.ReplicaOptions(
            socket_path=words[0], **engine_arguments(source, plan, options)
        )
        task = functools.partial(engine_process.run_replica_rank, replica)
        return launch.launch_ranks(plan.world_size, task, preload=[engine_process.__name__])


# ---- one text ----------------------------------------------------------------------------------


def _encode_prompt(model: ServedModel, options: GenerateOptions) -> list[int]:
    """Returns the tokens of the prompt or the question."""
    from ranvier.infer.batch import check_has_chat

    if not options.chat:
        found: list[int] = model.tokenizer.encode([options.prompt])[0].tolist()
        # An empty prompt starts with the end-of-document token, so the model begins a new document.
        return found or [model.tokenizer.eos_token_id]
    check_has_chat(model)
    assert model.chat is not None
    return model.chat.encode_prompt([{"role": "user", "content": options.chat}])


def _check_length(tokens: Sequence[int], source: ModelSource, options: GenerateOptions) -> None:
    """Raises if the prompt and the tokens to generate do not fit, before the model is loaded."""
    from ranvier.infer.scheduler import explain_length

    positions = source.load_config().max_seq
    limit = min(positions, options.engine.max_model_len or positions)
    problem = explain_length(len(tokens), options.max_new_tokens or None, limit)
    if problem:
        raise PlanError(problem.replace("or as many as fit", "or --max-new-tokens 0"))


def _print_text(
    engine: EngineInterface, model: ServedModel, tokens: Sequence[int], params: SamplingParams
) -> int:
    from ranvier.infer.text_stream import AnswerStream

    answer = AnswerStream(engine, model.tokenizer, tokens, params)
    for piece in answer.pieces():
        print(piece, end="", flush=True)
    print()
    num_tokens = len(tokens) + answer.num_tokens
    is_cut = params.max_tokens is None or answer.num_tokens < params.max_tokens
    if answer.finish_reason == "length" and is_cut:
        print(
            f"Warning: the text has {num_tokens:,} tokens, as many as the model or the KV cache "
            "holds (engine.max_model_len). It ends here.",
            file=sys.stderr,
        )
    _print_iterations(engine)
    return 0


def _print_iterations(engine: EngineInterface) -> None:
    """Prints the mean number of iterations, if tokens exit early."""
    stats = engine.stats()
    if stats.num_iterated_tokens:
        print(
            f"Mean iterations: {stats.mean_iterations:.2f} per token "
            f"({stats.num_iterated_tokens:,} tokens)",
            file=sys.stderr,
        )


# ---- batches -----------------------------------------------------------------------------------


def _answer_file(
    source: ModelSource,
    options: GenerateOptions,
    open_engine: Callable[[], Any],
    *,
    is_alone: bool,
) -> int:
    """Answers the lines of --input. Returns the exit code.

    is_alone: whether no other rank waits for this one, so that a finished batch needs no engine.
    """
    from ranvier.infer.batch import AnswerFile, check_batch, read_batch

    defaults = {name: getattr(options, name) for name in SAMPLING_OPTIONS}
    defaults |= {"max_tokens": options.max_new_tokens, "stop": list(options.stop)}

    def read_lines() -> Iterator[BatchLine]:
        return read_batch(Path(options.input), defaults)

    with closing(AnswerFile(Path(options.output))) as answers:
        progress = check_batch(read_lines(), answers)
        if progress.num_done < progress.num_lines or not is_alone:
            model = _load_model_files(source)
            with open_engine() as engine:
                is_done = _run_batch(engine, model, options, answers, read_lines(), progress)
            if not is_done:
                print(
                    f"Stopped after {progress.num_done:,} of {progress.num_lines:,} lines. The "
                    "same command continues.",
                    file=sys.stderr,
                )
                return STOPPED_EXIT_CODE
    print(
        f"{options.output}: {progress.num_lines:,} lines, of which {progress.num_skipped:,} were "
        f"answered before and {progress.num_failed:,} have failed",
        file=sys.stderr,
    )
    return DataError.exit_code if progress.num_failed else 0


def _run_batch(
    engine: EngineInterface,
    model: ServedModel,
    options: GenerateOptions,
    answers: AnswerFile,
    lines: Iterator[BatchLine],
    progress: BatchProgress,
) -> bool:
    """Returns whether all lines have an answer; a signal ends the batch before."""
    from ranvier.infer.batch import BatchRunner

    runner = BatchRunner(
        engine, model, answers, max_num_seqs=options.engine.max_num_seqs, progress=progress
    )
    with launch.GracefulStop(quiet=True) as stop:
        return runner.run(
            lines, is_stopped=lambda: stop.signal != 0, on_progress=ProgressLine().show
        )


class ProgressLine:
    """Shows how far a batch is: in one line of a terminal, or now and then in a log."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._last = self._start

    def show(self, progress: BatchProgress) -> None:
        """Shows the progress if some time has passed."""
        now = time.monotonic()
        is_over = progress.num_done == progress.num_lines
        if now - self._last < PROGRESS_SECONDS[not self._is_terminal] and not is_over:
            return
        self._last = now
        rate = progress.num_generated_tokens / max(now - self._start, 1e-9)
        text = (
            f"{progress.num_done:,} of {progress.num_lines:,} lines, {progress.num_failed:,} "
            f"failed, {rate:,.0f} tokens/s"
        )
        if self._is_terminal:
            write_raw(f"\r\x1b[K{text}" + "\n" * is_over, sys.stderr)
        elif not is_over:
            print(text, file=sys.stderr, flush=True)

"""Whole decode steps on one GPU: their share of the bound, and two versions of Ranvier in turns.

A case is a model and a workload:

    SIZE/NxL    N sequences at L tokens: decode steps
    SIZE/nano   nano-vllm's benchmark: 256 requests at once, 100 to 1,024 tokens in and out

Each version of the package runs in its own process, which has its engines open while the others
have their turns, so that machines and clocks that differ do not matter. Only one process at a time
computes in a turn. A turn of a case is some decode steps of the same requests, or all requests of
nano. `serving_bound.py` has the formula of the bound, whose rates are measured in the same run.

Before the first turn, greedy tokens of eight prompts are compared with transformers' logits in fp32
(`right_tokens.py`); no ratio is printed of a version whose tokens are wrong.

    python benchmarks/decode_steps.py --csv decode_steps.csv
    python benchmarks/decode_steps.py --other-source ../before/src --group llama3-8b/1x384
    python benchmarks/decode_steps.py --smoke

Cases of a group are opened at the same time. A model is built once; its cases of all groups have
their engines in one process, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import script_parser
import serving_peers as peers
import torch
from right_step import Check, checked_ratio
from right_tokens import NUM_PROMPTS
from rows import append_rows, package_hash
from serving import Report, check_answers, measure_rates, versions
from serving_bound import Bound, Rates, draw_lengths, draw_prompts
from serving_engine import (
    SIZES,
    TOY_SIZES,
    TOY_WORKLOAD,
    Row,
    Setup,
    Timeline,
    Workload,
    abort_requests,
    make_requests,
    run_requests,
)

from ranvier.errors import PlanError, RanvierError
from ranvier.models import Decoder

SOURCE = Path(__file__).resolve().parents[1] / "src"
GROUPS = (
    "llama3-8b/1x384,2.8b/3x192",
    "llama3-8b/64x2048,2.8b/24x5000",
    "qwen3-0.6b/nano,2.8b/100x1500",
)
"""Cases that fit into 139 GiB with two versions of the package, and transformers' model in fp32."""
SKIPPED_STEPS = 8
"""First decode steps of a turn, which are not timed."""
COLUMNS = (
    "case", "version", "source", "ms_per_step", "tokens_per_second", "share_of_bound", "speedup",
    "speedup_low", "speedup_high", "copy_tb_per_second", "device", "torch", "checked",
)  # fmt: skip


# ---- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeCase:
    """A model and its workload."""

    size: str
    num_sequences: int = 0
    """0: nano."""
    length: int = 0
    """Tokens of each sequence, on average over all turns."""

    @classmethod
    def parse(cls, text: str, sizes: Sequence[str]) -> DecodeCase:
        """Returns the case of a text such as `llama3-8b/64x2048`."""
        match = re.fullmatch(r"([^/]+)/(?:nano|([1-9]\d*)x([1-9]\d*))", text)
        if match is None or match[1] not in sizes:
            raise PlanError(
                f"{text!r} is not a case. It must be SIZE/NxL, for N sequences of L tokens, or "
                f"SIZE/nano. Use a size of {', '.join(sizes)}."
            )
        return cls(match[1], int(match[2] or 0), int(match[3] or 0))

    def __str__(self) -> str:
        workload = f"{self.num_sequences}x{self.length}" if self.num_sequences else "nano"
        return f"{self.size}/{workload}"

    def bound_seconds(self, bound: Bound, work: Workload, num_tokens: float) -> float:
        """Returns the bound of a turn's step, or of nano. num_tokens: of all sequences."""
        if self.num_sequences:
            return bound.decode_seconds(self.num_sequences, num_tokens)
        return bound.workload_seconds(draw_lengths(*work.nano))


@dataclass(frozen=True)
class Turn:
    """What a version did in a turn."""

    seconds: float
    """Of a decode step, or of all requests of nano."""
    num_generated: float
    """Tokens in these seconds."""
    num_tokens: float
    """Tokens of all sequences, on average; 0 for nano."""


Measure = Callable[[], Turn]


@contextmanager
def open_decode(
    setup: Setup, model: Decoder, case: DecodeCase, turns: int, steps: int
) -> Iterator[Measure]:
    """Context with sequences after their prompts; each call takes some decode steps."""
    count = case.num_sequences
    num_steps = turns * (steps + SKIPPED_STEPS)
    budget = min(8192, count * case.length)
    # Prompts take some steps, in which those that came before are decoded already.
    num_prompt_steps = -(-count * case.length // budget)
    prompt_tokens = max(1, case.length - (num_prompt_steps + num_steps) // 2)
    new_tokens = num_prompt_steps + num_steps + 8
    max_model_len = max(prompt_tokens + new_tokens, sum(setup.work.checked))
    with setup.open_engine(
        model,
        num_tokens=max(count, NUM_PROMPTS) * max_model_len,
        max_num_seqs=max(count, NUM_PROMPTS),
        max_model_len=max_model_len,
        max_num_batched_tokens=max(budget, sum(setup.work.checked)),
        enable_prefix_caching=False,
    ) as engine:
        if not setup.answers:
            setup.answers["own"] = setup.answer(engine)
        prompts = draw_prompts([prompt_tokens] * count, setup.config.vocab, 0)
        requests = make_requests(prompts, [new_tokens] * count, name="decode")
        timeline = Timeline(time.perf_counter())
        for request in requests:
            engine.add(request)
        while len(timeline.generated) < count:
            timeline.take_step(engine)

        def measure() -> Turn:
            for _ in range(SKIPPED_STEPS):
                timeline.take_step(engine)
            before = sum(timeline.generated.values())
            first = len(timeline.times) - 1
            while len(timeline.times) - 1 - first < steps:
                timeline.take_step(engine)
            # The engine computes the next step already.
            peers.wait_for(setup.device)
            generated = sum(timeline.generated.values()) - before
            return Turn(
                seconds=(timeline.times[-1] - timeline.times[first]) / steps,
                num_generated=generated / steps,
                num_tokens=count * prompt_tokens + before + generated / 2,
            )

        yield measure
        abort_requests(engine, requests)


@contextmanager
def open_nano(setup: Setup, model: Decoder) -> Iterator[Measure]:
    """Context with an engine that has run all requests once; each call runs others."""
    count, low, high = setup.work.nano
    lengths = draw_lengths(count, low, high)
    num_turns = 0
    with setup.open_engine(
        model,
        num_tokens=sum(tokens + out for tokens, out in lengths),
        max_num_seqs=count,
        max_model_len=2 * high,
        max_num_batched_tokens=8 * high,
    ) as engine:
        if not setup.answers:
            setup.answers["own"] = setup.answer(engine)

        def measure() -> Turn:
            nonlocal num_turns
            num_turns += 1
            prompts = draw_prompts([tokens for tokens, _ in lengths], setup.config.vocab, num_turns)
            new_tokens = [out for _, out in lengths]
            requests = make_requests(prompts, new_tokens, name=f"nano{num_turns}", temperature=0.6)
            timeline = run_requests(engine, requests)
            peers.wait_for(setup.device)
            return Turn(timeline.seconds, sum(new_tokens), 0.0)

        measure()
        yield measure


# ---- the process of a version -------------------------------------------------------------------


def answer_commands(options: argparse.Namespace, replies: TextIO) -> None:
    """Runs the commands of the standard input, each a JSON list, and writes a line for each."""
    setup = make_setup(options, options.child)
    model: Decoder | None = None
    engines = ExitStack()
    measure: Measure | None = None
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        reply: Any = {}
        try:
            model = model or setup.build_model()
            if command == "prepare":
                setup.answers["own"] = setup.answer_alone(model)
            elif command == "open":
                case = DecodeCase.parse(arguments[0], [setup.size])
                opened = (
                    open_decode(setup, model, case, options.turns, options.steps)
                    if case.num_sequences
                    else open_nano(setup, model)
                )
                measure = engines.enter_context(opened)
                peers.wait_for(setup.device)
                reply = {"answers": setup.answers["own"]}
            elif command == "measure":
                assert measure is not None, line
                reply = vars(measure())
            elif command == "close":
                measure = None
                engines.close()
                peers.free_memory(forgets_compiled=False)
        except Exception as error:
            text = " ".join(str(error).split())
            reply = {"error": f"{type(error).__name__}: {text[:300]}"}
        print(json.dumps(reply), file=replies, flush=True)


@dataclass
class Version:
    """A process with a version of the package and a model."""

    name: str
    source: Path
    """Directory with the package."""
    process: subprocess.Popen[str]
    replies: TextIO
    error: str = ""

    @classmethod
    def start(cls, name: str, source: Path, size: str, options: argparse.Namespace) -> Version:
        """Starts the process."""
        replies, child_end = os.pipe()
        command = [sys.executable, __file__, *["--smoke"] * options.smoke]
        command += [f"--child={size}", f"--replies={child_end}"]
        command += [f"--turns={options.turns}", f"--steps={options.steps}"]
        paths = [str(source), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=[child_end],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        os.close(child_end)
        return cls(name, source, process, os.fdopen(replies))

    def send(self, *command: str) -> None:
        """Sends a command; `receive` returns its reply."""
        if not self.error:
            assert self.process.stdin is not None
            print(json.dumps(command), file=self.process.stdin, flush=True)

    def receive(self) -> Row:
        """Returns the reply to a command; empty if the process has failed."""
        if self.error:
            return {}
        line = self.replies.readline()
        reply: Row = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in reply:
            self.error = reply["error"]
            print(f"{self.name}: {self.error}", flush=True)
            return {}
        return reply

    def stop(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


# ---- turns --------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Versions of the package, and what they did."""

    options: argparse.Namespace
    groups: Sequence[Sequence[DecodeCase]]
    versions: dict[str, list[Version]] = field(default_factory=dict)
    """The processes of each model."""
    checks: dict[tuple[str, str], Check] = field(default_factory=dict)
    """Whether the tokens of a model and version are right."""

    def start(self) -> None:
        """Starts the processes of all models and versions."""
        sources = {"this": SOURCE}
        if self.options.other_source is not None:
            sources["other"] = self.options.other_source
        for size in {case.size for group in self.groups for case in group}:
            self.versions[size] = [
                Version.start(name, source, size, self.options) for name, source in sources.items()
            ]

    def run(self, rates: Rates) -> None:
        """Runs all groups."""
        last_group = {case.size: i for i, group in enumerate(self.groups) for case in group}
        try:
            # Compilers of later models run while those of the first group do.
            first_sizes = {case.size for case in self.groups[0]}
            later = [
                version
                for size, some in self.versions.items()
                for version in some
                if size not in first_sizes
            ]
            for version in later:
                version.send("prepare")
            for i, group in enumerate(self.groups):
                self.open_group(group)
                if i == 0:
                    for version in later:
                        version.receive()
                self.run_group(group, rates)
                for size in {case.size for case in group if last_group[case.size] == i}:
                    self.stop(size)
        finally:
            for size in list(self.versions):
                self.stop(size)

    def stop(self, size: str) -> None:
        """Ends the processes of a model."""
        for version in self.versions.pop(size):
            version.stop()

    def open_group(self, cases: Sequence[DecodeCase]) -> None:
        """Opens the engines of some cases, and checks the tokens of new models."""
        start_time = time.perf_counter()
        for case in cases:
            for version in self.versions[case.size]:
                version.send("open", str(case))
        # `check` needs them, and they take seconds to import.
        peers.import_transformers()
        for case in cases:
            answers = {
                version.name: reply["answers"]
                for version in self.versions[case.size]
                if (reply := version.receive())
            }
            if not any((case.size, name) in self.checks for name in answers):
                self.check(case.size, answers)
        print(f"opened in {time.perf_counter() - start_time:.0f} s", flush=True)

    def run_group(self, cases: Sequence[DecodeCase], rates: Rates) -> None:
        """Runs the turns of each case, and closes the engines."""
        for case in cases:
            self.report(case, self.take_turns(case), rates)
        for case in cases:
            for version in self.versions[case.size]:
                version.send("close")
                version.receive()

    def check(self, size: str, answers: Mapping[str, list[list[int]]]) -> None:
        """Compares the greedy tokens of all versions with transformers' logits."""
        setup = make_setup(self.options, size)
        setup.answers.update(answers)
        report = Report(None, 0, {})
        check_answers(setup, report)
        self.checks |= report.checks

    def take_turns(self, case: DecodeCase) -> dict[str, list[Turn]]:
        """Returns the turns of each version."""
        versions = [version for version in self.versions[case.size] if not version.error]
        turns: dict[str, list[Turn]] = {version.name: [] for version in versions}
        # A turn of nano has some thousand steps.
        for i in range(self.options.turns if case.num_sequences else 2):
            for version in versions if i % 2 == 0 else versions[::-1]:
                version.send("measure")
                if reply := version.receive():
                    turns[version.name].append(Turn(**reply))
        return {name: some for name, some in turns.items() if some}

    def report(self, case: DecodeCase, turns: Mapping[str, Sequence[Turn]], rates: Rates) -> None:
        """Prints and writes the rows of a case."""
        setup = make_setup(self.options, case.size)
        bound = Bound(setup.config, rates, 2 if setup.device.type == "cuda" else 4)
        rows = []
        for version in self.versions[case.size]:
            own_turns = turns.get(version.name)
            check = self.checks.get((case.size, version.name))
            if not own_turns:
                continue
            seconds = statistics.median(turn.seconds for turn in own_turns)
            share = statistics.median(
                case.bound_seconds(bound, setup.work, turn.num_tokens) / turn.seconds
                for turn in own_turns
            )
            passed = check is not None and check.passed
            row: Row = {
                "case": str(case),
                "version": version.name,
                "source": package_hash(version.source / "ranvier"),
                "ms_per_step": f"{seconds * 1e3:.4f}",
                "tokens_per_second": f"{own_turns[0].num_generated / seconds:.1f}",
                "share_of_bound": f"{share:.4f}" if passed else "",
                "copy_tb_per_second": f"{rates.bandwidth / 1e12:.3f}",
                "device": device_name(setup.device),
                "torch": torch.__version__,
                "checked": "yes" if passed else "",
            }
            words = f"{row['ms_per_step']} ms, {row['tokens_per_second']} tokens/s, of the bound "
            words += f"{share:.3f}" if passed else checked_ratio(share, [check])
            others = [name for name in turns if name != version.name]
            if version.name == "this" and others:
                pairs = zip(turns[others[0]], own_turns, strict=False)
                ratios = [theirs.seconds / own.seconds for theirs, own in pairs]
                checks = [check, self.checks.get((case.size, others[0]))]
                words += f", {checked_ratio(statistics.median(ratios), checks)} {others[0]}"
                if all(one is not None and one.passed for one in checks):
                    row["speedup"] = f"{statistics.median(ratios):.4f}"
                    row["speedup_low"] = f"{min(ratios):.4f}"
                    row["speedup_high"] = f"{max(ratios):.4f}"
                    words += f" ({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"{case!s:20} {version.name:6} {words}", flush=True)
            rows.append(row)
        if self.options.csv is not None:
            append_rows(self.options.csv, COLUMNS, rows)


# ---- main ---------------------------------------------------------------------------------------


def make_setup(options: argparse.Namespace, size: str) -> Setup:
    """Returns the setup of a model."""
    config = (TOY_SIZES if options.smoke else SIZES)[size]
    return Setup(
        size=size,
        config=config,
        device=torch.device("cpu") if options.smoke else torch.device("cuda", 0),
        # Children return seconds and tokens only.
        bound=Bound(config, Rates(1.0, 1.0, 1.0)),
        work=TOY_WORKLOAD if options.smoke else Workload(),
        repeats=1,
        settings={"block_size": 16, "kv_cache_gib": 0.1} if options.smoke else {},
        tunes=False,
        nano_vllm=None,
        smoke=options.smoke,
    )


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = script_parser.ScriptParser(
        __doc__,
        smoke="--group toy/2x32 --turns 2 --steps 2",
        skipped="models of other sizes, and nano",
    )
    add = parser.add_argument
    add(
        "--group",
        action="append",
        metavar="SIZE/NxL,SIZE/nano",
        help=f"cases that are opened together; may be repeated (default: {'; '.join(GROUPS)})",
    )
    add(
        "--other-source",
        type=Path,
        metavar="PATH",
        help="directory with another version of the package ranvier, which takes turns",
    )
    add("--turns", type=int, default=6, help="turns of each version; of nano 2")
    add("--steps", type=int, default=32, help="timed decode steps of a turn")
    add("--csv", type=Path, metavar="FILE", help="file to append rows to")
    add("--child", metavar="SIZE", help=argparse.SUPPRESS)
    add("--replies", type=int, metavar="FD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # A smoke gives its group first, and the user's replaces it.
    if options.smoke and options.group is not None and len(options.group) > 1:
        options.group = options.group[1:]
    return options


def compare(options: argparse.Namespace) -> None:
    """Compares versions in all groups."""
    if options.smoke:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise PlanError("torch sees no CUDA device. The benchmark needs one. Use --smoke here.")
    if min(options.turns, options.steps) < 1:
        raise PlanError("--turns and --steps are at least 1. Use 6 and 32.")
    if options.child:
        with os.fdopen(options.replies, "w") as replies:
            answer_commands(options, replies)
        return
    if options.other_source is not None and not (options.other_source / "ranvier").is_dir():
        raise PlanError(
            f"{options.other_source} has no directory ranvier. --other-source is the directory "
            "that Python would import the package from. Use e.g. PATH/src."
        )
    sizes = list(TOY_SIZES if options.smoke else SIZES)
    groups = [
        [DecodeCase.parse(text, sizes) for text in group.split(",")]
        for group in options.group or GROUPS
    ]
    for group in groups:
        if len({case.size for case in group}) < len(group):
            raise PlanError(
                f"{', '.join(map(str, group))} has two cases of one model. A group has one case of "
                "each, as it is one process. Use another --group."
            )
    device = torch.device("cpu") if options.smoke else torch.device("cuda", 0)
    comparison = Comparison(options, groups)
    comparison.start()
    # Processes import the package meanwhile, and compute nothing.
    rates = measure_rates(device)
    known = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    print(f"{device_name(device)}, {known}")
    print(f"copy {rates.bandwidth / 1e12:.2f} TB/s, matmul {rates.matmul / 1e12:.0f} TFLOP/s")
    comparison.run(rates)


def main() -> int:
    """Compares; prints user errors without a traceback."""
    try:
        compare(parse_arguments())
    except RanvierError as error:
        print(error, file=sys.stderr)
        return cast(int, error.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

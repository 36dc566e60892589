"""Inference on one GPU: the engine, the bound of its steps, and peers, measured in the same run.

Cases:

    single    batch 1, 128 tokens in, 512 out: rate of decode steps, kernels per layer, idle time
    batch64   64 sequences of 2,048 tokens: decode steps, and the decode attention kernel alone
    nano      nano-vllm's benchmark: 256 requests at once, 100 to 1,024 tokens in and out
    prefill   4 prompts of 2,048 tokens in one step
    prefix    prompts that share 4,096 tokens: time to first token of the first and of later ones
    ready     time from building the model to the first token, with cold and warm compile caches

All have the same seeded weights, in bf16. `serving_bound.py` has the formula of the bound. The
peers are transformers (static cache and compiled, continuous batching, compiled forward pass), a
plain compiled loop after gpt-fast (plain), and nano-vllm's engine with our attention kernels, if a
checkout is given. Their greedy tokens for eight prompts are compared with transformers' logits in
fp32 (`right_tokens.py`); there is no ratio with one that is wrong or was not compared. Times are
medians of some runs after one that warms up. Each row is printed and written as soon as it is
known. A peer that fails does not end the run.

    python benchmarks/serving.py --output serving.json
    python benchmarks/serving.py --cases nano --sizes qwen3-0.6b --nano-vllm nano-vllm
    python benchmarks/serving.py --cases single --peers none --engine block_size=128
    python benchmarks/serving.py --smoke
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import serving_peers as peers
import torch
from right_step import Check, checked_ratio, full_precision
from right_tokens import check_tokens
from serving_bound import Bound, Rates, check_anchors
from serving_cases import CASES, TARGETS, Case, attention_alone, measure_ready, print_ready
from serving_engine import SIZES, TOY_SIZES, TOY_WORKLOAD, Row, Setup, Workload

from ranvier.config.engine import EngineConfig
from ranvier.errors import PlanError, RanvierError
from ranvier.models import MODEL_SIZES

OURS = "ranvier"
PEERS = ("transformers", "plain", "nano-vllm")


# ---- report -------------------------------------------------------------------------------------


@dataclass
class Report:
    """Rows of the run, printed and written as soon as they are known."""

    path: Path | None
    limit_seconds: int
    facts: Row
    rows: list[Row] = field(default_factory=list)
    checks: dict[tuple[str, str], Check] = field(default_factory=dict)
    """Whether the tokens of a size and contestant are right."""

    def measure(self, case: str, size: str, name: str, work: Callable[[], Row]) -> None:
        """Measures one row; an error becomes a row too."""
        start = time.perf_counter()
        try:
            with time_limit(self.limit_seconds):
                row = work()
        except Exception as error:
            text = " ".join(str(error).split())
            row = {"error": f"{type(error).__name__}: {text[:300]}"}
            row["traceback"] = traceback.format_exc(limit=-6)
        if "tokens_per_second" in row and "bound_tokens_per_second" in row:
            row["share"] = row["tokens_per_second"] / row["bound_tokens_per_second"]
        self.add({"case": case, "size": size, "name": name, **row}, time.perf_counter() - start)

    def add(self, row: Row, seconds: float) -> None:
        """Prints and writes a row."""
        row["wall_seconds"] = seconds
        self.rows.append(row)
        skipped = ("case", "size", "name", "traceback", "wall_seconds")
        values = "  ".join(
            f"{key} {format_value(value)}" for key, value in row.items() if key not in skipped
        )
        place = f"{row['case']:8} {row['size']:10} {row['name']:14}"
        print(f"{place} {values}  ({seconds:.0f} s)", flush=True)
        self.write()

    def write(self) -> None:
        """Writes all rows."""
        if self.path is not None:
            text = json.dumps({**self.facts, "results": self.rows}, indent=1)
            self.path.write_text(text + "\n", encoding="utf-8")

    def compare(self, case: str, size: str) -> None:
        """Prints our row of a case relative to its bound and to its peers."""
        rates = {
            row["name"]: row["tokens_per_second"]
            for row in self.rows
            if (row["case"], row["size"]) == (case, size) and "tokens_per_second" in row
        }
        targets = TARGETS.get((case, size), {})
        ours = [
            row
            for row in self.rows
            if (row["case"], row["size"], row["name"]) == (case, size, OURS)
        ]
        if not ours or "share" not in ours[0]:
            return
        checks = {name: self.checks.get((size, name)) for name in rates}
        for row in self.rows:
            if (row["case"], row["size"]) == (case, size) and row["name"] in checks:
                check = checks[row["name"]]
                row["checked"] = check is not None and check.passed
        ratios = {"bound": ours[0]["share"]}
        ratios |= {name: rates[OURS] / rate for name, rate in rates.items() if name != OURS}
        parts = []
        for name, ratio in list(ratios.items()):
            compared = [checks[OURS]] + ([checks[name]] if name in checks else [])
            if not all(check is not None and check.passed for check in compared):
                del ratios[name]
                parts.append(f"{name}: no ratio, {checked_ratio(ratio, compared)}")
                continue
            verdict = ""
            if name in targets:
                verdict = f" ({'reaches' if ratio >= targets[name] else 'misses'} {targets[name]})"
            parts.append(f"{ratio:.3f} x {name}{verdict}")
        ours[0]["ratios"] = ratios
        ours[0]["targets"] = targets
        print(f"{case:8} {size:10} {'=':14} {', '.join(parts)}", flush=True)
        self.write()


def format_value(value: object) -> str:
    """Formats a number with four digits, or as many as it has before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Context that raises a TimeoutError in the main thread if it takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds} s (--limit)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- main ---------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", help=f"comma-separated list of {', '.join(CASES)} (default: all)")
    add("--sizes", help=f"comma-separated list of {', '.join(SIZES)} (default: as the case has)")
    add("--peers", help=f"comma-separated list of {', '.join(PEERS)}, or none (default: all)")
    add("--repeats", type=int, default=3, help="timed runs of the engine; of peers one less")
    add("--limit", type=int, default=240, help="maximum seconds of a row")
    add("--engine", action="append", default=[], metavar="KEY=VALUE", help="setting of the engine")
    add("--no-tuning", action="store_true", help="the plain loop compiles without a search")
    add("--nano-vllm", type=Path, metavar="PATH", help="directory of nano-vllm's source")
    add("--output", type=Path, metavar="FILE", help="JSON file, updated after each row")
    add("--smoke", action="store_true", help="small models on the CPU, as a check")
    add("--ready-child", metavar="SIZE", help=argparse.SUPPRESS)
    return parser.parse_args()


def choose(text: str | None, known: Sequence[str], what: str) -> list[str]:
    """Returns the names in a comma-separated list."""
    names = list(known) if text is None else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise PlanError(
                f"{name!r} is not a known {what}. It must be in the list. Use one of "
                f"{', '.join(known)}."
            )
    return names


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Returns settings of the engine from KEY=VALUE; values are JSON, or else text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in EngineConfig.__dataclass_fields__:
            raise PlanError(
                f"--engine {text!r} is not a setting. It must be KEY=VALUE with a setting of the "
                f"engine. Use one of {', '.join(EngineConfig.__dataclass_fields__)}."
            )
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def measure_rates(device: torch.device) -> Rates:
    """Returns the rates of a copy, of the fastest of some matmuls, and of flash attention."""
    if device.type == "cpu":
        return Rates(1e10, 1e11, 1e11)
    from paged_attention import copy_bandwidth, make_flush

    options: Any = {"device": device, "dtype": torch.bfloat16}
    matmul = 0.0
    for m, n, k in ((8192, 8192, 8192), (8192, 28672, 4096), (8192, 4096, 14336)):
        a = torch.randn(m, k, **options)
        b = torch.randn(n, k, **options).t()
        out = torch.mm(a, b)
        seconds = repeated_seconds(partial(torch.mm, a, b, out=out), device)
        matmul = max(matmul, 2.0 * m * n * k / seconds)
        del a, b, out
    batch, heads, length, head_dim = 4, 32, 2048, 128
    q, k_, v = (torch.randn(batch, heads, length, head_dim, **options) for _ in range(3))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k_, v, is_causal=True)
    flops = 4.0 * batch * heads * head_dim * length * length / 2
    return Rates(copy_bandwidth(make_flush()), matmul, flops / repeated_seconds(attend, device))


def repeated_seconds(work: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Returns the seconds of some work that is launched several times in a row."""

    def launch() -> None:
        for _ in range(runs):
            work()

    launch()
    return peers.median_seconds(launch, device, 5) / runs


def run_size(setup: Setup, cases: Mapping[str, Case], wanted: Sequence[str], out: Report) -> None:
    """Measures all cases of a model: ours, then each peer."""
    # Before a profiler runs in this process, which makes later kernels slower.
    if "batch64" in cases and setup.device.type == "cuda":
        out.measure("batch64", setup.size, "attention", partial(attention_alone, setup))
    ours = {name: case.ours for name, case in cases.items() if case.ours is not None}
    if ours:
        model = setup.build_model()
        setup.answers[OURS] = setup.answer_alone(model)
        for name, measure_ours in ours.items():
            out.measure(name, setup.size, OURS, partial(measure_ours, setup, model))
            peers.free_memory(forgets_compiled=False)
        del model
        peers.free_memory()
    theirs = {name: case.transformers for name, case in cases.items() if case.transformers}
    if theirs and "transformers" in wanted:
        try:
            with peers.transformers_model(setup.config, setup.device, setup.dtype) as model:
                prompts = setup.checked_prompts()
                answers = peers.static_cache_answers(model, prompts, setup.work.checked[1])
                setup.answers["transformers"] = answers
                for name, measure in theirs.items():
                    out.measure(name, setup.size, "transformers", partial(measure, setup, model))
                    torch._dynamo.reset()
                del model
        except Exception as error:
            print(f"transformers cannot be built: {error}", flush=True)
    for name, case in cases.items():
        for peer, run in case.others.items():
            if peer in wanted:
                out.measure(name, setup.size, peer, partial(run, setup))
                peers.free_memory()
    check_answers(setup, out)
    for name in cases:
        out.compare(name, setup.size)
    if "ready" in cases:
        with tempfile.TemporaryDirectory() as folder:
            for name, accepted in (("cold", 120.0), ("warm", 40.0)):
                work = partial(measure_ready, setup, Path(folder), accepted)
                out.measure("ready", setup.size, name, work)


def check_answers(setup: Setup, out: Report) -> None:
    """Compares the tokens of all contestants with transformers' logits in fp32."""
    try:
        with (
            peers.transformers_model(setup.config, setup.device, torch.float32) as twin,
            full_precision(),
        ):
            logits_of = partial(peers.sequence_logits, twin)
            for name, answers in setup.answers.items():
                prompts = setup.checked_prompts()
                check = check_tokens(name, prompts, answers, logits_of, setup.dtype)
                out.checks[setup.size, name] = check
                print(f"{'check':8} {setup.size:10} {check}", flush=True)
            del twin, logits_of
    except ImportError as error:
        print(f"no tokens are compared, as transformers cannot be imported: {error}", flush=True)


def versions() -> dict[str, str | None]:
    """Returns the versions of the packages that matter."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("ranvier", "torch", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "cuda": torch.version.cuda}


def compare(asked: argparse.Namespace) -> None:
    """Runs all cases that were asked for."""
    if not asked.smoke and not torch.cuda.is_available():
        raise PlanError("torch sees no CUDA device. The benchmark needs one. Use --smoke here.")
    if asked.smoke:
        torch.set_num_threads(1)
        if asked.cases is None:
            asked.cases, asked.sizes, asked.repeats = "single", asked.sizes or "toy", 1
            print("skipped: the other cases, which --cases selects")
    if asked.repeats < 1:
        raise PlanError("--repeats is too small. There must be a timed run. Use 3.")
    device = torch.device("cpu") if asked.smoke else torch.device("cuda", 0)
    sizes = TOY_SIZES if asked.smoke else SIZES
    settings = parse_settings(asked.engine)
    make_setup = partial(
        Setup,
        device=device,
        work=TOY_WORKLOAD if asked.smoke else Workload(),
        repeats=asked.repeats,
        settings={"block_size": 16, "kv_cache_gib": 0.1, **settings} if asked.smoke else settings,
        tunes=not asked.no_tuning,
        nano_vllm=asked.nano_vllm,
        smoke=asked.smoke,
    )
    if asked.ready_child:
        config = sizes[asked.ready_child]
        rates = Rates(1.0, 1.0, 1.0)
        print_ready(make_setup(size=asked.ready_child, config=config, bound=Bound(config, rates)))
        return
    cases = choose(asked.cases, list(CASES), "case")
    wanted = [] if asked.peers == "none" else choose(asked.peers, PEERS, "peer")
    if asked.smoke:
        print("\n".join(check_anchors(MODEL_SIZES)), flush=True)
    rates = measure_rates(device)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    facts: Row = {
        "command": sys.argv,
        "device": kind,
        "versions": versions(),
        "bandwidth": rates.bandwidth,
        "matmul_flops": rates.matmul,
        "attention_flops": rates.attention,
    }
    print(f"{kind}, " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v))
    print(
        f"copy {rates.bandwidth / 1e12:.2f} TB/s, matmul {rates.matmul / 1e12:.0f} TFLOP/s, "
        f"attention {rates.attention / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    report = Report(asked.output, asked.limit, facts)
    itemsize = 2 if device.type == "cuda" else 4
    for size in choose(asked.sizes, list(sizes), "size"):
        some = {
            name: CASES[name]
            for name in cases
            if asked.smoke or (asked.cases and asked.sizes) or size in CASES[name].sizes
        }
        if some:
            bound = Bound(sizes[size], rates, itemsize)
            run_size(make_setup(size=size, config=sizes[size], bound=bound), some, wanted, report)


def main() -> int:
    """Compares; prints user errors without a traceback."""
    try:
        compare(parse_arguments())
    except RanvierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

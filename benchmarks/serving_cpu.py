"""Inference on a CPU: requests of mixed lengths, the engine and its peers in the same run.

All compute the greedy tokens of the same requests with the same random weights in fp32, with at
most a number of requests at a time (`--concurrency`). A model of transformers is written to a
directory, from which Ranvier and vLLM load it. Peers:

    generate        transformers, batches in the order of the requests, padded on the left; a batch
                    ends with its longest answer
    generate_batch  transformers, continuous batching (its manager, because requests differ in
                    length)
    vllm            vLLM in an environment of its own, if its interpreter is given

After a short run that warms up, repeats are interleaved: each runs all peers once. Rates are
medians of the tokens that requests asked for, per second, with their prompts. The tokens of each
request are compared with ours, and those of eight requests with transformers' logits
(`right_tokens.py`); there is no ratio with an engine that is wrong.

    python benchmarks/serving_cpu.py --output serving_cpu.json
    python benchmarks/serving_cpu.py --vllm vllm-env/bin/python
    python benchmarks/serving_cpu.py --smoke
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import serving_peers as peers
import torch
from right_step import Check
from right_tokens import NUM_PROMPTS, check_tokens
from serving import OURS, format_value, versions
from serving_bound import draw_prompts
from serving_engine import TOY, Row, make_requests

from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.errors import PlanError, RanvierError
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, open_engine
from ranvier.infer.model_source import ModelSource
from ranvier.models import DecoderConfig

CPU = torch.device("cpu")
SIZES = {
    "58m": DecoderConfig(
        layers=8, embed=512, heads=8, kv_heads=4, head_dim=64, mlp=1536, vocab=32000, max_seq=1024
    ),
    "toy": TOY,
}
PEERS = ("generate", "generate_batch", "vllm")
TARGETS = {"generate": 1.3, "generate_batch": 1.5}
VLLM_SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, concurrency = sys.argv[1], int(sys.argv[2])
llm = LLM(model=folder, skip_tokenizer_init=True, dtype="float32", max_num_seqs=concurrency,
          enable_prefix_caching=False)
for line in sys.stdin:
    requests = json.loads(line)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
              for _, count in requests]
    start = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params,
                         use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = [list(one.outputs[0].token_ids) for one in found]
    print("RESULT " + json.dumps([seconds, tokens]), flush=True)
"""


@dataclass(frozen=True)
class Workload:
    """Requests, and how many of them run at a time."""

    prompts: Sequence[list[int]]
    counts: Sequence[int]
    """Number of tokens that each request generates."""
    concurrency: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all requests generate."""
        return sum(self.counts)

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a request."""
        return max(
            len(prompt) + count for prompt, count in zip(self.prompts, self.counts, strict=True)
        )


Answers = list[list[int]]
"""Generated tokens of each request."""
Run = Callable[[Workload], Answers]


@dataclass
class Times:
    """Seconds of the runs of one engine, and the answers of its last one."""

    seconds: list[float] = field(default_factory=list)
    answers: Answers = field(default_factory=list)
    error: str = ""


# ---- engines ------------------------------------------------------------------------------------


def run_engine(engine: Engine, work: Workload) -> Answers:
    """Runs requests with our engine."""
    found: dict[str, list[int]] = {}
    requests = make_requests(work.prompts, work.counts, name=f"r{time.monotonic_ns()}")
    for request in requests:
        engine.add(request)
        found[request.request_id] = []
    while engine.has_unfinished:
        for output in engine.step():
            if output.error:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            found[output.request_id] += output.token_ids
    return list(found.values())


@contextmanager
def our_engine(folder: Path, work: Workload) -> Iterator[Run]:
    """Context with our engine."""
    source = ModelSource.find(folder)
    model = source.load(Grid({}), CPU, Plan(data=1, compile="off"), torch.float32)
    # A later run must compute its prompts again.
    config = EngineConfig(
        max_num_seqs=work.concurrency, max_model_len=work.max_len, enable_prefix_caching=False
    )
    with open_engine(model, config) as engine:
        yield partial(run_engine, engine)


def generate_in_batches(model: Any, work: Workload) -> Answers:
    """Runs requests with `generate` of transformers, in batches."""
    answers: Answers = []
    for first in range(0, len(work.prompts), work.concurrency):
        some = slice(first, first + work.concurrency)
        prompts = work.prompts[some]
        counts = work.counts[some]
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            found = model.generate(
                tokens, attention_mask=mask, max_new_tokens=max(counts), do_sample=False
            )
        rows = found[:, width:].tolist()
        answers += [row[:count] for row, count in zip(rows, counts, strict=True)]
    return answers


@contextmanager
def batch_manager(model: Any, work: Workload) -> Iterator[Run]:
    """Context with continuous batching of transformers."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    options = GenerationConfig(
        max_new_tokens=max(work.counts), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # By default its masks take most of the memory of the host.
    size = ContinuousBatchingConfig().page_size
    blocks = work.concurrency * -(-work.max_len // size)
    settings = ContinuousBatchingConfig(page_size=size, num_blocks=blocks, max_batch_tokens=512)
    model.set_attn_implementation("sdpa")
    manager = model.init_continuous_batching(
        generation_config=options, continuous_batching_config=settings
    )
    manager.start()
    try:
        yield partial(run_manager, manager)
    finally:
        manager.stop(block=True, timeout=10)
        model.set_attn_implementation("sdpa")


def run_manager(manager: Any, work: Workload) -> Answers:
    """Runs requests with continuous batching of transformers, some of them at a time."""
    waiting = [*enumerate(zip(work.prompts, work.counts, strict=True))][::-1]
    places: dict[str, int] = {}
    answers: Answers = [[] for _ in work.prompts]
    running = 0
    while waiting or running:
        while waiting and running < work.concurrency:
            i, (prompt, count) = waiting.pop()
            places[manager.add_request(prompt, max_new_tokens=count)] = i
            running += 1
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the thread of continuous batching has stopped")
        elif result.is_finished():
            if result.error is not None:
                raise RuntimeError(str(result.error))
            answers[places[result.request_id]] = list(result.generated_tokens)
            running -= 1
    return answers


@contextmanager
def vllm_process(python: Path, folder: Path, work: Workload) -> Iterator[Run]:
    """Context with vLLM in a process of another environment."""
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(python), "-c", VLLM_SCRIPT, str(folder), str(work.concurrency)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = process.stdout

    def run(asked: Workload) -> Answers:
        assert process.stdin is not None
        requests = [*zip(asked.prompts, asked.counts, strict=True)]
        process.stdin.write(json.dumps(requests) + "\n")
        process.stdin.flush()
        for line in lines:
            if line.startswith("RESULT "):
                answers: Answers = json.loads(line.removeprefix("RESULT "))[1]
                return answers
        raise RuntimeError(f"vLLM has ended with {process.wait()}")

    try:
        yield run
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


# ---- main ---------------------------------------------------------------------------------------


def draw_workload(asked: argparse.Namespace, vocab: int) -> Workload:
    """Returns requests of mixed lengths."""
    rng = random.Random(0)
    sizes = [rng.randint(*asked.input) for _ in range(asked.requests)]
    counts = [rng.randint(*asked.generated) for _ in range(asked.requests)]
    return Workload(draw_prompts(sizes, vocab, seed=1), counts, asked.concurrency)


def measure(name: str, run: Run, work: Workload, times: Times, expected: Answers) -> None:
    """Runs the requests once."""
    if times.error:
        return
    start = time.perf_counter()
    try:
        times.answers = run(work)
        times.seconds.append(time.perf_counter() - start)
        if [*map(len, times.answers)] != list(work.counts):
            raise RuntimeError("some answers do not have the number of tokens that was asked for")
    except Exception as error:
        times.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name:24} {times.error}", flush=True)
        return
    equal = sum(a == b for a, b in zip(times.answers, expected or times.answers, strict=True))
    rate = work.num_tokens / times.seconds[-1]
    text = f"{times.seconds[-1]:.2f} s, {rate:.1f} tokens/s"
    print(f"{name:24} {text}, {equal} of {len(work.counts)} answers equal ours", flush=True)


def check_engines(found: dict[str, Times], work: Workload, twin: Any) -> dict[str, Check]:
    """Compares the tokens of each engine with the logits of transformers' model."""
    prompts = work.prompts[:NUM_PROMPTS]
    logits_of = partial(peers.sequence_logits, twin)
    checks = {}
    for name, times in found.items():
        answers = times.answers[:NUM_PROMPTS]
        checks[name] = check_tokens(name, prompts, answers, logits_of, torch.float32)
        print(f"{'check':24} {checks[name]}", flush=True)
    return checks


def summarize(found: dict[str, Times], work: Workload, checks: dict[str, Check]) -> list[Row]:
    """Returns a row for each engine, with our rate relative to its if both are right."""
    ours = statistics.median(found[OURS].seconds)
    rows: list[Row] = []
    for name, times in found.items():
        row: Row = {"name": name, "seconds": times.seconds}
        if times.error:
            rows.append({**row, "error": times.error})
            continue
        seconds = statistics.median(times.seconds)
        row["tokens_per_second"] = work.num_tokens / seconds
        row["equal_answers"] = sum(
            a == b for a, b in zip(times.answers, found[OURS].answers, strict=True)
        )
        row["checked"] = checks[name].passed
        if name != OURS and row["checked"] and checks[OURS].passed:
            row["ratio"] = seconds / ours
            row["target"] = TARGETS.get(name)
        rows.append(row)
    return rows


def print_ratios(rows: Sequence[Row]) -> None:
    """Prints our rate relative to those of the peers."""
    for row in rows:
        if "ratio" not in row:
            continue
        verdict = ""
        if row["target"]:
            word = "reaches" if row["ratio"] >= row["target"] else "misses"
            verdict = f" ({word} {row['target']})"
        print(f"{'=':24} {format_value(row['ratio'])} x {row['name']}{verdict}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="58m", help="model")
    add("--peers", help=f"comma-separated list of {', '.join(PEERS)}, or none (default: all)")
    add("--requests", type=int, default=64, help="number of requests")
    add("--concurrency", type=int, default=16, help="requests at a time, and size of a batch")
    span: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("LOW", "HIGH")}
    add("--input", default=(16, 256), help="bounds of the tokens of a prompt", **span)
    add("--generated", default=(16, 128), help="bounds of the tokens of an answer", **span)
    add("--repeats", type=int, default=3, help="timed runs of each")
    add("--threads", type=int, default=2, help="threads of torch")
    add("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment with vLLM")
    add("--output", type=Path, metavar="FILE", help="JSON file")
    add("--smoke", action="store_true", help="a small model and few requests, as a check")
    asked = parser.parse_args()
    if asked.smoke:
        asked.size, asked.requests, asked.repeats, asked.threads = "toy", 8, 1, 1
        asked.input, asked.generated = (4, 12), (4, 8)
    return asked


def choose_peers(asked: argparse.Namespace) -> list[str]:
    """Returns the peers that were asked for."""
    names = list(PEERS) if asked.peers is None else asked.peers.split(",")
    if names == ["none"]:
        return []
    for name in names:
        if name not in PEERS:
            raise PlanError(
                f"{name!r} is not a known peer. It must be in the list. Use one of "
                f"{', '.join(PEERS)}."
            )
    return [name for name in names if name != "vllm" or asked.vllm is not None]


def compare(asked: argparse.Namespace) -> None:
    """Measures our engine and its peers."""
    torch.set_num_threads(asked.threads)
    config = SIZES[asked.size]
    wanted = choose_peers(asked)
    work = draw_workload(asked, config.vocab)
    warm_up = Workload(work.prompts[:4], [8] * len(work.prompts[:4]), work.concurrency)
    found = {name: Times() for name in (OURS, *wanted)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        theirs = stack.enter_context(peers.transformers_model(config, CPU, torch.float32))
        theirs.save_pretrained(folder)
        size = sum(one.numel() for one in theirs.parameters())
        facts = {
            "command": sys.argv,
            "device": f"{platform.machine()}, {os.cpu_count()} cores",
            "threads": asked.threads,
            "versions": versions(),
            "parameters": size,
            "input_tokens": sum(map(len, work.prompts)),
            "generated_tokens": work.num_tokens,
        }
        print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
        runs: dict[str, Run] = {OURS: stack.enter_context(our_engine(folder, work))}
        if "generate" in wanted:
            runs["generate"] = partial(generate_in_batches, theirs)
        if "vllm" in wanted:
            runs["vllm"] = stack.enter_context(vllm_process(asked.vllm, folder, work))
        for name, run in runs.items():
            measure(f"{name} (warm-up)", run, warm_up, Times(), [])
        for _ in range(asked.repeats):
            for name in found:
                if name != "generate_batch":
                    measure(name, runs[name], work, found[name], found[OURS].answers)
                    continue
                # Its manager replaces the attention of the model while it runs.
                with batch_manager(theirs, work) as run:
                    measure(f"{name} (warm-up)", run, warm_up, Times(), [])
                    measure(name, run, work, found[name], found[OURS].answers)
        checks = check_engines(found, work, theirs)
    rows = summarize(found, work, checks)
    print_ratios(rows)
    if asked.output is not None:
        text = json.dumps({**facts, "results": rows}, indent=1)
        asked.output.write_text(text + "\n", encoding="utf-8")


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

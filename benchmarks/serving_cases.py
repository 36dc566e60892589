"""Cases of `serving.py`: what the engine and its peers run, and the numbers of each."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import serving_peers as peers
from serving_bound import draw_lengths, draw_prompts
from serving_engine import (
    Row,
    Setup,
    Timeline,
    abort_requests,
    make_requests,
    profile_steps,
    run_requests,
)

from ranvier.config.engine import EngineConfig
from ranvier.errors import PlanError
from ranvier.infer.engine import open_engine
from ranvier.models import Decoder

HERE = Path(__file__).resolve().parent
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    ("single", "llama3-8b"): {"bound": 0.78, "transformers": 1.6, "plain": 1.0},
    ("single", "llama3-1b"): {"bound": 0.58},
    ("single", "1.5b"): {"transformers": 2.2, "plain": 1.15},
    ("batch64", "llama3-8b"): {"bound": 0.72, "transformers": 1.3},
    ("nano", "qwen3-0.6b"): {"bound": 0.55, "transformers": 4.0, "nano-vllm": 1.1},
    ("nano", "llama3-8b"): {"bound": 0.62, "transformers": 4.0},
    ("prefill", "llama3-8b"): {"bound": 0.70, "transformers": 1.1},
}
"""Smallest fraction of the bound, and smallest ratio to each peer, that is accepted."""

# ---- cases: ours --------------------------------------------------------------------------------


def single_ours(setup: Setup, model: Decoder) -> Row:
    """Batch 1: decode steps, from the first token to the last."""
    tokens, count = setup.work.single
    rates = []
    totals = []
    medians = []
    facts: Row = {}
    length = tokens + count
    with setup.open_engine(
        model, num_tokens=(setup.repeats + 3) * length, max_num_seqs=8, max_model_len=length
    ) as engine:
        for i in range(setup.repeats + 1):
            prompts = draw_prompts([tokens], setup.config.vocab, i)
            timeline = run_requests(engine, make_requests(prompts, [count], name=f"single{i}"))
            rates.append((count - 1) / (timeline.times[-1] - timeline.times[0]))
            totals.append(count / timeline.seconds)
            steps = zip(timeline.times, timeline.times[1:], strict=False)
            medians.append(statistics.median(stop - start for start, stop in steps))
        if setup.device.type == "cuda":
            prompts = draw_prompts([tokens], setup.config.vocab, 99)
            requests = make_requests(prompts, [count], name="profile")
            engine.add(requests[0])
            for _ in range(setup.work.skip):
                engine.step()
            facts = profile_steps(engine, setup.config.layers)
            abort_requests(engine, requests)
    bound = 1.0 / setup.bound.decode_seconds(1, tokens + count / 2)
    return {
        "tokens_per_second": statistics.median(rates[1:]),
        "bound_tokens_per_second": bound,
        "step_ms": statistics.median(medians[1:]) * 1e3,
        "end_to_end_tokens_per_second": statistics.median(totals[1:]),
        **facts,
    }


def batch64_ours(setup: Setup, model: Decoder) -> Row:
    """Decode steps of many sequences of the same length, after their prompts."""
    count, length = setup.work.batch
    budget = 4 * length
    # Prompts take some steps, in which those that came before are decoded already.
    lead = min(length // 2, count * length // budget // 2 + setup.work.skip // 2)
    prompt = length - lead - setup.work.steps // 2
    rates = []
    steps_ms = []
    bounds = []
    with setup.open_engine(
        model,
        num_tokens=count * (length + 256),
        max_num_seqs=count,
        max_model_len=length + 256,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    ) as engine:
        for i in range(setup.repeats):
            prompts = draw_prompts([prompt] * count, setup.config.vocab, i)
            requests = make_requests(prompts, [256] * count, name=f"batch{i}")
            timeline = Timeline(time.perf_counter())
            for request in requests:
                engine.add(request)
            while len(timeline.generated) < count:
                timeline.take_step(engine)
            for _ in range(setup.work.skip // 2):
                timeline.take_step(engine)
            before = sum(timeline.generated.values())
            first = len(timeline.times) - 1
            while len(timeline.times) - 1 - first < setup.work.steps:
                timeline.take_step(engine)
            seconds = timeline.times[-1] - timeline.times[first]
            generated = sum(timeline.generated.values()) - before
            context = count * prompt + before + generated / 2
            rates.append(generated / seconds)
            steps_ms.append(seconds / setup.work.steps * 1e3)
            bounds.append(count / setup.bound.decode_seconds(count, context))
            facts = {"mean_context": context / count}
            if setup.device.type == "cuda" and i == setup.repeats - 1:
                facts |= profile_steps(engine, setup.config.layers)
            abort_requests(engine, requests)
    return {
        "tokens_per_second": statistics.median(rates),
        "bound_tokens_per_second": statistics.median(bounds),
        "step_ms": statistics.median(steps_ms),
        **facts,
    }


def attention_alone(setup: Setup) -> Row:
    """The decode attention kernel of a layer, by the bytes of keys and values."""
    from paged_attention import Cell, make_flush, make_inputs, replay_seconds

    from ranvier.infer import paged_kernels

    count, length = setup.work.batch
    config = setup.config
    cell = Cell(
        kv_heads=config.kv_heads,
        group=config.heads // config.kv_heads,
        head_dim=config.head_dim,
        is_mixed=False,
        lengths=((length,) * count,),
    )
    block_size = EngineConfig(**setup.settings).block_size
    inputs = make_inputs(cell, setup.device, block_size)
    seconds = replay_seconds(
        partial(inputs.attend, paged_kernels),
        inputs,
        draws=[inputs.seq_lens.clone()],
        flush=make_flush(),
        repeats=50,
    )
    share = cell.read_bytes / seconds / setup.bound.rates.bandwidth
    return {"kernel_us": seconds * 1e6, "share_of_bandwidth": share, "accepted_share": 0.85}


def nano_ours(setup: Setup, model: Decoder) -> Row:
    """All requests at once, with random lengths; tokens are sampled."""
    count, low, high = setup.work.nano
    lengths = draw_lengths(count, low, high)
    generated = sum(out for _, out in lengths)
    times = []
    facts: Row = {}
    with setup.open_engine(
        model,
        num_tokens=sum(tokens + out for tokens, out in lengths),
        max_num_seqs=count,
        max_model_len=2 * high,
        max_num_batched_tokens=8 * high,
    ) as engine:
        for i in range(setup.peer_repeats() + 1):
            prompts = draw_prompts([tokens for tokens, _ in lengths], setup.config.vocab, i)
            outs = [out for _, out in lengths]
            requests = make_requests(prompts, outs, name=f"nano{i}", temperature=0.6)
            before = engine.stats()
            times.append(run_requests(engine, requests).seconds)
            after = engine.stats()
            facts = {
                "steps": after.num_steps - before.num_steps,
                "preemptions": after.num_preemptions - before.num_preemptions,
                "first_run_seconds": times[0],
            }
    seconds = statistics.median(times[1:])
    return {
        "tokens_per_second": generated / seconds,
        "bound_tokens_per_second": generated / setup.bound.workload_seconds(lengths),
        "seconds": seconds,
        **facts,
    }


def prefill_ours(setup: Setup, model: Decoder) -> Row:
    """Prompts that fill one step, and one token of each."""
    count, length = setup.work.prefill
    times = []
    with setup.open_engine(
        model,
        num_tokens=2 * count * length,
        max_num_seqs=count,
        max_model_len=length + 1,
        max_num_batched_tokens=count * length,
    ) as engine:
        for i in range(setup.repeats + 2):
            prompts = draw_prompts([length] * count, setup.config.vocab, i)
            requests = make_requests(prompts, [1] * count, name=f"prefill{i}")
            times.append(run_requests(engine, requests).seconds)
        num_steps = engine.stats().num_steps / len(times)
    seconds = statistics.median(times[2:])
    return {
        "tokens_per_second": count * length / seconds,
        "bound_tokens_per_second": count * length / setup.bound.prefill_seconds([length] * count),
        "step_ms": seconds * 1e3,
        "steps": num_steps,
    }


def prefix_ours(setup: Setup, model: Decoder) -> Row:
    """Time to first token of prompts with a shared prefix, and the tokens that are computed."""
    shared, own = setup.work.prefix
    vocab = setup.config.vocab
    first: list[float] = []
    later: list[float] = []
    computed: list[int] = []
    with setup.open_engine(
        model,
        num_tokens=(setup.repeats + 2) * (shared + 8 * own),
        max_num_seqs=8,
        max_model_len=shared + own + 1,
    ) as engine:
        # The first prefix warms up.
        for i in range(setup.repeats + 1):
            (prefix,) = draw_prompts([shared], vocab, i)
            for j, rest in enumerate(draw_prompts([own] * 5, vocab, 1000 + i)):
                before = engine.stats().num_computed_tokens
                requests = make_requests([[*prefix, *rest]], [1], name=f"prefix{i}-{j}")
                seconds = run_requests(engine, requests).seconds
                if i == 0:
                    continue
                if j == 0:
                    first.append(seconds)
                else:
                    later.append(seconds)
                    computed.append(engine.stats().num_computed_tokens - before)
        full = shared // engine.config.block_size * engine.config.block_size
    return {
        "first_ms": statistics.median(first) * 1e3,
        "later_ms": statistics.median(later) * 1e3,
        "ratio": statistics.median(later) / statistics.median(first),
        "accepted_ratio": 0.15,
        "computed_tokens": sorted(set(computed)),
        # Only full blocks are shared.
        "new_tokens": shared + own - full,
    }


# ---- cases: peers -------------------------------------------------------------------------------


def single_transformers(setup: Setup, model: Any) -> Row:
    """Batch 1 with a static cache, compiled."""
    tokens, count = setup.work.single
    prompts = draw_prompts([tokens], setup.config.vocab, 0)
    step, call = peers.static_cache_steps(
        model, prompts, new_tokens=count, skip=setup.work.skip // 2, repeats=setup.peer_repeats()
    )
    return {
        "tokens_per_second": 1.0 / step,
        "step_ms": step * 1e3,
        "end_to_end_tokens_per_second": count / call,
    }


def single_plain(setup: Setup) -> Row:
    """Batch 1 in a plain compiled loop."""
    tokens, count = setup.work.single
    start = time.perf_counter()
    step, setup.answers["plain"] = peers.plain_loop(
        setup.config,
        setup.device,
        setup.dtype,
        prompt_tokens=tokens,
        new_tokens=count,
        repeats=setup.peer_repeats(),
        tunes=setup.tunes,
        prompts=setup.checked_prompts(),
        answer_tokens=setup.work.checked[1],
    )
    total = time.perf_counter() - start
    return {"tokens_per_second": 1.0 / step, "step_ms": step * 1e3, "total_seconds": total}


def batch64_transformers(setup: Setup, model: Any) -> Row:
    """Decode steps of many sequences with a static cache, compiled."""
    count, length = setup.work.batch
    new_tokens = setup.work.steps + setup.work.skip + 1
    prompts = draw_prompts([length - new_tokens] * count, setup.config.vocab, 0)
    step, _ = peers.static_cache_steps(
        model, prompts, new_tokens=new_tokens, skip=setup.work.skip, repeats=1
    )
    return {"tokens_per_second": count / step, "step_ms": step * 1e3}


def nano_transformers(setup: Setup, model: Any) -> Row:
    """Continuous batching of transformers."""
    lengths = draw_lengths(*setup.work.nano)
    seconds, facts = peers.continuous_batching_seconds(model, lengths)
    generated = sum(out for _, out in lengths)
    return {"tokens_per_second": generated / seconds, "seconds": seconds, **facts}


def prefill_transformers(setup: Setup, model: Any) -> Row:
    """The compiled forward pass of transformers, without a cache."""
    count, length = setup.work.prefill
    prompts = draw_prompts([length] * count, setup.config.vocab, 0)
    seconds = peers.forward_seconds(model, prompts, setup.repeats)
    return {"tokens_per_second": count * length / seconds, "step_ms": seconds * 1e3}


def nano_nano_vllm(setup: Setup) -> Row:
    """nano-vllm's engine on our kernels, in its own process."""
    if setup.nano_vllm is None:
        raise PlanError("There is no source of nano-vllm. Give a checkout with --nano-vllm PATH.")
    count, low, high = setup.work.nano
    numbers = {"requests": count, "low": low, "high": high, "repeats": setup.peer_repeats()}
    command = [sys.executable, str(HERE / "nano_vllm_peer.py"), "--source", str(setup.nano_vllm)]
    command += ["--size", setup.size, *(f"--{name}={value}" for name, value in numbers.items())]
    facts = run_child(command, {})
    setup.answers["nano-vllm"] = facts.pop("answers")
    seconds = statistics.median(facts["seconds"])
    generated = sum(out for _, out in draw_lengths(count, low, high))
    return {"tokens_per_second": generated / seconds, "seconds": seconds, **facts}


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> Row:
    """Runs a process whose last line is a JSON object; raises with its last error line."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


# ---- time until ready ---------------------------------------------------------------------------


def measure_ready(setup: Setup, folder: Path, accepted: float) -> Row:
    """Returns the times until ready of a process. folder: of its compile caches."""
    command = [sys.executable, str(HERE / "serving.py"), "--ready-child", setup.size]
    command += [f"--engine={key}={json.dumps(value)}" for key, value in setup.settings.items()]
    if setup.smoke:
        command.append("--smoke")
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    return {**run_child(command, caches), "accepted_seconds": accepted}


def print_ready(setup: Setup) -> None:
    """Builds a model and an engine, generates two tokens, and prints the seconds as JSON."""
    start = time.perf_counter()
    model = setup.build_model()
    peers.wait_for(setup.device)
    built = time.perf_counter() - start
    with open_engine(model, EngineConfig(**setup.settings)) as engine:
        opened = time.perf_counter() - start
        prompts = draw_prompts([setup.work.single[0]], setup.config.vocab, 0)
        timeline = run_requests(engine, make_requests(prompts, [2], name="ready"))
    first, second = (at - start for at in timeline.times)
    row = {"model_seconds": built, "engine_seconds": opened, "first_token_seconds": first}
    print(json.dumps({**row, "second_token_seconds": second}), flush=True)


# ---- table of cases -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A case: its models, and who takes part."""

    sizes: tuple[str, ...]
    ours: Callable[[Setup, Decoder], Row] | None = None
    transformers: Callable[[Setup, Any], Row] | None = None
    others: Mapping[str, Callable[[Setup], Row]] = field(default_factory=dict)


CASES = {
    "single": Case(
        ("llama3-8b", "llama3-1b", "1.5b"),
        single_ours,
        single_transformers,
        {"plain": single_plain},
    ),
    "batch64": Case(("llama3-8b",), batch64_ours, batch64_transformers),
    "nano": Case(
        ("qwen3-0.6b", "llama3-8b"), nano_ours, nano_transformers, {"nano-vllm": nano_nano_vllm}
    ),
    "prefill": Case(("llama3-8b",), prefill_ours, prefill_transformers),
    "prefix": Case(("llama3-8b",), prefix_ours),
    "ready": Case(("llama3-8b",)),
}

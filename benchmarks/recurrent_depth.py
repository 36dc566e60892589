"""Checks what recurrent depth claims, at a small scale on a CPU and for speed on a GPU.

    python benchmarks/recurrent_depth.py            a task that needs depth (two cores, 10 minutes)
    python benchmarks/recurrent_depth.py --tiny     a few steps, as a check
    python benchmarks/recurrent_depth.py speed      FLOP/s and memory of recurrent-0.5b on a GPU

depth: composing permutations. The first three tokens of a sample are labels. Each following group
of three tokens is a permutation: every token is the distance to one token of the group before. The
target of a token is the label at which its chain of pointers ends, so that group t needs t steps,
up to 6. Chains never meet, so that no token helps to guess the end of another one. A small
recurrent model, with one layer in each part, learns it with a mean recurrence of 4.
Claims, by means over seeds that were not used to choose the settings:

    accuracy rises by at least 20 points from 1 iteration to 4,
    it falls by at most 1 point at 8,
    exits of tokens whose prediction has settled, KL(p_{i-1} | p_i) < 5e-4, save at least 25 % of
    the steps of 8 iterations for at most 1 point.

Exits are computed from the predictions of all iterations; later tokens still see the states of
tokens that have left.

speed: steps of recurrent-0.5b with 16 iterations, and of the dense decoder of the same 8 layers.
Model FLOP/s with recomputed iterations must be at least 0.9 times those of the dense decoder, and
the peak memory of 64 iterations within 2 % of that of 16. Exit status 1 if a claim does not hold.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from job_pool import run_jobs
from script_parser import ScriptParser
from torch import Tensor

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models import MODEL_SIZES, Decoder, DecoderConfig, RecurrentDecoder
from ranvier.models.recurrence import LayerCalls, Recurrence
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import calls_of, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import forward_backward

# ---- a task that needs depth ---------------------------------------------------------------------

NUM_LABELS = 8
GROUP = 3
NUM_PERMUTATIONS = 6
SEQ_LEN = GROUP * (1 + NUM_PERMUTATIONS)
MEAN_RECURRENCE = 4
EXIT_THRESHOLD = 5e-4
RECURRENCES = (1, 2, 4, 8)
MIN_RISE, MAX_FALL, MIN_SAVED = 0.20, 0.01, 0.25
"""The claims: accuracy from 1 iteration to the mean, at twice the mean, and saved steps."""


@dataclass(frozen=True)
class DepthJob:
    """A model that learns to follow pointers."""

    seed: int
    steps: int = 800
    batch: int = 48
    lr: float = 3e-3

    @property
    def config(self) -> DecoderConfig:
        """A recurrent model with one layer in each part."""
        return replace(
            MODEL_SIZES["recurrent-tiny"],
            layers=3,
            prelude_layers=1,
            core_layers=1,
            coda_layers=1,
            embed=64,
            heads=4,
            kv_heads=4,
            head_dim=16,
            mlp=128,
            vocab=NUM_LABELS + 2 * GROUP - 1,
            max_seq=SEQ_LEN,
            rope_theta=100.0,
            embed_scale=8.0,
            mean_recurrence=MEAN_RECURRENCE,
            backprop_depth=4,
        )


@dataclass(frozen=True)
class DepthResult:
    """Accuracy of a trained model."""

    seed: int
    accuracy: dict[int, float]
    """By number of iterations."""
    exit_accuracy: float
    """With exits from the largest number of iterations."""
    mean_steps: float
    """Mean number of iterations of a token with exits."""
    seconds: float


def draw_pointers(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns tokens and the labels at the ends of their chains, `[b, s]`.

    Tokens below NUM_LABELS are labels; token NUM_LABELS + d - 1 points to d tokens before.
    """
    labels = torch.randint(0, NUM_LABELS, (samples, GROUP), generator=generator)
    tokens = [labels]
    ends = [labels]
    for _ in range(NUM_PERMUTATIONS):
        order = torch.rand(samples, GROUP, generator=generator).argsort(1)
        distances = torch.arange(GROUP) + GROUP - order
        tokens.append(NUM_LABELS + distances - 1)
        ends.append(ends[-1].gather(1, order))
    return torch.cat(tokens, 1), torch.cat(ends, 1)


def train_depth(job: DepthJob) -> DepthResult:
    """Trains a model and measures its accuracy by the number of iterations."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    torch.manual_seed(job.seed)
    model = RecurrentDecoder(job.config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            out = name.endswith(("attention.o.weight", "mlp.down.weight"))
            layers = 2 * job.config.unrolled_layers
            torch.nn.init.normal_(weight, std=job.config.init_std / (layers**0.5 if out else 1.0))
    model.initial_state.seed = job.seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(job.seed)
    for step in range(job.steps):
        warm = min((step + 1) / 100, 1.0)
        left = min((job.steps - step) / (0.3 * job.steps), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = job.lr * warm * left
        tokens, ends = draw_pointers(job.batch, generator)
        model.begin_step(job.seed, step)
        model.initial_state.samples = torch.arange(job.batch) + step * job.batch
        loss = model(tokens, ends) / ends.numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"seed {job.seed} step {step + 1}: loss {loss.item():.3f}", flush=True)
    return measure_depth(job, model, time.perf_counter() - began)


@torch.no_grad()
def measure_depth(job: DepthJob, model: RecurrentDecoder, seconds: float) -> DepthResult:
    """Returns the accuracy for each number of iterations, and with exits."""
    model.eval()
    # Samples of the measurement are none of the training samples.
    tokens, ends = draw_pointers(256, torch.Generator().manual_seed(job.seed + 10**6))
    model.initial_state.samples = torch.arange(256) + job.steps * job.batch
    logits = list(iterate_logits(model, tokens, max(RECURRENCES)))
    right = [(one.argmax(-1) == ends).double().mean().item() for one in logits]
    chosen, steps = exit_early(logits, EXIT_THRESHOLD)
    return DepthResult(
        job.seed,
        {n: right[n - 1] for n in RECURRENCES},
        (chosen.argmax(-1) == ends).double().mean().item(),
        steps.double().mean().item(),
        seconds,
    )


def iterate_logits(model: RecurrentDecoder, tokens: Tensor, iterations: int) -> Any:
    """Yields the logits after each iteration, `[b, s, v]`."""
    x, angles, documents = model.prepare_inputs(None, tokens, None, None)
    injection = model.run_prelude(x, angles, documents)
    state = model.initial_state(injection)
    for _ in range(iterations):
        state = model.iterate(state, injection, angles, documents)
        yield model.head(model.run_coda(state, angles, documents))


def exit_early(logits: Sequence[Tensor], threshold: float) -> tuple[Tensor, Tensor]:
    """Returns the logits with which each token leaves, and after how many iterations.

    A token leaves when KL(p_{i-1} | p_i) is below the threshold; p_0 is uniform.
    """
    before = torch.full_like(logits[0], -math.log(logits[0].shape[-1]))
    chosen = logits[-1].clone()
    steps = torch.full(logits[0].shape[:2], len(logits))
    is_inside = torch.ones(steps.shape, dtype=torch.bool)
    for i, one in enumerate(logits):
        now = F.log_softmax(one, -1)
        divergence = (before.exp() * (before - now)).sum(-1)
        leaves = is_inside & (divergence < threshold)
        chosen[leaves] = one[leaves]
        steps[leaves] = i + 1
        is_inside &= ~leaves
        before = now
    return chosen, steps


def check_depth(results: Sequence[DepthResult]) -> list[str]:
    """Returns the claims that do not hold for the means of the results."""
    mean = {n: statistics.mean(one.accuracy[n] for one in results) for n in RECURRENCES}
    exits = statistics.mean(one.exit_accuracy for one in results)
    steps = statistics.mean(one.mean_steps for one in results)
    most = max(RECURRENCES)
    failed = []
    if mean[MEAN_RECURRENCE] - mean[1] < MIN_RISE:
        failed.append(f"accuracy rises by {mean[MEAN_RECURRENCE] - mean[1]:.1%} from 1 iteration")
    if mean[MEAN_RECURRENCE] - mean[most] > MAX_FALL:
        failed.append(f"accuracy falls by {mean[MEAN_RECURRENCE] - mean[most]:.1%} at {most}")
    if steps > (1 - MIN_SAVED) * most:
        failed.append(f"exits save {1 - steps / most:.1%} of the steps")
    if mean[most] - exits > MAX_FALL:
        failed.append(f"exits cost {mean[most] - exits:.1%} of accuracy")
    return failed


def format_depth(results: Sequence[DepthResult]) -> str:
    """Returns a table of means and standard errors over seeds."""
    columns: dict[str, list[float]] = {
        f"{n} iterations": [one.accuracy[n] for one in results] for n in RECURRENCES
    }
    columns["exits"] = [one.exit_accuracy for one in results]
    lines = [f"{len(results)} seeds, {statistics.mean(one.seconds for one in results):.0f} s each"]
    for name, values in columns.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        lines.append(f"{name:14} accuracy {statistics.mean(values):7.2%} ± {error:.2%}")
    steps = statistics.mean(one.mean_steps for one in results)
    lines.append(f"mean iterations with exits: {steps:.2f} of {max(RECURRENCES)}")
    return "\n".join(lines)


def run_depth(seeds: Sequence[int], tiny: bool, out: Path | None) -> int:
    """Trains all seeds, two at a time, and checks the claims."""
    jobs = [DepthJob(seed, steps=3, batch=4) if tiny else DepthJob(seed) for seed in seeds]
    workers = min(len(jobs), os.cpu_count() or 1, 2)
    results = run_jobs(train_depth, [(job,) for job in jobs], processes=workers)
    print(format_depth(results))
    if out is not None:
        out.write_text("".join(json.dumps(asdict(one)) + "\n" for one in results))
    failed = check_depth(results)
    for line in failed:
        print(f"does not hold: {line}")
    return int(bool(failed) and not tiny)


# ---- speed on a GPU ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedJob:
    """Steps of a model on one GPU."""

    samples: int
    seq_len: int
    recompute: str
    steps: int = 5
    warmup_steps: int = 3


def measure_speed(
    model: Decoder, job: SpeedJob, recurrence: Recurrence | None
) -> tuple[float, float, int]:
    """Returns seconds per step, FLOP/s with recomputation, and the peak bytes of memory."""
    device = torch.device("cuda", 0)
    # There are no statistics to reset before.
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    plan = Plan(recompute=job.recompute, compile="on", compile_errors="raise")  # type: ignore[arg-type]
    parallel_model = parallelize(
        model, Grid({}), plan, dtype=torch.bfloat16, device=device, seq_len=job.seq_len
    )
    parallel = get_parallel_model(parallel_model)
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    shape = (job.samples, job.seq_len)
    tokens = torch.randint(0, model.config.vocab, shape, generator=generator)
    batch = Batch(tokens, tokens, samples=torch.arange(job.samples)).to(device)
    if recurrence is not None:
        assert isinstance(model, RecurrentDecoder)
        model.recurrence = recurrence
    spent = 0.0
    for step in range(job.warmup_steps + job.steps):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        forward_backward(parallel_model, [batch])
        optimizer.step()
        torch.cuda.synchronize(device)
        spent += (time.perf_counter() - began) * (step >= job.warmup_steps)
    seconds = spent / job.steps
    flops = count_flops(model, job)
    peak = torch.cuda.max_memory_allocated(device)
    return seconds, flops / seconds, peak


def count_flops(model: Decoder, job: SpeedJob) -> float:
    """Returns the FLOPs of a step: 3 per forward FLOP, and 1 more where a block is recomputed."""
    parallel = get_parallel_model(model)
    flow = ActivationShape(job.samples, job.seq_len, itemsize=2, statistics_itemsize=4)
    calls = parallel.layer_calls()
    total = 0.0
    for name, layer in parallel.layers.items():
        times: LayerCalls = calls_of(name, calls)
        # Selective recomputation repeats no matmul.
        again = job.recompute == "full" and bool(parallel.block_of(name))
        total += layer.flops(flow) * (times.total + (2 + again) * times.with_grad)
    return total


def run_speed(job: SpeedJob, out: Path | None) -> int:
    """Compares a recurrent with a dense model, and the memory of 16 and 64 iterations."""
    config = MODEL_SIZES["recurrent-0.5b"]
    dense = replace(
        config,
        prelude_layers=0,
        core_layers=0,
        coda_layers=0,
        mean_recurrence=0,
        backprop_depth=0,
    )
    rows: dict[str, tuple[float, float, int]] = {}
    # Dense before and after, so that a change of clocks shows.
    for name, iterations in (("dense", 0), ("16", 16), ("64", 64), ("dense again", 0)):
        with torch.device("meta"):
            if iterations:
                model: Decoder = RecurrentDecoder(config)
            else:
                model = Decoder(dense)
        recurrence = Recurrence.split(iterations, config.backprop_depth) if iterations else None
        rows[name] = measure_speed(model, job, recurrence)
        seconds, rate, peak = rows[name]
        print(f"{name:12} {seconds:7.3f} s  {rate / 1e12:6.1f} TFLOP/s  {peak / 2**30:6.2f} GiB")
        del model
    fastest = max(rows["dense"][1], rows["dense again"][1])
    ratio = rows["16"][1] / fastest
    growth = rows["64"][2] / rows["16"][2] - 1.0
    print(f"FLOP/s relative to dense: {ratio:.3f}; memory of 64 relative to 16: {growth:+.2%}")
    if out is not None:
        out.write_text(json.dumps({"job": asdict(job), "rows": rows}) + "\n")
    return int(ratio < 0.9 or abs(growth) > 0.02)


def main() -> int:
    """Runs one of the two benchmarks."""
    parser = ScriptParser(
        __doc__,
        smoke="--tiny --seeds 0 --out {folder}/rows.json",
        skipped="mode speed, which needs a GPU",
    )
    parser.add_argument("mode", nargs="?", choices=("depth", "speed"), default="depth")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiny", action="store_true", help="a few steps, as a check")
    parser.add_argument("--samples", type=int, default=8, help="samples per step (speed)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per sample (speed)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="selective")
    parser.add_argument("--out", type=Path, help="file for the results in JSON")
    options = parser.parse_args()
    if options.mode == "depth":
        return run_depth(options.seeds, options.tiny, options.out)
    return run_speed(SpeedJob(options.samples, options.seq_len, options.recompute), options.out)


if __name__ == "__main__":
    raise SystemExit(main())

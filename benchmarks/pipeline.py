"""Compares pipelines with `torch.distributed.pipelining`, and the simulator with both.

Both run the same layers with the same weights and messages in the same processes (Gloo, one thread
each) and alternate: after a warm-up each repetition takes one step of every contestant in a
changing order, and ratios are medians over repetitions. Two ranks multiply matrices; four ranks,
more than the cores of a small machine, sleep for as long as the work would take.

    real   a virtual stage is a stack of `relu(x Wᵀ)`; jitter varies the number of layers per
           micro-batch (never the size of messages), forward and backward alike
    sleep  forward sleeps f, backward f for the input gradient and f for the weight gradient; jitter
           varies each of the three independently

jitter: factors exp(N(-σ²/2, σ)), σ = 0.5, drawn from repetition, virtual stage, micro-batch and
kind, the same for all. slow: rank 1 has 1.5 times the work. Weight gradients can be deferred on
both sides: by the step context in Ranvier, by the hook `dw_builder` in torch's ZBV. So the two
sides differ only in the choice of jobs, sends and receives. Chunks are compared with equally many
chunks. The policies of Ranvier are those that a run would choose: `message_driven` may split
backward, as zero-bubble and ZBV do; `=mem` keeps no more activations than 1F1B (interleaved). At
equal memory each of torch's schedules is compared with the fastest policy that keeps no more, in
activations of a whole stage.

The simulator gets the median time of each kind of job on each virtual stage, as measured in these
runs, times the random factors, and the time of a message.

With --nccl no time is measured: all ranks share the first GPU over NCCL, so their times mean
nothing. Each policy takes steps, and its choices on each stage are compared with its choices in the
simulator for the same message arrivals; every message must arrive once, in order. --rendezvous does
the same on the CPU: over Gloo, with rendezvous transfers as over NCCL.

    python benchmarks/pipeline.py --json pipeline.json
    python benchmarks/pipeline.py --nccl
    python benchmarks/pipeline.py --quick
    python benchmarks/pipeline.py --ranks 4 --case jitter --micros 16 --repeat 31
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from script_parser import ScriptParser
from torch import Tensor, distributed, nn

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo, die_with_parent, init_process_group, local_process_infos
from ranvier.nn.layer import StepContext
from ranvier.pipeline.executor import PipelineExecutor
from ranvier.pipeline.partition import ModelStage, PipelineConfig
from ranvier.pipeline.policy import FixedSchedule, Job, PipelineShape, SchedulingPolicy
from ranvier.pipeline.policy_search import choose_policy
from ranvier.pipeline.schedules import peak_activations
from ranvier.pipeline.simulator import (
    JobTimes,
    Simulation,
    draw_job_seconds,
    link_seconds,
    replay_choices,
)
from ranvier.pipeline.stage import create_stage_groups
from ranvier.pipeline.step import MicroBatch

SIGMA, SLOW = 0.5, 1.5
CASES = ("balanced", "jitter", "slow")
KINDS = "FBW"
TORCH = {
    "torch GPipe": ("ScheduleGPipe", 1),
    "torch 1F1B": ("Schedule1F1B", 1),
    "torch Interleaved": ("ScheduleInterleaved1F1B", 2),
    "torch ZBV": ("ScheduleZBVZeroBubble", 2),
}
"""Class in `torch.distributed.pipelining` and chunks of each of torch's schedules."""
OURS = {
    1: ("message_driven", "message_driven =mem", "1f1b", "gpipe", "zero-bubble"),
    2: ("message_driven", "message_driven =mem", "interleaved", "zero-bubble"),
}
WARM = 2
"""Number of steps of every contestant before any is measured."""
LEAST = {("balanced", 2): 0.97, ("balanced", 4): 0.97, ("jitter", 2): 1.0, ("jitter", 4): 1.05}
"""Minimum speed relative to the best schedule of torch."""


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = ScriptParser(
        __doc__,
        smoke="--quick --repeat 2 --layers 2 --ranks 2 --case balanced --json {folder}/rows.json",
    )
    add = parser.add_argument
    add("--ranks", type=int, action="append", choices=(2, 4), help="default: 2 and 4")
    add("--case", action="append", choices=CASES, help="default: all")
    add("--micros", type=int, action="append", help="micro-batches per step (default: 8, 16)")
    add("--repeat", type=int, default=9, help="repetitions; twice as many with jitter")
    add("--ms", type=float, default=10.0, help="milliseconds of a stage's forward, if it sleeps")
    add("--layers", type=int, default=8, help="layers per stage, if it multiplies")
    add("--width", type=int, default=512, help="features")
    add("--rows", type=int, default=64, help="rows per micro-batch")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    add("--quick", action="store_true", help="a short run, whose verdicts mean little")
    add(
        "--nccl", action="store_true", help="instead check the order of jobs and messages over NCCL"
    )
    add("--rendezvous", action="store_true", help="instead do the same check over Gloo")
    asked = parser.parse_args()
    asked.ranks, asked.case = asked.ranks or [2, 4], asked.case or [*CASES]
    asked.micros = asked.micros or ([4] if asked.quick else [8, 16])
    if asked.quick:
        asked.ms, asked.rows, asked.width = 4.0, 32, 256
        asked.repeat = min(asked.repeat, 3)
    return asked


@dataclass(frozen=True)
class Setting:
    """A configuration to measure."""

    ranks: int
    case: str
    micros: int
    repeat: int
    ms: float
    layers: int
    width: int
    rows: int

    @property
    def real(self) -> bool:
        """Whether matrices are multiplied."""
        return self.ranks == 2

    def __str__(self) -> str:
        what = "real" if self.real else f"sleep, forward {self.ms:g} ms"
        return f"{self.ranks} ranks ({what}), {self.micros} micro-batches, {self.case}"

    @staticmethod
    def all(asked: argparse.Namespace) -> list[Setting]:
        """Returns all settings, in the order of measurement."""
        return [
            Setting(
                ranks=ranks,
                case=case,
                micros=micros,
                repeat=asked.repeat * (2 if case == "jitter" else 1),
                ms=asked.ms,
                layers=asked.layers,
                width=asked.width,
                rows=asked.rows,
            )
            for ranks in asked.ranks
            for case in asked.case
            for micros in asked.micros
        ]


# ---- work ---------------------------------------------------------------------------------


@dataclass
class Effort:
    """The work of each job of a repetition, as a factor."""

    setting: Setting
    chunks: int
    seed: int = -1
    """Seed of the repetition; -1 if all jobs are equal."""

    def factor(self, rank: int, virtual: int, micro: int, kind: str) -> float:
        """Returns the factor of a job; in whole layers if it multiplies."""
        case, real = self.setting.case, self.setting.real
        factor = SLOW if case == "slow" and rank == 1 else 1.0
        if case == "jitter" and self.seed >= 0:
            number = "F" if real else kind
            key = ((self.seed * 64 + virtual) * 1024 + micro) * 4 + KINDS.index(number)
            factor = math.exp(random.Random(key).gauss(-SIGMA * SIGMA / 2, SIGMA))
        if real:
            base = self.setting.layers // self.chunks
            return max(1, round(base * factor)) / base
        return factor


class Nap(torch.autograd.Function):
    """Work that is replaced by sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: Block, micro: int) -> Tensor:
        """Sleeps."""
        ctx.block, ctx.micro = block, micro
        time.sleep(block.seconds(micro, "F"))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None, None, None]:
        """Sleeps for dx, and now or later for the weights."""
        block: Block = ctx.block
        time.sleep(block.seconds(ctx.micro, "B"))
        block.moment.run_or_defer(partial(time.sleep, block.seconds(ctx.micro, "W")))
        return dys[0].clone(), None, None, None


class Product(torch.autograd.Function):
    """y = x Wᵀ with a deferrable dW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, moment: StepContext) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.moment = weight, moment
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, None, None]:
        """Returns the gradient of x, and computes dW now or later."""
        (x,), weight, dy = ctx.saved_tensors, ctx.weight, dys[0]

        def deliver() -> None:
            grad = dy.T @ x
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)

        dx = dy @ weight if ctx.needs_input_grad[0] else None
        ctx.moment.run_or_defer(deliver)
        return dx, None, None


class Block(nn.Module):
    """A virtual stage."""

    def __init__(self, effort: Effort, moment: StepContext, rank: int, virtual: int) -> None:
        super().__init__()
        self.effort, self.moment, self.rank, self.virtual = effort, moment, rank, virtual
        self.calls = 0
        """Number of forward passes in this step: micro-batches are in order."""
        setting, made = effort.setting, torch.Generator().manual_seed(virtual)
        self.base = setting.layers // effort.chunks
        width, count = setting.width, (8 * self.base if setting.real else 1)
        size = (width, width) if setting.real else (1,)
        scale = math.sqrt(2 / width)
        self.weights = nn.ParameterList(
            torch.randn(size, generator=made) * scale for _ in range(count)
        )

    def amount(self, micro: int, kind: str) -> float:
        """Returns the factor of a job."""
        return self.effort.factor(self.rank, self.virtual, micro, kind)

    def seconds(self, micro: int, kind: str) -> float:
        """Returns the seconds of a job that sleeps."""
        setting = self.effort.setting
        return setting.ms / 1e3 / self.effort.chunks * self.amount(micro, kind)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the next micro-batch."""
        micro = self.calls % self.effort.setting.micros
        self.calls += 1
        if not self.effort.setting.real:
            y: Tensor = Nap.apply(x, self.weights[0], self, micro)
            return y
        for i in range(round(self.base * self.amount(micro, "F"))):
            x = torch.relu(Product.apply(x, self.weights[i % len(self.weights)], self.moment))
        return x


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """Returns the loss of a micro-batch."""
    return (y - target).square().mean()


# ---- contestants ----------------------------------------------------------------------------


@dataclass
class Contestant:
    """A pipeline that takes steps."""

    name: str
    chunks: int
    effort: Effort
    blocks: dict[int, Block]
    """Blocks by virtual stage."""
    take: Callable[[], list[Tensor]]
    """Takes a step; returns losses on the last virtual stage."""
    policy: SchedulingPolicy | None = None
    """Executor of Ranvier; None for torch."""
    runtime: PipelineExecutor | None = None
    log: list[int] = field(default_factory=list)
    """Activations that torch's stages began to keep (1) and freed (-1)."""
    steps: list[dict[str, Any]] = field(default_factory=list)

    def step(self, seed: int) -> None:
        """Takes and records one step after a barrier."""
        self.effort.seed = seed
        self.log.clear()
        for block in self.blocks.values():
            block.calls = 0
            for weight in block.weights:
                weight.grad = None
        distributed.barrier()
        start = time.perf_counter()
        losses = self.take()
        stop = time.perf_counter()
        jobs = [] if self.runtime is None else jobs_of(self.runtime)
        last = "W" if self.policy is not None and self.policy.split_backward else "B"
        ours = [(job["kind"] == "F") - (job["kind"] == last) for job in jobs]
        self.steps.append(
            {
                "seed": seed,
                "start": start,
                "stop": stop,
                "jobs": jobs,
                "peak": max(itertools.accumulate(ours or self.log)),
                "loss": sum(float(loss) for loss in losses),
            }
        )


def jobs_of(runtime: PipelineExecutor) -> list[dict[str, Any]]:
    """Returns the jobs of the last step; the choice of a job is part of it, waiting for it is
    not.
    """
    jobs, before = [], None
    for one in runtime.job_records:
        if one.kind in KINDS:
            jobs.append({**asdict(one), "start": one.start if before is None else before})
        before = one.stop
    return jobs


@dataclass
class Field:
    """Everything that the contestants of a setting share on this rank."""

    setting: Setting
    grid: Grid
    rank: int
    device: torch.device

    def __post_init__(self) -> None:
        setting, made = self.setting, torch.Generator().manual_seed(99)
        shape = (setting.micros * setting.rows, setting.width)
        self.inputs = torch.randn(shape, generator=made).to(self.device)
        self.targets = torch.randn(shape, generator=made).to(self.device)

    def ours(self, chunks: int) -> Callable[[str, SchedulingPolicy], Contestant]:
        """Returns a function that makes policies of Ranvier with this many chunks and one
        executor.
        """
        setting, moment, effort = self.setting, StepContext(), Effort(self.setting, chunks)
        mine = [c * setting.ranks + self.rank for c in range(chunks)]
        blocks = {v: Block(effort, moment, self.rank, v).to(self.device) for v in mine}
        final = chunks * setting.ranks - 1

        def run(x: Tensor | None, parts: slice, tokens: Tensor, targets: Tensor) -> Tensor:
            y: Tensor = blocks[parts.start](tokens if x is None else x)
            return loss_of(y, targets) if parts.start == final else y

        stage = ModelStage(self.rank, setting.ranks, tuple(slice(v, v + 1) for v in mine), run)
        # Without buckets: these weights are neither gathered nor reduced.
        scheduler = BucketScheduler(self.grid, overlap=(), dtype=torch.float32)
        runtime = PipelineExecutor(
            self.grid, stage, scheduler, moment, self.device, record_times=True
        )
        micros = [
            MicroBatch({"tokens": x, "targets": y})
            for x, y in zip(
                self.inputs.split(setting.rows), self.targets.split(setting.rows), strict=True
            )
        ]

        def contestant(name: str, policy: SchedulingPolicy) -> Contestant:
            def take() -> list[Tensor]:
                losses: list[Tensor] = []
                one = torch.ones((), device=self.device)
                runtime.forward_backward(micros, policy, scored=losses.append, factor=one)
                return losses

            return Contestant(name, chunks, effort, blocks, take, policy, runtime)

        return contestant

    def torchs(self, name: str) -> Contestant:
        """Returns one of torch's schedules."""
        from torch.distributed import pipelining
        from torch_stages import RecordingStage

        (kind, chunks), setting = TORCH[name], self.setting
        is_zbv = kind == "ScheduleZBVZeroBubble"
        count = setting.ranks * chunks
        mine = [c * setting.ranks + self.rank for c in range(chunks)]
        if is_zbv:
            mine = [self.rank, count - 1 - self.rank]
        moment, effort, log = StepContext(), Effort(setting, chunks), list[int]()
        blocks = {v: Block(effort, moment, self.rank, v) for v in mine}
        if is_zbv:
            moment.deferred_weight_grads = []
        example = torch.empty(setting.rows, setting.width, requires_grad=True)
        stages = [
            RecordingStage(
                block,
                v,
                count,
                torch.device("cpu"),
                input_args=example if v else example.detach(),
                output_args=example,
                dw_builder=partial(waiting, moment)
                if moment.deferred_weight_grads is not None
                else None,
            )
            for v, block in blocks.items()
        ]
        for stage in stages:
            stage.log = log
        schedule: Any = getattr(pipelining, kind)(
            stages if chunks > 1 else stages[0],
            setting.micros,
            loss_fn=loss_of,
            scale_grads=False,
        )
        first, final = 0 in mine, count - 1 in mine

        def take() -> list[Tensor]:
            losses: list[Tensor] = []
            schedule.step(
                *([self.inputs] if first else []),
                target=self.targets if final else None,
                losses=losses if final else None,
                return_outputs=False,
            )
            return [loss.detach() for loss in losses]

        return Contestant(name, chunks, effort, blocks, take, log=log)


def waiting(moment: StepContext) -> Callable[[], None]:
    """Returns the deferred weight gradients of the last backward, for torch to run later."""
    works, moment.deferred_weight_grads = moment.deferred_weight_grads or [], []

    @torch.no_grad()
    def run() -> None:
        for work in works:
            work()

    return run


# ---- a setting --------------------------------------------------------------------------------


def everyone(value: Any) -> list[Any]:
    """Returns the values of all ranks."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def told(value: Any) -> Any:
    """Returns the value of rank 0."""
    box = [value]
    distributed.broadcast_object_list(box)
    return box[0]


def measured(setting: Setting, grid: Grid, rank: int) -> dict[str, Any]:
    """Measures all steps of all contestants on all ranks."""
    field = Field(setting, grid, rank, torch.device("cpu"))
    found: list[Contestant] = []
    known: dict[int, JobTimes] = {}
    for chunks, names in OURS.items():
        more, known[chunks] = ours(field, chunks, names)
        found += more
    found += [field.torchs(name) for name in TORCH]
    for one in found:
        for _ in range(WARM):
            one.step(-1)
        one.steps.clear()
    gc.collect()
    gc.disable()
    for seed in range(setting.repeat):
        for i in range(len(found)):
            found[(i + seed) % len(found)].step(seed)
        gc.collect()
    gc.enable()
    rows = everyone([one.steps for one in found])
    return {
        "setting": asdict(setting),
        "known": known,
        "contestants": [
            {
                "name": one.name,
                "chunks": one.chunks,
                "policy": one.policy,
                "steps": [row[i] for row in rows],  # of each rank
            }
            for i, one in enumerate(found)
        ],
    }


def ours(field: Field, chunks: int, names: Sequence[str]) -> tuple[list[Contestant], JobTimes]:
    """Returns the policies of Ranvier with this many chunks, and the job times used to choose
    them.
    """
    setting = field.setting
    make = field.ours(chunks)
    shape = PipelineShape(setting.ranks, setting.micros, chunks)
    usual = "1f1b" if chunks == 1 else "interleaved"
    zero = JobTimes((1.0,) * setting.ranks * chunks, (1.0,) * setting.ranks * chunks)
    tried = [make(name, choose_policy(name, shape, zero)) for name in (usual, "zero-bubble")]
    for one in tried:
        for _ in range(WARM + 5):
            one.step(-1)
        one.steps = one.steps[WARM:]
    runs = [(one.policy, everyone(one.steps)) for one in tried]
    effort = Effort(setting, chunks)
    times = times_of(effort, runs)
    if setting.case == "jitter":
        times = replace(times, jitter=SIGMA)
    # as a run does by default
    expected = replace(times, jitter=max(times.jitter, Plan().stage_time_jitter))
    order = tried[0].policy
    assert isinstance(order, FixedSchedule)
    policies: dict[str, SchedulingPolicy] = {}
    if field.rank == 0:
        for name in names:
            base, _, extra = name.partition(" ")
            most = max(peak_activations(order)) if "=mem" in extra else 0
            policies[name] = choose_policy(base, shape, expected, limit=most, splits=True)
    policies = told(policies)
    return [make(name, policy) for name, policy in policies.items()], times


def times_of(
    effort: Effort, runs: Sequence[tuple[SchedulingPolicy | None, Sequence[Any]]]
) -> JobTimes:
    """Returns the median time of each kind of job on each virtual stage, per unit of work, and of a
    message.

    runs: a policy, and the steps of each rank.
    """
    setting, seen = effort.setting, defaultdict[tuple[str, int], list[float]](list)
    delays: list[float] = []
    for policy, ranks in runs:
        split = policy is not None and policy.split_backward
        for rank, steps in enumerate(ranks):
            for step in steps:
                at = replace(effort, seed=step["seed"])
                for job in step["jobs"]:
                    virtual = job["chunk"] * setting.ranks + rank
                    kind = job["kind"] if split or job["kind"] != "B" else "whole"
                    if kind == "whole" and not setting.real:
                        continue  # two amounts of work in one
                    unit = "B" if kind == "whole" else kind
                    amount = at.factor(rank, virtual, job["micro"], unit) / slow(setting, rank)
                    seen[kind, virtual].append((job["stop"] - job["start"]) / amount)
        delays += links_of(ranks, setting)
    size = setting.ranks * effort.chunks
    row = {kind: tuple(median(seen[kind, v]) for v in range(size)) for kind in KINDS}
    link = max(0.0, median(delays)) if delays else 0.0
    return JobTimes(row["F"], row["B"], row["W"], link=link)


def slow(setting: Setting, rank: int) -> float:
    """Returns the factor on all jobs of a rank: it belongs to their time, not to the jitter."""
    return (
        Effort(replace(setting, case="slow"), 1).factor(rank, 0, 0, "F")
        if (setting.case == "slow")
        else 1.0
    )


def links_of(ranks: Sequence[Any], setting: Setting) -> Iterator[float]:
    """Yields the time from the end of a job to the start of the next, if the next rank was idle.

    The clocks of one machine agree.
    """
    for steps in zip(*ranks, strict=True):
        ends = {
            (job["kind"], job["chunk"] * setting.ranks + rank, job["micro"]): job["stop"]
            for rank, step in enumerate(steps)
            for job in step["jobs"]
        }
        for rank, step in enumerate(steps):
            idle = step["start"]
            for job in step["jobs"]:
                away = {"F": -1, "B": 1}.get(job["kind"], 0)
                virtual = job["chunk"] * setting.ranks + rank + away
                sent = ends.get((job["kind"], virtual, job["micro"]))
                if away and sent is not None and idle < sent:
                    yield job["start"] - sent
                idle = job["stop"]


# ---- results ------------------------------------------------------------------------------------


@dataclass
class Row:
    """A contestant in a setting."""

    name: str
    chunks: int
    policy: str
    seconds: list[float]
    """Seconds of each repetition: from the last rank's start to the last rank's end."""
    peak: list[int]
    """Peak activations of each stage, counted per chunk."""
    loss: float
    predicted: list[float]
    """Seconds predicted by the simulator, for each repetition."""

    @property
    def ours(self) -> bool:
        """Whether it is a policy of Ranvier."""
        return not self.name.startswith("torch")

    @property
    def middle(self) -> float:
        """Median seconds."""
        return median(self.seconds)


def rows_of(result: dict[str, Any]) -> tuple[list[Row], dict[int, JobTimes]]:
    """Returns the contestants of a setting, and the times of jobs by number of chunks."""
    setting = Setting(**result["setting"])
    contestants, times, rows = result["contestants"], dict[int, JobTimes](), list[Row]()
    for chunks in OURS:
        runs = [(c["policy"], c["steps"]) for c in contestants if c["chunks"] == chunks]
        runs = [(policy, steps) for policy, steps in runs if policy is not None]
        times[chunks] = times_of(Effort(setting, chunks), runs)
    for one in contestants:
        turns = list(zip(*one["steps"], strict=True))  # by repetition, of each rank
        policy, chunks = one["policy"], one["chunks"]
        predicted = (
            [prediction(setting, chunks, policy, times[chunks], turn[0]["seed"]) for turn in turns]
            if policy is not None
            else []
        )
        rows.append(
            Row(
                name=one["name"],
                chunks=chunks,
                policy="" if policy is None else str(policy),
                seconds=[
                    max(s["stop"] for s in turn) - max(s["start"] for s in turn) for turn in turns
                ],
                peak=[max(step["peak"] for step in steps) for steps in one["steps"]],
                loss=sum(step["loss"] for step in turns[0]),
                predicted=predicted,
            )
        )
    return rows, times


def prediction(
    setting: Setting, chunks: int, policy: SchedulingPolicy, times: JobTimes, seed: int
) -> float:
    """Returns the seconds of a repetition, as predicted by the simulator."""
    effort = Effort(setting, chunks, seed)
    shape = PipelineShape(setting.ranks, setting.micros, chunks, policy.split_backward)
    table = draw_job_seconds(replace(shape, split_backward=True), times)
    for rank, places in enumerate(table):
        for place, row in enumerate(places):
            kind, virtual = KINDS[place // chunks], place % chunks * setting.ranks + rank
            for micro in range(setting.micros):
                row[micro] *= effort.factor(rank, virtual, micro, kind) / slow(setting, rank)
        if not policy.split_backward:
            for place in range(chunks, 2 * chunks):
                weights = places[place + chunks]
                places[place] = [b + w for b, w in zip(places[place], weights, strict=True)]
            del places[2 * chunks :]
    play = Simulation(shape, policy, table, link_seconds(shape, times))
    play.run()
    return play.seconds


def bound(setting: Setting, chunks: int, times: JobTimes) -> float:
    """Returns the least seconds of a step: for each stage its work, and the work before and after
    it.

    `max over k of M·(work of a micro-batch on stage k) + forward and backward of the stages before
    k`
    """
    whole = [f + b + w for f, b, w in zip(times.forward, times.backward, times.weight, strict=True)]
    return max(
        setting.micros * sum(whole[k :: setting.ranks]) + sum(whole[:k])
        for k in range(setting.ranks)
    )


def ratio(peer: Row, ours: Row) -> float:
    """Returns the speed of Ranvier relative to a peer: median over repetitions."""
    return median(a / b for a, b in zip(peer.seconds, ours.seconds, strict=True))


@dataclass
class Verdict:
    """A requirement and the measured value."""

    text: str
    value: float
    limit: float
    most: bool = False
    """Whether the limit is a maximum; otherwise it is a minimum."""

    @property
    def good(self) -> bool:
        """Whether the requirement is met."""
        return self.value <= self.limit if self.most else self.value >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.most else ">="
        return (
            f"{'PASS' if self.good else 'FAIL'}  {self.text}: {self.value:.3f} {sign} "
            f"{self.limit:g}"
        )


def verdicts(setting: Setting, rows: Sequence[Row], times: dict[int, JobTimes]) -> list[Verdict]:
    """Returns the verdicts on the requirements of a setting."""
    found, by = [], {(row.name, row.chunks): row for row in rows}
    if least := LEAST.get((setting.case, setting.ranks)):
        for chunks in OURS:
            peers = [row for row in rows if not row.ours and row.chunks == chunks]
            best, own = min(peers, key=lambda r: r.middle), by["message_driven", chunks]
            text = f"{own.name} relative to {best.name}, {chunks} chunks"
            found.append(Verdict(text, ratio(best, own), least))
        peers, mine = ([r for r in rows if r.ours is own] for own in (False, True))
        best, own = min(peers, key=lambda r: r.middle), min(mine, key=lambda r: r.middle)
        found.append(
            Verdict(
                f"best of all: {own.name} ({own.chunks}) relative to {best.name} ({best.chunks})",
                best.middle / own.middle,
                least,
            )
        )
    if setting.case == "slow":
        for chunks in OURS:
            value = by["message_driven", chunks].middle / bound(setting, chunks, times[chunks])
            text = f"message_driven relative to the bound, {chunks} chunks"
            found.append(Verdict(text, value, 1.05, most=True))
    mine = [row for row in rows if row.ours]
    off = max(mine, key=lambda r: abs(median(r.predicted) / r.middle - 1))
    found.append(
        Verdict(
            f"worst prediction ({off.name}, {off.chunks} chunks)",
            abs(median(off.predicted) / off.middle - 1),
            0.10,
            most=True,
        )
    )
    return [*found, Verdict("pairs ordered differently than predicted", wrong(mine), 0, most=True)]


def wrong(rows: Sequence[Row]) -> int:
    """Returns the number of pairs that differ by more than 5% in the opposite order of
    predictions.
    """
    count = 0
    for a, b in itertools.combinations(rows, 2):
        real, predicted = ratio(a, b), median(a.predicted) / median(b.predicted)
        if max(real, 1 / real) > 1.05 and (real > 1) != (predicted > 1):
            print(
                f"      {a.name} ({a.chunks}) / {b.name} ({b.chunks}): {real:.3f}, predicted "
                f"{predicted:.3f}"
            )
            count += 1
    return count


def refuse_other_models(setting: Setting, rows: Sequence[Row]) -> None:
    """Checks that losses agree between contestants with equally many chunks.

    Not with a slow rank and several chunks: ZBV puts other virtual stages there.
    """
    for chunks in OURS if setting.case != "slow" else (1,):
        losses = {row.name: row.loss for row in rows if row.chunks == chunks}
        low, high = min(losses.values()), max(losses.values())
        assert high - low <= 1e-5 * high, f"not the same model: {losses}"


def equal_memory(rows: Sequence[Row]) -> list[str]:
    """Returns torch's schedules compared with the fastest policy that keeps no more activations."""
    found = []
    for peer in rows:
        if peer.ours:
            continue
        room = max(peer.peak) / peer.chunks
        mine = [r for r in rows if r.ours and max(r.peak) / r.chunks <= room]
        if mine:
            best = min(mine, key=lambda r: r.middle)
            found.append(
                f"info  within the {room:g} activations of {peer.name}: {best.name} "
                f"({best.chunks} chunks) is {ratio(peer, best):.3f}x as fast"
            )
    return found


def words(times: JobTimes) -> str:
    """Returns means over virtual stages as text."""
    rows = zip(KINDS, (times.forward, times.backward, times.weight), strict=True)
    jobs = " ".join(f"{kind} {statistics.fmean(row) * 1e3:.2f}" for kind, row in rows)
    assert isinstance(times.link, float)
    return f"jobs {jobs} ms, message {times.link * 1e3:.2f} ms"


def show(
    setting: Setting, rows: Sequence[Row], times: dict[int, JobTimes], known: dict[int, JobTimes]
) -> None:
    """Prints the table of a setting."""
    print(f"\n{setting}, {setting.repeat} repetitions")
    for chunks, one in times.items():
        print(f"  {chunks} chunks: {words(one)}, bound {bound(setting, chunks, one) * 1e3:.1f} ms")
        print(f"            (when policies were chosen: {words(known[chunks])})")
    print(
        "  name               chunks     ms  (quartiles)     torch's best  predicted  activations"
    )
    for row in sorted(rows, key=lambda r: (r.chunks, r.middle)):
        peers = [r for r in rows if not r.ours and r.chunks == row.chunks]
        best = min(peers, key=lambda r: r.middle)
        low, high = (statistics.quantiles(row.seconds, n=4)[i] * 1e3 for i in (0, 2))
        predicted = f"{median(row.predicted) / row.middle:9.3f}" if row.ours else " " * 9
        print(
            f"  {row.name:<18} {row.chunks:>6} {row.middle * 1e3:7.1f}  ({low:6.1f}-{high:6.1f})"
            f"  {ratio(best, row):12.3f}  {predicted}  {row.peak}  {row.policy}"
        )


def serve(me: ProcessInfo, settings: Sequence[Setting], pipe: Any) -> None:
    """Runs a rank."""
    die_with_parent()
    torch.set_num_threads(1)
    init_process_group(me, backend="gloo", timeout_seconds=300.0)
    grid = Grid({"pipe": me.world_size}, connected=True, timeout_seconds=300.0)
    create_stage_groups(grid, PipelineConfig(chunks=max(OURS)))
    for setting in settings:
        result = measured(setting, grid, me.rank)
        if me.rank == 0:
            pipe.send(result)
    distributed.barrier()  # ended by the parent once it has all


def results(ranks: int, settings: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Yields the results of each setting, from processes that are started for all of them."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    workers = [
        context.Process(target=serve, args=(me, settings, there if me.rank == 0 else None))
        for me in local_process_infos(ranks)
    ]
    for worker in workers:
        worker.start()
    there.close()
    try:
        for _ in settings:
            yield here.recv()
    finally:
        for worker in workers:
            worker.kill()


# ---- the order of jobs and messages ----------------------------------------------------------


@dataclass(frozen=True)
class OrderRow:
    """Choices of a policy on one stage in a few steps, compared with the simulator."""

    policy: str
    chunks: int
    stage: int
    jobs: int
    messages: int
    differences: tuple[str, ...]


def compare_orders(
    name: str,
    policy: SchedulingPolicy,
    runtime: PipelineExecutor,
    shape: PipelineShape,
    differences: list[str],
) -> OrderRow:
    """Compares the last step of an executor with the simulator."""
    stage, kinds = runtime.stage.index, {"forward": "F", "backward": "B"}
    arrivals = [Job(kinds[way], number, chunk) for (way, chunk), number, _ in runtime.arrival_log]  # type: ignore[arg-type]
    for way, chunk in {key for key, _, _ in runtime.arrival_log}:
        numbers = [number for key, number, _ in runtime.arrival_log if key == (way, chunk)]
        if numbers != list(range(shape.micro_batches)):
            differences.append(f"messages {way} of chunk {chunk} arrived as {numbers}")
    taken = [job for job, _ in runtime.policy_choices]
    chosen = replay_choices(
        shape, policy, stage, arrivals, [seen for _, seen in runtime.policy_choices]
    )
    for number, (real, simulated) in enumerate(zip(taken, chosen, strict=False)):
        if real != simulated:
            differences.append(f"choice {number}: {real}, in the simulator {simulated}")
    done = [Job(one.kind, one.micro, one.chunk) for one in runtime.job_records if one.kind in KINDS]  # type: ignore[arg-type]
    if done != taken or len(chosen) != len(taken):
        differences.append(f"{len(done)} jobs done, {len(taken)} chosen, {len(chosen)} simulated")
    return OrderRow(name, shape.chunks, stage, len(taken), len(arrivals), tuple(differences))


def serve_orders(me: ProcessInfo, setting: Setting, backend: str, pipe: Any) -> None:
    """Runs a rank that takes steps of all policies."""
    die_with_parent()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    init_process_group(me, backend=backend, timeout_seconds=120.0, share_gpu=True)
    grid = Grid({"pipe": setting.ranks}, connected=True, timeout_seconds=120.0, rendezvous=True)
    create_stage_groups(grid, PipelineConfig(chunks=max(OURS)))
    field = Field(setting, grid, me.rank, device)
    for chunks, names in OURS.items():
        make, shape = field.ours(chunks), PipelineShape(setting.ranks, setting.micros, chunks)
        even = JobTimes(
            (1.0,) * setting.ranks * chunks, (2.0,) * setting.ranks * chunks, jitter=0.1
        )
        for name in names:
            base, _, extra = name.partition(" ")
            limit = setting.ranks if "=mem" in extra else 0
            policy = choose_policy(base, shape, even, limit=limit, splits=True)
            one = make(name, policy)
            assert one.runtime is not None
            for seed in range(setting.repeat):
                one.effort.seed = seed
                for block in one.blocks.values():
                    block.calls = 0
                    for weight in block.weights:
                        weight.grad = None
                one.take()
                pipe.send(compare_orders(name, policy, one.runtime, shape, []))
    pipe.send(None)


def check_orders(asked: argparse.Namespace) -> int:
    """Prints for each policy whether all stages chose as in the simulator."""
    backend, bad = "nccl" if asked.nccl else "gloo", 0
    for ranks in asked.ranks:
        setting = Setting.all(argparse.Namespace(**{**vars(asked), "ranks": [ranks]}))[0]
        setting = replace(setting, case="jitter", repeat=3)
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(ranks)]
        workers = [
            context.Process(target=serve_orders, args=(me, setting, backend, there))
            for me, (_, there) in zip(local_process_infos(ranks), pipes, strict=True)
        ]
        for worker in workers:
            worker.start()
        rows = list[OrderRow]()
        try:
            for here, _ in pipes:
                while here.poll(300.0) and (row := here.recv()) is not None:
                    rows.append(row)
        finally:
            for worker in workers:
                worker.kill()
        print(f"\n{ranks} stages over {backend}, {setting.micros} micro-batches")
        print("  policy             chunks   jobs  messages  as in the simulator")
        for name, chunks in dict.fromkeys((row.policy, row.chunks) for row in rows):
            some = [row for row in rows if (row.policy, row.chunks) == (name, chunks)]
            wrong = [line for row in some for line in row.differences]
            jobs, messages = (
                sum(getattr(row, what) for row in some) for what in ("jobs", "messages")
            )
            verdict = "all" if not wrong else f"NOT: {wrong[0]}"
            print(f"  {name:<18} {chunks:>6} {jobs:>6} {messages:>9}  {verdict}", flush=True)
            bad += bool(wrong)
        wanted = ranks * setting.repeat * sum(map(len, OURS.values()))
        if len(rows) != wanted:
            print(f"  {wanted - len(rows)} of {wanted} steps are missing")
            bad += 1
    print(f"\n{'FAIL' if bad else 'PASS'}: {bad} policies chose differently")
    return 1 if bad else 0


def commit() -> str:
    """Returns the commit of the working tree."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Measures, prints and judges."""
    asked = settings()
    if asked.nccl or asked.rendezvous:
        return check_orders(asked)
    every, notes, bad = Setting.all(asked), list[dict[str, Any]](), 0
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    for ranks in dict.fromkeys(s.ranks for s in every):
        for result in results(ranks, [s for s in every if s.ranks == ranks]):
            setting = Setting(**result["setting"])
            rows, times = rows_of(result)
            show(setting, rows, times, result["known"])
            refuse_other_models(setting, rows)
            found = verdicts(setting, rows, times)
            lines = [*map(str, found), *equal_memory(rows)]
            print("\n".join(f"  {line}" for line in lines), flush=True)
            bad += sum(not one.good for one in found)
            notes.append(
                {
                    "setting": asdict(setting),
                    "load": os.getloadavg(),
                    "times": {chunks: asdict(one) for chunks, one in times.items()},
                    "known": {chunks: asdict(one) for chunks, one in result["known"].items()},
                    "rows": [asdict(row) for row in rows],
                    "verdicts": [{**asdict(one), "good": one.good} for one in found],
                }
            )
            if asked.json:
                head = {"commit": commit(), "torch": torch.__version__, "argv": sys.argv}
                asked.json.write_text(json.dumps({**head, "settings": notes}, indent=1))
    print(f"\n{'FAIL' if bad else 'PASS'}: {bad} requirements not met")
    return 1 if bad and not asked.smoke else 0


if __name__ == "__main__":
    sys.exit(main())

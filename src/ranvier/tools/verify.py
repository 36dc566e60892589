"""Verify: the same architecture, shrunk, on one process and on the configured grid.

On one process it is plain PyTorch. Every rank runs the plain model as well and compares its own
part of it, in float64: losses, every gradient, gradient norms, weights after a few steps, and the
communication it recorded with what its leaves predicted. Then it trains, saves, reloads and trains
on as a run does (`verify_run`), with the run's pruning and its memory on the host. What decides
about parallel correctness is kept: heads : kv heads : ranks that split them, the remainder of the
vocabulary modulo row·col·depth, tying, biases, norms, positions, packing, what col splits inside.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import largest
from ranvier.config.plan import Plan
from ranvier.config.run import Run
from ranvier.cost.layers import Flow
from ranvier.data.batch import Batch
from ranvier.errors import STOPPED, PlanError, RefusedError, WriteError
from ranvier.grid import Grid
from ranvier.launch import Ranks
from ranvier.models import DecoderConfig, build
from ranvier.nn.cross_entropy import IGNORE
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import Parallel, parallel_of, parallelize
from ranvier.sharding import Place
from ranvier.system.terminal import print
from ranvier.tools.verify_run import NOISE, SAVED, train_shortly
from ranvier.trace import Event, communication, difference
from ranvier.train import train
from ranvier.train.build_stage import cut_of
from ranvier.train.step import forward_backward

ONE_PASS, AFTER_STEPS = 1e-12, 1e-9
"""Largest difference, relative to the largest magnitude of a tensor."""
NOT_MINE = -1.0
"""Difference of what lies on another stage; if no rank has it, something is wrong."""
STEPS = 3
MOST_RANKS = 64
OWN_CODES = (0, 1, STOPPED, *(kind.exit_code for kind in (PlanError, WriteError, RefusedError)))
"""Exit codes of a verification that came to its end, or of a mistake of the user's."""


def world_of(plan: Plan) -> int:
    """Ranks that the plan needs; an inferred degree counts as 1."""
    return math.prod(max(size, 1) for size in plan.degrees.values())


def shrink(run: Run) -> Run:
    """The run with a model as small as its grid allows."""
    plan, model = run.plan.unmeasured, run.model
    inside = plan.row * (plan.col if plan.inner == "features" else 1)
    heads, kv_heads = _heads(model.heads, model.kv_heads, plan.row, inside)
    period = plan.row * plan.col * plan.depth
    vocab = model.vocab % period
    while vocab < 24:
        vocab += period
    seq = plan.row * max(-(-8 // plan.row), 2)
    micro = 2 * plan.col if plan.inner == "samples" else 2
    micro_batches = min(plan.micro_batches, 2 * plan.pipe)
    # of a pruning pattern N:M rows on a rank are whole groups
    group = run.prune.groups[1] if run.prune.groups else 1
    narrow, wide = plan.col * group, inside * group
    head_dim = math.lcm(4, group)
    small = replace(
        model,
        layers=min(model.layers, max(2, plan.pipe * plan.chunks)),
        embed=narrow * -(-16 // narrow),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=wide * -(-24 // wide),
        vocab=vocab,
        max_seq=max(seq, 1),
        dropout=0.0,
        **_few(model, plan, group),
        **_shrunk(model, min(model.layers, max(2, plan.pipe * plan.chunks)), seq, head_dim),
    )
    batch = plan.replicas * micro * micro_batches
    return replace(
        run,
        model=small,
        plan=replace(
            plan, batch=batch, micro_batch=micro, stages=(), stage_times="", credits=0, jitter=0.0
        ),
        data=replace(run.data, seq=seq),
        lora=replace(run.lora, dropout=0.0, layers=(), start=""),
    )


def _shrunk(model: DecoderConfig, layers: int, seq: int, head_dim: int) -> dict[str, Any]:
    """Windows and rotary positions that a text of `seq` tokens meets, of small heads."""
    window = min(model.window, max(seq // 3, 1))
    slide = tuple(i for i in range(layers) if model.window_of(i * model.layers // layers))
    turned = max(int(head_dim * model.rope_share) // 2 * 2, 2)
    return {
        "window": window if slide else 0,
        "window_layers": () if len(slide) == layers else slide,
        "rope_original": min(model.rope_original, max(seq // 2, 2)),
        "rope_share": turned / head_dim,
        "rope_short": model.rope_short[: turned // 2],
        "rope_long": model.rope_long[: turned // 2],
    }


def _few(model: DecoderConfig, plan: Plan, group: int) -> dict[str, Any]:
    """Few experts, at least one for each rank; rows of layers as they were."""
    if model.experts == 0:
        return {}
    experts = plan.expert * -(-min(model.experts, 8) // plan.expert)
    ranks, layers = plan.row * plan.col * group, min(model.layers, max(2, plan.pipe * plan.chunks))
    return {
        "experts": experts,
        "experts_top": min(model.experts_top, experts),
        "expert_mlp": ranks * -(-24 // ranks),
        "shared_mlp": ranks * -(-16 // ranks) if model.shared_mlp else 0,
        "moe_every": min(model.moe_every, layers),
        "moe_first": min(model.moe_first, layers - 1),
        "router_jitter": 0.0,
    }


def _heads(heads: int, kv_heads: int, row: int, inside: int) -> tuple[int, int]:
    """The fewest heads with the same ratio and the same number of ranks that share a kv head."""
    common = math.gcd(heads, kv_heads)
    for times in range(1, common + 1):
        h, kv = heads // common * times, kv_heads // common * times
        same = all(_shared(kv, ranks) == _shared(kv_heads, ranks) for ranks in (row, inside))
        if same and h % inside == 0:
            return h, kv
    return heads, kv_heads


def _shared(kv_heads: int, ranks: int) -> tuple[int, bool]:
    """How many ranks share a kv head, and whether the split is even at all."""
    return max(ranks // kv_heads, 1), kv_heads % ranks == 0 or ranks % kv_heads == 0


def random_batch(run: Run) -> Batch:
    """A batch of random tokens, the same on every rank; some tokens have no target."""
    drawn = torch.Generator().manual_seed(run.train.seed + 1)
    shape = (run.plan.batch, run.data.seq)
    tokens = torch.randint(0, run.model.vocab, shape, generator=drawn)
    targets = torch.randint(0, run.model.vocab, shape, generator=drawn)
    targets[torch.rand(shape, generator=drawn) < 0.2] = IGNORE
    if not run.data.packed:
        return Batch(tokens, targets)
    starts = torch.rand(shape, generator=drawn) < 0.25
    starts[:, 0] = True
    index = torch.arange(shape[1]).expand(shape)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    return Batch(tokens, targets, positions, starts.long().cumsum(1))


@dataclass
class Reference:
    """What plain PyTorch computes in one process."""

    losses: list[float]
    extras: list[float]
    """Of these what mixtures of experts add to the loss."""
    norms: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, run: Run, decays: Mapping[str, bool]) -> Reference:
        """A few steps of torch's AdamW."""
        optim, named = run.optim, list(model.named_parameters())
        optimizer = torch.optim.AdamW(
            [{"params": [p], "weight_decay": optim.decay * decays[name]} for name, p in named],
            lr=run.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
        )
        found = cls([], [], [], {}, {})
        count = (batch.targets != IGNORE).sum()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch.inputs()) / count
            loss.backward()
            extra = getattr(model, "extra", None)
            found.extras.append(0.0 if extra is None else extra.item() / count.item())
            found.losses.append(loss.item() - found.extras[-1])
            if step == 0:
                found.grads = {n: p.grad.clone() for n, p in named if p.grad is not None}
            limit = optim.clip if optim.clip > 0.0 else math.inf
            found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
            for mixture in getattr(model, "mixtures", ()):
                mixture.move_bias()
        found.weights = {name: p.detach().clone() for name, p in named}
        return found


@dataclass
class Finding:
    """One row of the table: a quantity, its largest relative difference and what is allowed."""

    what: str
    difference: float
    limit: float

    @property
    def good(self) -> bool:
        """Whether it agrees (not a number does not)."""
        return self.difference <= self.limit


def verify(run: Run, me: Ranks) -> int:
    """Compare as one rank; rank 0 prints the table. 0 if all agree, else 1."""
    torch.set_num_threads(1)
    run, device = shrink(run), device_of(run, me)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    grid = Grid.of(
        run.plan, rank=me.rank, connected=me.world > 1, timeout_seconds=run.train.timeout
    )
    torch.manual_seed(run.train.seed)
    serial = build(run.model, run.lora).double()
    findings, lines, events = compare(run, grid, serial, device)
    unlike = torch.tensor([float(len(lines))], dtype=torch.float64, device=device)
    others = int(collectives.all_reduce(unlike, grid.axis(*grid.degrees), "max").wait().item())
    worst = _worst(findings, grid, device)
    if me.rank == 0:
        _print(run, worst, lines, events, others)
    wrong = [f.what for f in (*worst, *findings) if not f.good] + lines
    if wrong and me.rank > 0:
        print(f"rank {me.rank}: {wrong[0]}", file=sys.stderr)
    trained = _train(run, me, grid, device)
    if me.rank == 0:
        good = not wrong and not others and not trained
        print(
            "verified: the grid equals one process"
            if good
            else "FAILED: the grid differs from one process"
        )
    return int(bool(wrong) or others > 0 or trained)


def _train(run: Run, me: Ranks, grid: Grid, device: torch.device) -> bool:
    """Train, save, reload and train on; whether something was wrong, on all ranks."""
    if me.rank == 0:  # the last line that is seen if a rank crashes
        print(f"a run of {SAVED} steps, saved, reloaded, and a step more:{_kinds(run)}", flush=True)
    report = train_shortly(run, me, grid, device)
    findings = [
        Finding(what, off, ONE_PASS if once else AFTER_STEPS)
        for what, (off, once) in report.differences.items()
    ]
    if me.rank == 0:
        _print_findings(findings)
        for line in report.complaints:
            print(f"  {line}: WRONG")
    bad = any(not finding.good for finding in findings) or bool(report.complaints)
    return largest(int(bad), grid, device) > 0


def _kinds(run: Run) -> str:
    """What the run does besides, in words."""
    memory, pruned = run.memory, run.prune
    words = [f"pruned to {pruned.pattern or f'{pruned.sparsity:.0%} zeros'}"] if pruned.on else []
    words += [f"states in {memory.states} memory"] if memory.states != "device" else []
    words += ["weights in host memory"] if memory.weights == "host" else []
    words += [f"{memory.activations:.0%} of activations on the host"] if memory.activations else []
    return f" {', '.join(words)}" if words else ""


def device_of(run: Run, me: Ranks) -> torch.device:
    """Where the comparison runs: on the CPU, unless it is asked for over NCCL."""
    return torch.device("cpu") if run.train.backend != "nccl" else train.device_of(run, me)


def compare(
    run: Run, grid: Grid, serial: nn.Module, device: torch.device | str = "cpu"
) -> tuple[list[Finding], list[str], list[Event]]:
    """Findings of this rank, lines on communication that was not predicted, and the events."""
    batch, serial = random_batch(run).to(device), serial.to(device)
    torch.manual_seed(run.train.seed)
    model = parallelize(
        build(run.model, run.lora).double(),
        grid,
        inner=run.plan.inner,
        overlap=run.plan.overlap,
        recompute=run.plan.recompute,
        collectives=run.memory.collectives,
        # a graph keeps what eager backward gathers again: its events are others
        compiled="inductor" if run.plan.compile == "on" and _whole(run) else "",
        how=cut_of(run),
        keep=run.plan.gathered == "keep",
        device=device,
    )
    parallel = parallel_of(model)
    decays = {name: group == "matrix" for name, (group, _, _) in parallel.shapes.items()}
    reference = Reference.of(serial, batch, run, decays)
    micros = batch.micro_batches(grid, run.plan.micro_batch)
    optim = run.optim
    optimizer = Optimizer(
        parallel.queue,
        lr=run.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        decay=optim.decay,
        clip=optim.clip,
    )
    with grid.trace.recording() as events:
        losses, norms = [forward_backward(model, micros).item()], []
        grads = _gradients(parallel)
        norms.append(optimizer.step().item())
        extras = [_extra(parallel, batch)]
    for _ in range(STEPS - 1):
        losses.append(forward_backward(model, micros).item())
        norms.append(optimizer.step().item())
        extras.append(_extra(parallel, batch))
    findings = _numbers("loss", losses, reference.losses)
    findings += _numbers("norm", norms, reference.norms)
    if any(reference.extras):
        findings += _numbers("loss of experts", extras, reference.extras)
    findings += _tensors(parallel, reference, grads)
    flow = Flow(run.plan.micro_batch, run.data.seq, itemsize=8, statistics=8)
    predicted = predict(parallel, flow, run.plan.micro_batches)
    return findings, difference(predicted, events, parallel.ragged), events


def _extra(parallel: Parallel, batch: Batch) -> float:
    """What mixtures of experts have added to the mean loss of the last step."""
    if parallel.balance is None or parallel.balance.last is None:
        return 0.0
    return float(parallel.balance.extra) / int((batch.targets != IGNORE).sum())


def _numbers(name: str, have: list[float], want: list[float]) -> list[Finding]:
    """How far numbers of each step are off."""
    pairs = enumerate(zip(have, want, strict=True))
    return [
        Finding(f"{name} of step {i}", abs(a - b) / abs(b), AFTER_STEPS if i else ONE_PASS)
        for i, (a, b) in pairs
    ]


def _whole(run: Run) -> bool:
    """Whether blocks communicate nothing."""
    return run.plan.depth * run.plan.row * run.plan.col == 1


def predict(parallel: Parallel, flow: Flow, micro_batches: int) -> list[Event]:
    """Communication of one step: passes, update, and the two numbers the step itself sums."""
    axis, itemsize = parallel.token_axis, parallel.queue.dtype.itemsize
    events = parallel.events(flow, micro_batches=micro_batches) + parallel.update_events()
    if axis.size > 1:
        events.append(Event("all_reduce", axis.names, 8, "step.tokens"))
        events.append(Event("all_reduce", axis.names, itemsize, "step.loss"))
    return events + parallel.pipeline.step_events(micro_batches, itemsize)


def _gradients(parallel: Parallel) -> dict[str, tuple[Tensor, Place]]:
    """My range of every gradient; the queue keeps them for the update."""
    return {
        weight.name: (part.clone(), bucket.place(weight))
        for bucket, pieces in parallel.queue.finish()
        for weight, part in bucket.by_weight(pieces)
    }


def _tensors(parallel: Parallel, reference: Reference, grads: Mapping[str, Any]) -> list[Finding]:
    """Gradients and weights of this rank against its part of the whole ones."""
    floor = max(grad.abs().max().item() for grad in reference.grads.values())
    findings, state = list[Finding](), parallel.state()
    for name in (name for name, (_, trained, _) in parallel.shapes.items() if trained):
        want = reference.grads[name]
        size = want.abs().max().item()
        zero = size < NOISE * floor
        scale = floor if zero else size
        findings.append(_finding(f"gradient of {name}", grads.get(name), want, scale, ONE_PASS))
        if not zero:  # Adam makes full steps of rounding noise
            after, want = f"weight {name} after {STEPS} steps", reference.weights[name]
            size = want.abs().max().item()
            findings.append(_finding(after, state.get(name), want, size, AFTER_STEPS))
    return findings


def _finding(
    what: str, mine: tuple[Tensor, Place] | None, whole: Tensor, scale: float, limit: float
) -> Finding:
    """How far my part is off; what lies on another stage is not mine to judge."""
    if mine is None:
        return Finding(what, NOT_MINE, limit)
    part, place = mine
    error = (part - place.take(whole)).abs()
    return Finding(what, (error.max().item() if error.numel() else 0.0) / scale, limit)


def _worst(findings: list[Finding], grid: Grid, device: torch.device) -> list[Finding]:
    """Each finding with its largest difference on any rank.

    Communicates: all-reduce over all axes.
    """
    here = torch.tensor([f.difference for f in findings], dtype=torch.float64, device=device)
    here = here.nan_to_num(nan=math.inf)
    most = collectives.all_reduce(here, grid.axis(*grid.degrees), "max").wait()
    found = [max(m, h) for m, h in zip(most.tolist(), here.tolist(), strict=True)]
    return [
        replace(f, difference=math.inf if worst == NOT_MINE else worst)
        for f, worst in zip(findings, found, strict=True)
    ]


def _print(
    run: Run, findings: list[Finding], lines: list[str], events: list[Event], others: int
) -> None:
    plan, model = run.plan, run.model
    shape = (
        " · ".join(f"{axis} {size}" for axis, size in plan.degrees.items() if size > 1)
        or "one rank"
    )
    print(f"grid: {shape}; col splits {plan.inner} inside")
    print(
        f"shrunk model: {model.layers} layers, embed {model.embed}, {model.heads} heads, "
        f"{model.kv_heads} kv heads, mlp {model.mlp}, vocab {model.vocab}, {run.data.seq} tokens, "
        f"packed {run.data.packed}, tied {model.tied}"
    )
    print(f"{'largest relative difference to one process':<58}{'is':>11}{'allowed':>10}")
    _print_findings(findings)
    total = sum(event.bytes for event in communication(events))
    number = len(communication(events))
    print(f"communication of a step on rank 0: {total} bytes in {number} events, ", end="")
    print("all as predicted" if not lines else f"{len(lines)} NOT as predicted:")
    for line in lines:
        print(f"  {line}")
    if others and not lines:
        print("on another rank there was communication NOT as predicted")


def _print_findings(findings: list[Finding]) -> None:
    for finding in findings:
        mark = "" if finding.good else "  DIFFERS"
        print(f"{finding.what:<58}{finding.difference:>11.2e}{finding.limit:>10.0e}{mark}")

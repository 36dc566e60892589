"""The heart of the suite: a model on a grid against the same model as plain PyTorch, in float64.

Runs inside workers. Every comparison gives lines of text, one for each thing that differs; none is success.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.checkpoint.state import assemble
from ranvier.grid import Grid
from ranvier.nn.leaf import Flow
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel import Parallel, parallelize
from ranvier.sharding import Place, State
from ranvier.trace import Event, difference
from ranvier.train.step import Batch, forward_backward

ONE_PASS, STEPS = 1e-12, 1e-9
"""Relative to the tensor's largest magnitude; never relaxed."""


@dataclass(frozen=True)
class Case:
    """One way to run a model."""

    model: str
    inner: str = "samples"
    overlap: bool = True
    recompute: str = "none"
    micro_batches: int = 1
    packed: bool = False
    fast: bool = True


def batch_of(sizes: Mapping[str, int], *, samples: int, seq: int, packed: bool) -> Batch:
    """A batch of random tokens, the same on every rank; some targets are missing."""
    generator = torch.Generator().manual_seed(7)
    vocab = sizes["vocab"]
    tokens = torch.randint(0, vocab, (samples, seq), generator=generator)
    targets = torch.randint(0, vocab, (samples, seq), generator=generator)
    targets[torch.rand(samples, seq, generator=generator) < 0.2] = -100
    documents = positions = None
    if packed:
        starts = torch.rand(samples, seq, generator=generator) < 0.2
        starts[:, 0] = True
        documents = starts.long().cumsum(1)
        index = torch.arange(seq).expand(samples, seq)
        positions = index - torch.where(starts, index, 0).cummax(1).values
    return Batch(tokens, targets, positions, documents, torch.arange(samples))


def worst(name: str, have: Tensor, want: Tensor, limit: float, floor: float = 0.0) -> list[str]:
    """A line if two tensors differ by more than `limit` times the largest magnitude of the second.

    floor: magnitude below which a tensor is rounding noise of the model (its true value is zero).
    """
    scale = max(want.abs().max().item(), 1e-300)
    scale = scale if scale > floor * 1e-10 else floor
    error = (have.reshape(want.shape) - want).abs().max().item()
    good = error <= limit * scale  # False for NaN
    return [] if good else [f"{name}: differs by {error:.3e}, {error / scale:.3e} of its magnitude"]


class Serial:
    """The plain model: what one process computes in three steps."""

    def __init__(
        self, build: Callable[[], nn.Module], batch: Batch, lr: float, clip: float
    ) -> None:
        torch.manual_seed(1)
        self.model = build().double()
        self.values = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.grads: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        groups = [
            {"params": [p], "weight_decay": 0.1 if decays(n, p) else 0.0} for n, p in self.named()
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
        for step in range(3):
            optimizer.zero_grad()
            count = (batch.targets != -100).sum()
            loss = self.model(**batch.inputs()) / count
            loss.backward()
            self.losses.append(loss.item())
            if step == 0:
                self.grads = {n: p.grad.clone() for n, p in self.named() if p.grad is not None}
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.norms.append(norm.item())
            optimizer.step()
        self.after = {name: p.detach().clone() for name, p in self.named()}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())


def decays(name: str, param: nn.Parameter) -> bool:
    """Matrices but embeddings (whatever their name) decay."""
    return param.dim() >= 2 and not any(w in name for w in ("embed", "position", "wte", "wpe"))


def gradients(parallel: Parallel) -> State:
    """My part of every finished gradient, without the update."""
    state: State = {}
    for bucket, grad in parallel.queue.finish():
        for weight in bucket.weights:
            state[weight.name] = (grad[slice(*bucket.range(weight))].clone(), bucket.place(weight))
    return state


def flow_of(batch: Batch, grid: Grid, micro_batches: int) -> Flow:
    samples = batch.tokens.shape[0] // grid.axis("data", "expert", "depth").size // micro_batches
    return Flow(samples=samples, seq=batch.tokens.shape[1], itemsize=8, statistics=8)


@dataclass
class Result:
    """What one rank found."""

    lines: list[str]
    gradients: State
    weights: State
    start: State
    optimizer: State


def run_case(
    grid: Grid, build: Callable[[], nn.Module], case: Case, batch: Batch, lr: float, clip: float
) -> Any:
    """Three steps on the grid; the state of this rank and what it saw."""
    torch.manual_seed(1)
    model = parallelize(
        build().double(),
        grid,
        inner=case.inner,  # type: ignore[arg-type]
        overlap=("dx", "dw", "gather") if case.overlap else (),
        recompute=case.recompute,  # type: ignore[arg-type]
        fast=case.fast,
    )
    parallel: Parallel = model.parallel  # type: ignore[assignment]
    start = copied(parallel.state())
    share = batch.tokens.shape[0] // grid.axis("data", "expert", "depth").size
    micros = batch.micro_batches(grid, share // case.micro_batches)
    with grid.trace.recording() as events:
        losses = [forward_backward(model, micros).item()]
        grads = gradients(parallel)
    predicted = predict(parallel, flow_of(batch, grid, case.micro_batches), case)
    lines = difference(predicted, events) if case.fast else []
    optimizer = Optimizer(parallel.queue, lr=lr, clip=clip)
    norms = []
    for _ in range(3):
        losses.append(forward_backward(model, micros).item())
        norms.append(optimizer.step().item())
    del losses[1]
    assert losses, lines
    return {
        "lines": [f"rank {grid.rank}: {line}" for line in lines],
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "start": start,
        "after": copied(parallel.state()),
        "optimizer": copied(optimizer.state()),
    }


def predict(parallel: Parallel, flow: Flow, case: Case) -> list[Event]:
    """Communication of one forward_backward and the end of its reductions."""
    grid, axis = parallel.grid, parallel.token_axis
    events = parallel.events(flow, micro_batches=case.micro_batches)
    events += [e for e in parallel.update_events() if e.where != "norm" and e.op != "all_gather"]
    if axis.size > 1:
        events += [Event("all_reduce", axis.names, 8, where) for where in ("tokens", "loss")]
    assert grid.rank >= 0
    return events


def copied(state: State) -> State:
    return {name: (tensor.clone(), place) for name, (tensor, place) in state.items()}


def compare(serial: Serial, results: list[dict[str, Any]]) -> list[str]:
    """What differs between one process and the ranks of a grid."""
    lines = [line for result in results for line in result["lines"]]
    for rank, result in enumerate(results):
        for what, want in (("losses", serial.losses), ("norms", serial.norms)):
            for step, (a, b) in enumerate(zip(result[what], want, strict=True)):
                limit = ONE_PASS if step == 0 else STEPS
                if not abs(a - b) <= limit * abs(b):
                    lines.append(f"rank {rank}: {what} of step {step}: {a} instead of {b}")
    lines += [f"not bitwise the start: {n}" for n in not_equal(serial.values, results, "start")]
    floor = max(g.abs().max().item() for g in serial.grads.values())
    grads = assemble(result["grads"] for result in results)
    for name, want in serial.grads.items():
        lines += worst(f"gradient of {name}", grads[name], want, ONE_PASS, floor)
    after = assemble(result["after"] for result in results)
    for name, want in serial.after.items():
        noise = name in serial.grads and serial.grads[name].abs().max().item() < 1e-10 * floor
        if not noise:  # Adam makes full steps of rounding noise
            lines += worst(f"weight {name} after steps", after[name], want, STEPS)
    return lines + replicas(results)


def not_equal(values: Mapping[str, Tensor], results: list[dict[str, Any]], what: str) -> list[str]:
    """Names whose parts on some rank are not bitwise parts of the whole."""
    bad = []
    for result in results:
        for name, (part, place) in result[what].items():
            if not torch.equal(place.take(values[name]), part):
                bad.append(name)
    return sorted(set(bad))


def replicas(results: list[dict[str, Any]]) -> list[str]:
    """Ranks that hold the same part must hold the same bits."""
    seen: dict[tuple[str, Place], Tensor] = {}
    bad = []
    for result in results:
        for name, (part, place) in result["after"].items():
            first = seen.setdefault((name, place), part)
            if not torch.equal(first, part):
                bad.append(f"copies of {name} differ between ranks")
    return sorted(set(bad))

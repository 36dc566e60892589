"""Pruned training against plain PyTorch: dense AdamW with weights and gradients times a mask.

Runs inside workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equivalence import ONE_PASS, STEPS, Case, batch_of, copied, decays, flow_of, gradients, worst
from equivalence import micros_of as micros
from ranvier.comm import collectives
from ranvier.comm.consensus import world_axis
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.optim import pruning
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import ShardedStateDict
from ranvier.tools.verify import predict_events
from ranvier.trace import diff_events
from ranvier.train.step import forward_backward
from states import assemble

Masks = dict[str, Tensor]


def largest(x: Tensor, sparsity: float) -> Tensor:
    """Where the largest magnitudes of a whole matrix are, equal ones in order; of experts each."""
    if x.dim() == 3:
        return torch.stack([largest(one, sparsity) for one in x])
    order = x.detach().float().abs().view(-1).sort(descending=True, stable=True).indices
    mask = torch.zeros(x.numel(), dtype=torch.bool)
    mask[order[: round((1.0 - sparsity) * x.numel())]] = True
    return mask.view(x.shape)


def of_each(x: Tensor, stay: int, of: int) -> Tensor:
    """Where of each `of` neighbours the `stay` largest are."""
    groups = x.detach().abs().view(-1, of)
    order = groups.sort(dim=1, descending=True, stable=True).indices[:, :stay]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True).view(x.shape)


def matrix(name: str, param: nn.Parameter) -> bool:
    """Whether a weight of a model is pruned."""
    return decays(name, param) and "head" not in name


def masks_of(model: nn.Module, way: Callable[[Tensor], Tensor]) -> Masks:
    return {n: way(p) for n, p in model.named_parameters() if matrix(n, p)}


class Masked:
    """Plain AdamW on a masked model."""

    def __init__(self, model: nn.Module, masks: Masks, lr: float, clip: float) -> None:
        self.model, self.masks, self.clip = model, masks, clip
        groups = [
            {"params": [p], "weight_decay": 0.1 if decays(n, p) else 0.0}
            for n, p in model.named_parameters()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
        self.cover()

    @torch.no_grad()
    def cover(self) -> None:
        for name, param in self.model.named_parameters():
            if name in self.masks:
                param.mul_(self.masks[name])
                if param.grad is not None:
                    param.grad.mul_(self.masks[name])

    def step(self, loss: Callable[[nn.Module], Tensor]) -> tuple[float, float]:
        """Loss and norm of one step."""
        self.optimizer.zero_grad()
        value = loss(self.model)
        value.backward()
        self.cover()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or torch.inf)
        self.optimizer.step()
        self.cover()
        return value.item(), norm.item()

    def state(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}


# ---- two layers, many steps ---------------------------------------------------------------


class Pair(nn.Module):
    """Two matrices, in one bucket, whose parts depth pads."""

    dims = {"blocks.0.up": ("mlp", "embed"), "blocks.0.down": ("embed", "mlp")}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = {"embed": 6, "mlp": 10}
        up, down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": up, "down": down})])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        (block,) = self.blocks
        found: Tensor = block["down"](torch.nn.functional.gelu(block["up"](x)))
        return found


def examples(grid: Grid) -> tuple[Tensor, Tensor]:
    """My samples of what the pair learns, `[8, 2, 6]` in all."""
    drawn = torch.Generator().manual_seed(1)
    pair = (torch.randn(8, 2, 6, generator=drawn, dtype=torch.float64) for _ in range(2))
    axis, row = grid.axis("data", "depth"), grid.axis("row")
    one, other = (x.chunk(axis.size)[axis.index].chunk(row.size, 1)[row.index] for x in pair)
    return one, other


def off(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean(-1).sum() / 16


def long(grid: Grid, steps: int, sparsity: float) -> dict[str, Any]:
    """The losses of many steps of a pruned pair on a grid, and its weights."""
    model = parallelize(Pair(), grid)
    queue = get_parallel_model(model).bucket_scheduler
    pruning.prune_buckets(queue, pruning.by_magnitude(queue, sparsity))
    optimizer = Optimizer(queue, lr=1e-2, clip=0.5)
    x, y = examples(grid)
    losses = []
    for _ in range(steps):
        queue.begin_step("train")
        loss = off(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = collectives.all_reduce(torch.stack(losses), world_axis(grid)).wait()
    return {"losses": total.tolist(), "after": copied(get_parallel_model(model).sharded_state())}


# ---- a decoder on any grid ----------------------------------------------------------------


def way_of(how: float | str) -> Callable[[Tensor], Tensor]:
    """What stays of a whole matrix: a sparsity, or a pattern."""
    if isinstance(how, float):
        return lambda x: largest(x, how)
    stay, of = map(int, how.split(":"))
    return lambda x: of_each(x, stay, of)


def choice_of(parallel: ParallelModel, how: float | str) -> pruning.MaskFunction:
    if isinstance(how, float):
        return pruning.by_magnitude(parallel.bucket_scheduler, how)
    return pruning.by_pattern(parallel.bucket_scheduler, *map(int, how.split(":")))


def pruned(grid: Grid, case: Case, how: float | str) -> dict[str, Any]:
    """A few steps of a pruned model on a grid: what `compare` wants to know of them."""
    batch = batch_of(case.model, samples=16, packed=case.packed)
    model = case.on(grid)
    parallel = get_parallel_model(model)
    pruning.prune_buckets(parallel.bucket_scheduler, choice_of(parallel, how))
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2, clip=0.5)
    losses, norms, lines, grads = [], [], [], {}
    for step in range(case.steps):
        with grid.trace.record_events() as events:
            parts = micros(batch, grid, case.micro_batches)
            losses.append(forward_backward(model, parts).item())
            grads = grads if step else gradients(parallel)
            norms.append(optimizer.step().item())
        if parallel.load_balancer is not None:  # plain PyTorch counts it in
            losses[-1] += float(parallel.load_balancer.aux_loss_sum) / int(
                (batch.targets != -100).sum()
            )
        if case.fast:
            flow = flow_of(batch, grid, case.micro_batches)
            expected = predict_events(parallel, flow, case.micro_batches)
            lines += diff_events(expected, events, parallel.data_dependent_layers)
    return {
        "lines": lines,
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "after": copied(parallel.sharded_state()),
        "optimizer": copied(optimizer.sharded_state()),
    }


def compare(case: Case, how: float | str, results: list[dict[str, Any]]) -> list[str]:
    """What differs between masked dense training and the ranks of a grid."""
    batch, model = batch_of(case.model, samples=16, packed=case.packed), case.build()
    masks = masks_of(model, way_of(how))
    plain = Masked(model, masks, 1e-2, 0.5)
    count = (batch.targets != -100).sum()
    lines = [line for result in results for line in result["lines"]]
    grads: Mapping[str, Tensor] = {}
    for step in range(case.steps):
        loss, norm = plain.step(lambda model: model(**batch.model_inputs()) / count)
        limit = STEPS if step else ONE_PASS
        for rank, result in enumerate(results):
            for have, want in ((result["losses"][step], loss), (result["norms"][step], norm)):
                if not abs(have - want) <= limit * abs(want):
                    lines.append(f"rank {rank}, step {step}: {have} instead of {want}")
        if step == 0:
            found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            scale = min(1.0, 0.5 / (norm + 1e-6))  # torch has clipped them
            grads = {n: g.clone() / scale for n, g in found.items()}
    floor = max(g.abs().max().item() for g in grads.values())
    have = assemble(result["grads"] for result in results)
    for name, want in grads.items():
        lines += worst(f"gradient of {name}", have[name], want, ONE_PASS, floor)
    after = assemble(result["after"] for result in results)
    states = assemble(result["optimizer"] for result in results)
    for name, want in plain.state().items():
        lines += worst(f"weight {name}", after[name], want, STEPS)
        lines += worst(f"master of {name}", states[f"{name}.master"], want, STEPS)
        if name in masks:
            moved = [after[name], *(states[f"{name}.{k}"] for k in ("master", "mean", "square"))]
            lines += [
                f"{name} is not zero" for x in moved if (x.view(-1)[~masks[name].view(-1)]).any()
            ]
            if not torch.equal(states[f"{name}.mask"].view(want.shape) > 0, masks[name]):
                lines.append(f"{name} has another mask")
        elif f"{name}.mask" in states:
            lines.append(f"{name} is pruned")
    return lines


# ---- bytes --------------------------------------------------------------------------------


def weighed(grid: Grid, shape: Mapping[str, int], sparsity: float, dtype: str) -> list[Any]:
    """Of each bucket of matrices what it holds, by the formula and as its tensors are.

    And the bytes of its reductions, over depth and data.
    """
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{"max_seq": 16, "vocab": 29, **shape}))
    model = parallelize(model, grid, dtype=getattr(torch, dtype))
    parallel = get_parallel_model(model)
    queue, axis = parallel.bucket_scheduler, grid.axis("data")
    pruning.prune_buckets(queue, pruning.by_magnitude(queue, sparsity))
    optimizer = Optimizer(queue, lr=1e-2)
    batch = batch_of("llama", samples=16, packed=False)
    with grid.trace.record_events() as events:
        # several micro-batches: gradients are added, in fp32; one alone stays as it came
        forward_backward(model, micros(batch, grid, 1 if axis.size == 1 else 2))
        grads = {
            bucket: sum(x.nbytes for _, x in bucket.grad.covering_pieces(queue.device))
            for bucket in queue.buckets
            if bucket.grad is not None
        }
        optimizer.step()
    found = []
    for bucket in queue.buckets:
        if not any(map(pruning.is_prunable, bucket.weights)):
            continue
        states = [optimizer.master_weights[bucket], *optimizer.state_store.states[bucket].values()]
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in states}
        held[bucket.data.untyped_storage().data_ptr()] = bucket.data.nbytes
        mask = 0 if bucket.sparsity_mask is None else bucket.sparsity_mask.num_bytes
        moved = [e.bytes for e in events if e.where == bucket.name and e.op == "reduce_scatter"]
        rows = [bucket.size] if bucket.sparsity_mask is None else bucket.sparsity_mask.row_counts
        found.append((bucket.size, rows, grads.get(bucket), sum(held.values()) + mask, moved))
    return found


# ---- where states rest, and masks that grow -----------------------------------------------


def growing(grid: Grid, options: Mapping[str, Any]) -> tuple[list[float], ShardedStateDict]:
    """Losses of steps between which more and more is pruned, and the state they leave."""
    options, batch = dict(options), batch_of("llama", samples=16, packed=False)
    room, dtype = options.pop("room", None), options.pop("dtype", torch.float64)
    model = Case("llama").on(grid, dtype=dtype, room=room)
    parallel = get_parallel_model(model)
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2, clip=0.5, **options)
    numbers = []
    for sparsity in (0.0, 0.5, 0.5, 0.8):
        optimizer.prune_weights(pruning.by_magnitude(parallel.bucket_scheduler, sparsity))
        for _ in range(2):
            loss = forward_backward(model, micros(batch, grid, 1))
            numbers += [loss.item(), optimizer.step().item()]
    return numbers, copied({**parallel.sharded_state(), **optimizer.sharded_state()})


def differing(grid: Grid, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two ways of keeping states leave differently."""
    (numbers, state), (others, rest) = growing(grid, one), growing(grid, other)
    odd = [] if numbers == others else [f"losses {numbers} {others}"]
    return odd + [name for name, (x, _) in state.items() if not torch.equal(x, rest[name][0])]


def grown() -> list[float]:
    """The losses and norms of `growing` in plain PyTorch."""
    batch, model = batch_of("llama", samples=16, packed=False), Case("llama").build()
    count, plain = (batch.targets != -100).sum(), Masked(model, {}, 1e-2, 0.5)
    numbers: list[float] = []
    for sparsity in (0.0, 0.5, 0.5, 0.8):
        plain.masks = masks_of(model, way_of(sparsity))
        plain.cover()
        for _ in range(2):
            numbers += plain.step(lambda model: model(**batch.model_inputs()) / count)
    return numbers

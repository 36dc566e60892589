"""Times attention kernels of the ranks of context on one GPU, one rank after the other.

    python benchmarks/context_kernels.py                     131,072 tokens, 8 ranks, bf16
    python benchmarks/context_kernels.py --output FILE.json  all numbers
    python benchmarks/context_kernels.py --smoke             errors of small shapes on a CPU

All keys are in place: what is timed is compute, merges and sums, not communication. The time of a
method is that of its slowest rank, times the number of ranks; it is compared with the same kernel
on one device, with the fastest kernel on one device, and with the calls that torch's context
parallelism makes for its slowest rank: a ring of head-tail balanced blocks (with each kernel of
SDPA), and FlexAttention to gathered keys. Errors are those of the output and of gradients against
float64, relative to those of one device. Before that, outputs and gradients of all, at fewer
tokens, are compared with plain attention in float64 (`right_tokens.check_outputs`); there is no
ratio with one that differs. Exit status 1 if a limit does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from right_step import Check, checked_ratio
from right_tokens import check_outputs
from torch import Tensor

from ranvier.cost.context_attention import build_layout
from ranvier.models.segment_attention import SegmentAttention
from ranvier.nn.context_attention import build_context_attention
from ranvier.sharding import TokenOrder, order_tokens

SAME_KERNEL, FASTEST, PACKED, RING, PEER = 1.10, 1.30, 1.15, 1.20, 1.05
"""Limits of time: against the same kernel, the fastest one, packed documents on one device, a ring;
and how much faster than the peer."""
ERRORS = {"kv_gather": 1.25, "ulysses": 1.25, "ring": 1.5}
ROUNDS = 3


@dataclass(frozen=True)
class Shape:
    """Size of the attention."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    ranks: int
    device: str = "cuda"

    def random(self, rows: int, heads: int, seed: int = 0) -> Tensor:
        """Returns random numbers `[rows, heads, head_dim]` in bf16."""
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (rows, heads, self.head_dim)
        return torch.randn(size, device=self.device, generator=generator).bfloat16()

    def inputs(self) -> list[Tensor]:
        """Returns q, k, v and dy of all tokens."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [self.random(self.seq, some, seed) for seed, some in enumerate(heads)]


def measure(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the median time of each call in ms; calls are interleaved."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, found in zip(calls, times, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(stop))
    return [statistics.median(found) for found in times]


# ---- ranks that one process plays ----------------------------------------------------------------


@dataclass
class Ready:
    """A result that is there already."""

    value: Tensor

    def wait(self) -> Tensor:
        """Returns the result."""
        return self.value


@dataclass
class KeysInPlace:
    """An exchange whose results have been there before; the values do not matter for time."""

    size: int
    results: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def all_gather(self, x: Tensor) -> Ready:
        """Returns random numbers of the right size."""
        return self._result(x, x.shape[0] * self.size)

    def reduce_scatter(self, x: Tensor) -> Ready:
        """Returns random numbers of the right size."""
        return self._result(x, x.shape[0] // self.size)

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Ready:
        """Returns random numbers of the right size."""
        return self._result(x, sum(receive_counts))

    def _result(self, x: Tensor, rows: int) -> Ready:
        key = (rows, *x.shape[1:], x.dtype)
        if key not in self.results:
            self.results[key] = torch.randn((rows, *x.shape[1:]), device=x.device).to(x.dtype)
        return Ready(self.results[key])


@dataclass
class Ranks:
    """What the ranks of context, each a thread, have sent in one collective."""

    size: int
    sent: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent = [None] * self.size
        self.barrier = threading.Barrier(self.size)

    def exchange(self, index: int, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        self.sent[index] = value
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found


@dataclass
class ThreadExchange:
    """Communication between threads."""

    ranks: Ranks
    index: int

    def all_gather(self, x: Tensor) -> Ready:
        """Concatenates the tensors of all ranks."""
        return Ready(torch.cat(self.ranks.exchange(self.index, x)))

    def reduce_scatter(self, x: Tensor) -> Ready:
        """Sums the tensors of all ranks."""
        parts = [y.chunk(self.ranks.size)[self.index] for y in self.ranks.exchange(self.index, x)]
        return Ready(torch.stack(parts).sum(0))

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Ready:
        """Sends rows to each rank."""
        parts = self.ranks.exchange(self.index, x.split(list(send_counts)))
        return Ready(torch.cat([part[self.index] for part in parts]))


# ---- ours ----------------------------------------------------------------------------------------


def time_ranks(shape: Shape, order: TokenOrder, method: Any, ranks: Sequence[int]) -> list[Any]:
    """Returns calls of forward and backward of each rank."""
    calls: list[Any] = []
    q, k, v, dy = shape.inputs()
    for rank in ranks:
        layout = build_layout(method, (order,), rank)
        attention = build_context_attention(layout, SegmentAttention)
        rows = torch.from_numpy(order.token_numbers[rank]).to(shape.device)
        mine = [x.index_select(0, rows).unsqueeze(0) for x in (q, k, v)]
        grad = dy.index_select(0, rows).unsqueeze(0)
        exchange = KeysInPlace(size=shape.ranks)
        calls.append(_both_passes(attention, mine, grad, exchange))
    return calls


def _both_passes(attention: Any, inputs: list[Tensor], dy: Tensor, exchange: Any) -> Any:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run() -> None:
        torch.autograd.grad(attention.attend(*leaves, exchange), leaves, dy)

    return run


def run_ranks(shape: Shape, order: TokenOrder, method: Any) -> list[Tensor]:
    """Returns o, dq, dk and dv of all tokens, computed by all ranks."""
    ranks = Ranks(shape.ranks)
    inputs = shape.inputs()
    heads = (shape.heads, shape.heads, shape.kv_heads, shape.kv_heads)
    results = [torch.empty(shape.seq, n, shape.head_dim, device=shape.device) for n in heads]
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            attention = build_context_attention(
                build_layout(method, (order,), rank), SegmentAttention
            )
            rows = torch.from_numpy(order.token_numbers[rank]).to(shape.device)
            q, k, v, dy = (x.index_select(0, rows).unsqueeze(0) for x in inputs)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            o = attention.attend(*leaves, ThreadExchange(ranks, rank))
            # Backward in this thread: autograd's own thread would wait for other ranks.
            with torch.autograd.set_multithreading_enabled(False):
                grads = torch.autograd.grad(o, leaves, dy)
            for result, part in zip(results, (o, *grads), strict=True):
                result.index_copy_(0, rows, part[0].detach().float())
        except BaseException as error:
            failed.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(shape.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return results


# ---- one device ----------------------------------------------------------------------------------


def one_device(shape: Shape, kernel: str, lengths: Sequence[int] = ()) -> Callable[[], Any]:
    """Returns a call of forward and backward of all tokens. kernel: segments, or one of SDPA."""
    q, k, v, dy = shape.inputs()
    if kernel == "segments":
        bounds = np.concatenate([[0], np.cumsum(lengths or [shape.seq])]).tolist()
        pairs = tuple((a, b, a, b) for a, b in itertools.pairwise(bounds))
        how = SegmentAttention(pairs, shape.seq, shape.seq)

        def run() -> list[Tensor]:
            o, lse = how.forward(q, k, v)
            return [o, *how.backward(dy, q, k, v, o, lse)]

        return run
    q, k, v, dy = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, dy))

    def run_sdpa() -> list[Tensor]:
        o, lse, state = call_sdpa(kernel, q, k, v, causal=True)
        grads = call_sdpa_backward(kernel, dy, q, k, v, o, lse, state, causal=True)
        return [x[0].transpose(0, 1) for x in (o, *grads)]

    return run_sdpa


def call_sdpa(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, Any, Any]:
    """Returns output, log-sum-exp and what backward needs as well."""
    aten = torch.ops.aten
    if kernel == "cudnn":
        o, lse, *rest = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False
        )
        return o, lse, rest
    o, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return o, lse, rest


def call_sdpa_backward(
    kernel: str,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rest: Any,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv."""
    aten = torch.ops.aten
    if kernel == "cudnn":
        seed, offset = rest[4], rest[5]
        found = aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, o, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        )
        return tuple(found)  # type: ignore[return-value]
    found = aten._scaled_dot_product_flash_attention_backward(
        *(dy, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, rest[4], rest[5])
    )
    return tuple(found)  # type: ignore[return-value]


# ---- torch's context parallelism -----------------------------------------------------------------


def head_tail_rows(shape: Shape, rank: int) -> Tensor:
    """Returns the tokens of a rank: one block of the first half, and its mirror of the second."""
    blocks = torch.arange(shape.seq, device=shape.device).chunk(2 * shape.ranks)
    return torch.cat([blocks[rank], blocks[-1 - rank]])


def peer_ring(
    shape: Shape, kernel: str, rank: int, inputs: Sequence[Tensor] = ()
) -> Callable[[], list[Tensor]]:
    """Calls of a rank of torch's ring with head-tail balanced blocks; merges and sums in fp32.

    Returns the output and the gradient of the queries. inputs: q, k, v and dy of all tokens; by
    default random ones, with the same keys in each step.
    """
    rows = shape.seq // shape.ranks
    if inputs:
        order = [head_tail_rows(shape, (rank - step) % shape.ranks) for step in range(shape.ranks)]
        q, dy = (heads_first(inputs[number][order[0]]) for number in (0, 3))
        blocks = [[heads_first(x[tokens]) for x in inputs[1:3]] for tokens in order]
    else:
        q, dy = (heads_first(shape.random(rows, shape.heads, seed)) for seed in (0, 1))
        block = [heads_first(shape.random(rows, shape.kv_heads, seed)) for seed in (2, 3)]
        blocks = [block] * shape.ranks
    half = rows // 2

    def part(step: int) -> tuple[slice, slice, bool]:
        """Queries and keys of a step, and whether it is causal."""
        if step == 0:
            return slice(0, rows), slice(0, rows), True
        if step <= rank:
            return slice(0, rows), slice(0, half), False
        return slice(half, rows), slice(0, rows), False

    def run() -> list[Tensor]:
        out, lse, state = None, None, None
        for step in range(shape.ranks):
            queries, keys, causal = part(step)
            k, v = blocks[step]
            block, sums, state = call_sdpa(
                kernel, q[:, :, queries], k[:, :, keys], v[:, :, keys], causal
            )
            block = block.float()
            sums = sums if sums.dim() == 4 else sums.unsqueeze(-1)
            if out is None or lse is None:
                out, lse = block, sums
                continue
            old, old_sums = out[:, :, queries], lse[:, :, queries]
            new = old - torch.sigmoid(sums - old_sums) * (old - block)
            new_sums = old_sums - torch.nn.functional.logsigmoid(old_sums - sums)
            if queries.start:
                new = torch.cat([out[:, :, :half], new], 2)
                new_sums = torch.cat([lse[:, :, :half], new_sums], 2)
            out, lse = new, new_sums
        assert out is not None and lse is not None
        o = out.bfloat16()
        lse = lse if kernel == "cudnn" else lse.squeeze(-1)
        dq, dk, dv = (torch.zeros(x.shape, device="cuda") for x in (q, *blocks[0]))
        for step in range(shape.ranks):
            queries, keys, causal = part(step)
            k, v = blocks[step]
            grads = call_sdpa_backward(
                *(kernel, dy[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys]),
                *(o[:, :, queries], lse[:, :, queries].contiguous(), state, causal),
            )
            # Updating a part of a sum copies all of it.
            if step and queries.start == 0:
                dk = torch.cat([dk[:, :, :half] + grads[1], dk[:, :, half:]], 2)
                dv = torch.cat([dv[:, :, :half] + grads[2], dv[:, :, half:]], 2)
            else:
                dk += grads[1]
                dv += grads[2]
            if queries.start:
                dq = torch.cat([dq[:, :, :half], dq[:, :, half:] + grads[0]], 2)
            else:
                dq += grads[0]
        return [x[0].transpose(0, 1) for x in (o, dq)]

    return run


def peer_flex(shape: Shape, rank: int, inputs: Sequence[Tensor] = ()) -> Callable[[], list[Tensor]]:
    """Calls of a rank of torch's context parallelism with FlexAttention and gathered keys.

    Returns the output and the gradient of the queries. inputs: as in `peer_ring`.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, half = shape.seq // shape.ranks, shape.seq // shape.ranks // 2
    q, dy = (heads_first(shape.random(rows, shape.heads, seed)) for seed in (0, 1))
    k, v = (heads_first(shape.random(shape.seq, shape.kv_heads, seed)) for seed in (2, 3))
    if inputs:
        tokens = head_tail_rows(shape, rank)
        q, dy = (heads_first(inputs[number][tokens]) for number in (0, 3))
        k, v = (heads_first(x) for x in inputs[1:3])
    tail = shape.seq - (rank + 1) * half

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where(query < half, query + rank * half, query - half + tail) >= key

    blocks = torch.compile(create_block_mask)(mask, None, None, rows, shape.seq, device="cuda")
    kernel: Any = torch.compile(flex_attention)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> list[Tensor]:
        o = kernel(*leaves, block_mask=blocks, enable_gqa=True)
        grads = torch.autograd.grad(o, leaves, dy)
        return [x[0].transpose(0, 1).detach() for x in (o, grads[0])]

    return run


def heads_first(x: Tensor) -> Tensor:
    """Returns `[1, h, T, k]` of `[T, h, k]`."""
    return x.transpose(0, 1).unsqueeze(0).contiguous()


# ---- errors --------------------------------------------------------------------------------------


def compare_errors(shape: Shape) -> dict[str, list[float]]:
    """Returns the error of o, dq, dk, dv by each method relative to that of one device."""
    q, k, v, dy = (x.double() for x in shape.inputs())
    exact = SegmentAttention(((0, shape.seq, 0, shape.seq),), shape.seq, shape.seq)
    o, lse = exact.forward(q, k, v)
    want = [o, *exact.backward(dy, q, k, v, o, lse)]

    def error(have: Tensor, wanted: Tensor) -> float:
        return float((have.bfloat16().double() - wanted).norm())

    found: dict[str, list[float]] = {}
    for kernel in ("flash", "cudnn"):
        results = one_device(shape, kernel)()
        found[kernel] = [error(*both) for both in zip(results, want, strict=True)]
    order = order_tokens([shape.seq], shape.ranks, "balanced")
    for method in ERRORS:
        results = run_ranks(shape, order, method)
        errors = [error(*both) for both in zip(results, want, strict=True)]
        found[method] = [a / b for a, b in zip(errors, found["cudnn"], strict=True)]
    found["flash"] = [a / b for a, b in zip(found["flash"], found["cudnn"], strict=True)]
    return found


CHECKED_TOKENS = 2048
OUTPUT_LIMIT = 0.02
"""Largest error of outputs and gradients in bf16, relative to the largest magnitude."""


def plain_attention(shape: Shape) -> list[Tensor]:
    """Returns o, dq, dk and dv of all tokens by plain attention in float64."""
    q, k, v, dy = (heads_first(x.double()) for x in shape.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    groups = shape.heads // shape.kv_heads
    keys, values = (x.repeat_interleave(groups, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT * shape.head_dim**-0.5
    hidden = torch.ones(shape.seq, shape.seq, dtype=torch.bool, device=shape.device).triu(1)
    o = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    grads = torch.autograd.grad(o, leaves, dy)
    return [x[0].transpose(0, 1).detach() for x in (o, *grads)]


def check_kernels(shape: Shape) -> dict[str, Check]:
    """Compares outputs and gradients of all that is timed with plain attention."""
    twin = plain_attention(shape)
    order = order_tokens([shape.seq], shape.ranks, "balanced")
    results: dict[str, list[tuple[Tensor, Tensor]]] = {
        method: list(zip(run_ranks(shape, order, method), twin, strict=True)) for method in ERRORS
    }
    kernels = {"same kernel": "segments"}
    if shape.device == "cuda":
        kernels |= {"cudnn": "cudnn", "flash": "flash"}
    for name, kernel in kernels.items():
        outputs = one_device(shape, kernel)()
        results[f"one device, {name}"] = list(zip(outputs, twin, strict=True))
    if shape.device == "cuda":
        peers = {
            f"torch ring, {kernel}": partial(peer_ring, shape, kernel)
            for kernel in ("cudnn", "flash")
        }
        peers["torch FlexAttention"] = partial(peer_flex, shape)
        for name, make in peers.items():
            results[name] = []
            for rank in range(shape.ranks):
                tokens = head_tail_rows(shape, rank)
                outputs = make(rank, shape.inputs())()
                results[name] += [(x, y[tokens]) for x, y in zip(outputs, twin[:2], strict=True)]
    return {name: check_pairs(name, pairs) for name, pairs in results.items()}


def check_pairs(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Check:
    """Returns the check of the worst of several outputs."""
    checks = [check_outputs(name, output, twin, OUTPUT_LIMIT) for output, twin in pairs]
    wrong = [check for check in checks if not check.passed]
    return wrong[0] if wrong else max(checks, key=lambda check: float(check.values.split()[2]))


# ---- the report ----------------------------------------------------------------------------------


def draw_code_like(tokens: int) -> list[int]:
    """Returns lengths of documents as those of source files."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = max(int(np.exp(rng.normal(np.log(1500), 1.6))), 1)
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--errors-seq", type=int, default=32768, help="tokens to compute errors of")
    parser.add_argument("--output", type=Path, help="write all numbers to this file")
    parser.add_argument("--smoke", action="store_true", help="check small shapes on a CPU")
    options = parser.parse_args()
    if options.smoke:
        torch.set_num_threads(1)
        checks = check_kernels(Shape(64, 4, 2, 16, 2, "cpu"))
        print(*checks.values(), sep="\n")
        print("skipped: times, and torch's ring and FlexAttention, which need a GPU")
        return int(not all(check.passed for check in checks.values()))
    if not torch.cuda.is_available():
        print("This benchmark times kernels of a GPU, and torch sees none.", file=sys.stderr)
        return 2
    shape = Shape(options.seq, options.heads, options.kv_heads, options.head_dim, options.ranks)
    ranks = range(shape.ranks)
    some = sorted({0, shape.ranks // 2, shape.ranks - 1})
    code = draw_code_like(shape.seq)
    one = order_tokens([shape.seq], shape.ranks, "balanced")
    packed = order_tokens(code, shape.ranks, "balanced")
    rows: dict[str, float] = {}
    checked_shape = replace(shape, seq=min(shape.seq, CHECKED_TOKENS))
    checks = check_kernels(checked_shape)
    print(*checks.values(), sep="\n", flush=True)

    def add(names: Sequence[str], calls: Sequence[Callable[[], object]], times: int) -> None:
        for name, value in zip(names, measure(calls), strict=True):
            rows[name] = max(rows.get(name, 0.0), value * times)
        torch.cuda.empty_cache()

    for rank in ranks:
        ours = [time_ranks(shape, one, method, [rank])[0] for method in ERRORS]
        names, calls = [*ERRORS], list(ours)
        if rank in some:
            names += ["torch ring, cudnn", "torch ring, flash", "torch FlexAttention"]
            calls += [peer_ring(shape, kernel, rank) for kernel in ("cudnn", "flash")]
            calls.append(peer_flex(shape, rank))
        names.append("kv_gather, packed")
        calls.append(time_ranks(shape, packed, "kv_gather", [rank])[0])
        add(names, calls, shape.ranks)
        print(f"rank {rank} timed", flush=True)
    add(
        ["one device, same kernel", "one device, cudnn", "one device, flash"],
        [one_device(shape, kernel) for kernel in ("segments", "cudnn", "flash")],
        1,
    )
    add(["one device, packed"], [one_device(shape, "segments", code)], 1)
    errors = compare_errors(
        Shape(options.errors_seq, options.heads, options.kv_heads, options.head_dim, shape.ranks)
    )
    return report(shape, rows, errors, checks, len(code), options.output)


def report(
    shape: Shape,
    rows: dict[str, float],
    errors: dict[str, list[float]],
    checks: dict[str, Check],
    documents: int,
    output: Path | None,
) -> int:
    """Prints times and limits; returns the exit status."""
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {shape.seq} tokens, "
        f"{shape.heads} heads ({shape.kv_heads}), head dim {shape.head_dim}, bf16; forward and "
        f"backward, slowest of {shape.ranks} ranks times {shape.ranks}; packed: "
        f"{documents} documents"
    )
    for name, value in rows.items():
        print(f"{name:28}{value:10.1f} ms")
    for name, found in errors.items():
        print(f"{name:28}error of o, dq, dk, dv: " + " ".join(f"{x:.3g}" for x in found))
    single = [name for name in rows if name.startswith("one device, ") and "packed" not in name]
    torch_rows = [name for name in rows if name.startswith("torch")]
    fastest, peer, best = (
        min(names, key=rows.__getitem__) for names in (single, torch_rows, list(ERRORS))
    )
    same = "one device, same kernel"
    ratios = [
        ("kv_gather / same kernel", "kv_gather", same, SAME_KERNEL),
        ("ulysses / same kernel", "ulysses", same, SAME_KERNEL),
        ("kv_gather / fastest kernel", "kv_gather", fastest, FASTEST),
        ("ring / same kernel", "ring", same, RING),
        ("packed / documents", "kv_gather, packed", "one device, packed", PACKED),
        ("ours / torch's fastest", "kv_gather", peer, 1 / PEER),
        ("our fastest / torch's fastest", best, peer, 1 / PEER),
    ]
    # Packed documents run the kernels of kv_gather and of one device.
    unpacked = {"kv_gather, packed": "kv_gather", "one device, packed": same}
    holds = True
    for title, one, other, most in ratios:
        ratio = rows[one] / rows[other]
        compared = [checks.get(unpacked.get(name, name)) for name in (one, other)]
        passed = all(check is not None and check.passed for check in compared)
        verdict = "holds" if passed and ratio <= most else "NO"
        holds &= verdict == "holds"
        print(f"{title:34}{checked_ratio(ratio, compared):>7}  at most {most:.3f}: {verdict}")
    for name, most in ERRORS.items():
        largest = max(errors[name])
        holds &= largest <= most
        verdict = "holds" if largest <= most else "NO"
        print(f"largest error of {name:17}{largest:7.3f}  at most {most:.3f}: {verdict}")
    if output is not None:
        passed_names = [name for name, check in checks.items() if check.passed]
        numbers = {"times_ms": rows, "errors": errors, "checked": passed_names}
        output.write_text(json.dumps(numbers, indent=1))
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())

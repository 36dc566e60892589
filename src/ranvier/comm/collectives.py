"""Collectives: all communication of the package; over axes, asynchronous and traced.

`all_gather(x, axis, dim)` starts a communication and returns a `PendingTensor`; `.wait()` returns
the tensor. For an axis of size 1 they do nothing. Eager calls use c10d with asynchronous handles;
calls inside `torch.compile` use functional collectives, which the compiler can trace. CUDA tensors
in a Gloo group are copied through pinned host memory, as Gloo cannot send or receive them.

Not supported: tensors with a split dim that the axis does not divide; pad them first (see
sharding).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, Literal, ParamSpec

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ranvier.comm import functional
from ranvier.errors import CommunicationError
from ranvier.grid import Axis
from ranvier.trace import Event

P = ParamSpec("P")
CollectiveFunction = Callable[Concatenate[Tensor, Axis, P], "PendingTensor"]
Reduction = Literal["sum", "max", "min"]
REDUCE_OPS = {
    "sum": distributed.ReduceOp.SUM,
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
}
# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old names.
_gather_into = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter_into = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


class PendingTensor:
    """Result of a pending communication; `wait()` returns it and may be called repeatedly."""

    def __init__(self, value: Tensor, handle: _WorkHandle | None = None) -> None:
        self._value = value
        self._handle = handle

    def wait(self) -> Tensor:
        """Returns the result; on CUDA the current stream waits for it, not the host."""
        if self._handle is not None:
            self._value = self._handle.wait()
            self._handle = None
        return self._value


class _WorkHandle:
    """Handle of a communication: waits, copies a staged result back, rearranges the output."""

    def __init__(
        self,
        axis: Axis,
        event: Event,
        work: Any,
        output: Tensor,
        finish: Callable[[Tensor], Tensor],
        device: torch.device,
        keep: Tensor | None = None,
    ) -> None:
        self.axis = axis
        self.event = event
        self.work = work
        self.output = output
        self.postprocess = finish
        self.device = device
        # The input must stay alive until the communication has read it.
        self.input_buffer = keep
        if axis.trace.enabled:
            _record_completion(event, work, device)

    def wait(self) -> Tensor:
        event = self.event
        trace = self.axis.trace
        event.wait_time = time.perf_counter()
        if trace.enabled or trace.time_waits:
            stop = _start_stopwatch(event, self.device)
        else:
            stop = None
        if trace.time_waits:
            trace.waited_events.append(event)
        try:
            self.work.wait()
        except RuntimeError as error:
            raise CommunicationError(_failure_message(self.axis, event, error)) from error
        output = self.output
        # Staged through the host: copy the result back to the device.
        if output.device != self.device:
            output = output.to(self.device, non_blocking=True)
        if stop is not None:
            stop()
        self.input_buffer = None
        return self.postprocess(output)


def _record_completion(event: Event, work: Any, device: torch.device) -> None:
    """Records the end of a communication on the host; device times come from CUDA events."""
    if device.type != "cpu":
        return

    def note(_: Any) -> None:
        # The waiting thread may already have set it.
        if event.done_time is None:
            event.done_time = time.perf_counter()

    # A backend without futures raises; then the end of the wait is used as the completion.
    with contextlib.suppress(RuntimeError):
        work.get_future().add_done_callback(note)


def _start_stopwatch(event: Event, device: torch.device) -> Callable[[], None]:
    """Starts timing a wait; the returned function ends it."""
    # On CUDA the host does not wait: the exposed time is the time between two events on the stream.
    # It is read later, as reading synchronizes.
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()

        def read() -> None:
            after.synchronize()
            assert event.wait_time is not None
            event.resume_time = event.wait_time + before.elapsed_time(after) / 1e3
            event.done_time = event.resume_time

        def stop_device() -> None:
            after.record()
            event.read_device_times = read

        return stop_device

    def stop_host() -> None:
        event.resume_time = time.perf_counter()
        if event.done_time is None:
            event.done_time = event.resume_time

    return stop_host


def _failure_message(axis: Axis, event: Event, error: RuntimeError) -> str:
    recent = "; ".join(axis.trace.recent_ops)
    return (
        f"{event.op} over {axis} of {event.bytes} bytes at {event.where or '?'} failed on rank "
        f"{axis.ranks[axis.index]} (index {axis.index} of ranks {list(axis.ranks)}): {error}. All "
        "ranks of an axis must issue the same communication and stay alive. Check the errors of "
        f"the other ranks first; the last operations on this rank were: {recent}."
    )


def _num_bytes(x: Tensor, times: int = 1) -> int:
    return x.numel() * x.element_size() * times


def _start_collective(
    op: str,
    axis: Axis,
    num_bytes: int,
    x: Tensor,
    output: Tensor,
    call: Callable[[Tensor, Tensor], Any],
    finish: Callable[[Tensor], Tensor],
) -> PendingTensor:
    """Records the event, checks it in debug mode, stages tensors if needed, issues the call."""
    assert axis.group is not None, f"{op} over {axis}: this grid has no processes"
    event = axis.trace.record_event(op, axis.names, num_bytes)
    if axis.trace.check_collectives and op not in POINT_TO_POINT_OPS:
        # Ranks may receive different numbers of rows in an all-to-all.
        ragged = op == "all_to_all"
        shape = tuple(output.shape[1:] if ragged else output.shape)
        _check_same_collective(axis, f"{op} {shape} {output.dtype} at {event.where}")
    device = x.device
    # A selective-checkpoint mode may have saved `x`, which an in-place operation overwrites.
    if output is x and _has_saving_mode():
        with hide_from_dispatch_modes():
            x = output = x.clone()
    if device.type == "cuda" and distributed.get_backend(axis.group) == "gloo":
        x = _stage_on_host(x)
        output = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    try:
        with hide_from_dispatch_modes():
            work = call(output, x)
    except RuntimeError as error:
        raise CommunicationError(_failure_message(axis, event, error)) from error
    return PendingTensor(output, _WorkHandle(axis, event, work, output, finish, device, keep=x))


@contextmanager
def hide_from_dispatch_modes() -> Iterator[None]:
    """Hides operations inside from dispatch modes, e.g. of selective checkpointing.

    A mode that only counts operations, with the attribute `counts_communication`, still gets them.
    """
    if not _has_saving_mode():
        yield
        return
    with _disable_current_modes() as modes, contextlib.ExitStack() as stack:
        for mode in modes:
            if getattr(mode, "counts_communication", False):
                stack.enter_context(mode)
        yield


def _has_saving_mode() -> bool:
    """Whether a dispatch mode is active that may save tensors or change operations."""
    # The common case first, without building a list, as this runs at every collective.
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(
        not getattr(m, "counts_communication", False) for m in _get_current_dispatch_mode_stack()
    )


def _empty_rows(like: Tensor, rows: int) -> Tensor:
    """Returns an empty tensor with `rows` rows like `like`, hidden from dispatch modes."""
    with hide_from_dispatch_modes():
        return like.new_empty((rows, *like.shape[1:]))


def _stage_on_host(x: Tensor) -> Tensor:
    """Returns a copy in pinned host memory, complete when this returns."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    # Gloo reads host memory without waiting for streams.
    torch.cuda.current_stream(x.device).synchronize()
    return host


TAG_BYTES = 160
"""Bytes of the description that ranks compare in debug mode; longer ones are truncated."""
POINT_TO_POINT_OPS = ("send", "receive")


def _check_same_collective(axis: Axis, tag: str) -> None:
    """Raises if the ranks of an axis issue different collectives, which torch does not check."""
    mine = torch.zeros(TAG_BYTES, dtype=torch.uint8)
    text = tag.encode()[:TAG_BYTES]
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    if distributed.get_backend(axis.group) == "nccl":
        device = "cuda"
    else:
        device = "cpu"
    every = torch.empty(axis.size * TAG_BYTES, dtype=torch.uint8, device=device)
    _gather_into(every, mine.to(device), group=axis.group)
    rows = [bytes(row.tolist()).rstrip(b"\0") for row in every.cpu().view(axis.size, -1)]
    if len(set(rows)) > 1:
        lines = "; ".join(
            f"rank {rank}: {row.decode(errors='replace')}"
            for rank, row in zip(sorted(axis.ranks), rows, strict=True)
        )
        raise CommunicationError(
            f"The ranks of {axis} issue different collectives: {lines}. All ranks of an axis must "
            "issue the same collectives in the same order. Look for code that runs only on some "
            "ranks."
        )


def _move_dim_first(x: Tensor, dim: int) -> Tensor:
    """Returns a contiguous `x` with `dim` as its first dim."""
    return x.movedim(dim, 0).contiguous()


def _reuse_saved_result(verb: CollectiveFunction[P]) -> CollectiveFunction[P]:
    """Wraps a collective so that a recomputed block reuses its saved result.

    See `memory.saved_results`. Collectives over only depth gather weights, which the bucket
    scheduler shares between both runs.
    """

    @functools.wraps(verb)
    def call(x: Tensor, axis: Axis, /, *args: P.args, **kwargs: P.kwargs) -> PendingTensor:
        results = axis.trace.saved_results
        # No block is running, the axis has one rank, or weights are gathered.
        if results is None or axis.size == 1 or axis.names == ("depth",):
            return verb(x, axis, *args, **kwargs)
        return PendingTensor(results.run_once(lambda: verb(x, axis, *args, **kwargs).wait()))

    return call


@_reuse_saved_result
def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> PendingTensor:
    """Concatenates the tensors of all ranks along `dim`.

    x: `[..., n, ...]`; y: `[..., n·size, ...]`. Communicates: all-gather over axis.
    """
    if axis.size == 1:
        return PendingTensor(x)
    if torch.compiler.is_compiling():
        return PendingTensor(functional.all_gather(x, axis, dim))
    # c10d gathers along dim 0 in the order of sorted ranks; the axis may have another order.
    part = _move_dim_first(x, dim)
    output = _empty_rows(part, part.shape[0] * axis.size)
    return _start_collective(
        "all_gather",
        axis,
        _num_bytes(x, axis.size),
        part,
        output,
        lambda out, part: _gather_into(out, part, group=axis.group, async_op=True),
        lambda out: functional.reorder_parts(out, axis, to_group=False).movedim(0, dim),
    )


@_reuse_saved_result
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> PendingTensor:
    """Sums over all ranks and returns this rank's part along `dim`.

    x: `[..., n·size, ...]`; y: `[..., n, ...]`. Communicates: reduce-scatter over axis.
    """
    if axis.size == 1:
        return PendingTensor(x)
    assert x.shape[dim] % axis.size == 0, (x.shape, dim, axis.size)
    if torch.compiler.is_compiling():
        return PendingTensor(functional.reduce_scatter(x, axis, dim))
    parts = functional.reorder_parts(_move_dim_first(x, dim), axis, to_group=True)
    output = _empty_rows(parts, parts.shape[0] // axis.size)
    return _start_collective(
        "reduce_scatter",
        axis,
        _num_bytes(x),
        parts,
        output,
        lambda out, parts: _scatter_into(out, parts, group=axis.group, async_op=True),
        lambda out: out.movedim(0, dim),
    )


@_reuse_saved_result
def all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum") -> PendingTensor:
    """Reduces over all ranks (sum, max or min). Communicates: all-reduce over axis."""
    if axis.size == 1:
        return PendingTensor(x)
    if torch.compiler.is_compiling():
        return PendingTensor(functional.all_reduce(x, axis, op))
    # c10d reduces in place, but `x` must not change.
    copy = x.clone(memory_format=torch.contiguous_format)

    def call(out: Tensor, value: Tensor) -> Any:
        # They differ if the tensor was staged on the host.
        if out is not value:
            out.copy_(value)
        return distributed.all_reduce(out, REDUCE_OPS[op], group=axis.group, async_op=True)

    return _start_collective("all_reduce", axis, _num_bytes(x), copy, copy, call, lambda out: out)


@_reuse_saved_result
def all_to_all(
    x: Tensor,
    axis: Axis,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
) -> PendingTensor:
    """Exchanges rows so that rank i gets the i-th part of every rank, in axis order.

    x: `[sum(send_counts), ...]`; y: `[sum(receive_counts), ...]`; by default all counts are equal.
    Communicates: all-to-all over axis.
    """
    if axis.size == 1:
        return PendingTensor(x)
    if send_counts is not None:
        send = list(send_counts)
    else:
        send = None
    if receive_counts is not None:
        receive = list(receive_counts)
    else:
        receive = None
    if torch.compiler.is_compiling():
        return PendingTensor(functional.all_to_all(x, axis, send, receive))
    # Parts are permuted to the order of the group before the exchange, and back after it.
    assert (send is None) == (receive is None), "give both send and receive counts, or neither"
    parts = functional.reorder_parts(x.contiguous(), axis, to_group=True, counts=send)
    if receive is None:
        rows = parts.shape[0]
    else:
        rows = sum(receive)
    output = _empty_rows(parts, rows)
    if receive is None:
        into = None
    else:
        into = functional.to_group_order(receive, axis)
    if send is None:
        out_of = None
    else:
        out_of = functional.to_group_order(send, axis)
    return _start_collective(
        "all_to_all",
        axis,
        _num_bytes(x),
        parts,
        output,
        lambda out, parts: distributed.all_to_all_single(
            out, parts, into, out_of, group=axis.group, async_op=True
        ),
        lambda out: functional.reorder_parts(out, axis, to_group=False, counts=receive),
    )


@_reuse_saved_result
def broadcast(x: Tensor, axis: Axis, *, index: int = 0) -> PendingTensor:
    """Returns, on all ranks, the tensor of the rank at `index` of the axis.

    Communicates: broadcast over axis.
    """
    if axis.size == 1:
        return PendingTensor(x)
    if torch.compiler.is_compiling():
        return PendingTensor(functional.broadcast(x, axis, index))
    copy = x.clone(memory_format=torch.contiguous_format)

    def call(out: Tensor, value: Tensor) -> Any:
        if out is not value:
            out.copy_(value)
        return distributed.broadcast(out, axis.ranks[index], group=axis.group, async_op=True)

    return _start_collective("broadcast", axis, _num_bytes(x), copy, copy, call, lambda out: out)


def send(x: Tensor, axis: Axis, to: int) -> PendingTensor:
    """Sends to the rank at index `to` of the axis. Communicates: point to point over axis."""
    part = x.contiguous()
    return _start_collective(
        "send",
        axis,
        _num_bytes(x),
        part,
        part,
        lambda _, part: distributed.isend(part, axis.ranks[to], group=axis.group),
        lambda out: out,
    )


def receive(like: Tensor, axis: Axis, source: int) -> PendingTensor:
    """Receives a tensor like `like` from index `source`. Communicates: point to point over axis."""
    if like.dim():
        output = _empty_rows(like, len(like))
    else:
        output = torch.empty_like(like)
    return _start_collective(
        "receive",
        axis,
        _num_bytes(like),
        output,
        output,
        lambda out, _: distributed.irecv(out, axis.ranks[source], group=axis.group),
        lambda out: out,
    )

"""Collectives: all communication of the package; over axes, asynchronous and traced.

`all_gather(x, axis, dim)` starts a communication and returns a `PendingTensor`; `.wait()` returns
the tensor. For an axis of size 1 they do nothing. Eager calls use c10d with asynchronous handles;
calls inside `torch.compile` use functional collectives, which the compiler can trace. CUDA tensors
in a Gloo group are copied through pinned host memory, as Gloo cannot send or receive them.

A collective is run by the algorithm that the grid has chosen for the axis and the bytes (see
`comm.algorithms`): the backend's own (native), shared memory, or a schedule of messages.

Not supported: tensors with a split dim that the axis does not divide, unless the parts of all ranks
are given as counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ranvier.comm import functional
from ranvier.comm.algorithm_table import NATIVE, SHARED_MEMORY
from ranvier.comm.transports.executor import REDUCE_OPS, gather_into, scatter_into
from ranvier.comm.transports.lost_rank import ANSWER_SECONDS, LostRankError, find_lost_ranks
from ranvier.comm.transports.output_pool import LARGE_BYTES
from ranvier.comm.transports.reduction import Reduction
from ranvier.comm.transports.runner import CollectiveRunner
from ranvier.errors import CommunicationError
from ranvier.grid import WEIGHT_CHANNELS, Axis
from ranvier.trace import Event

RAGGED_ALGORITHM = "direct"
"""Algorithm of collectives with unequal parts where the backend's own would be used."""
P = ParamSpec("P")
CollectiveFunction = Callable[Concatenate[Tensor, Axis, P], "PendingTensor"]


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

    __slots__ = (
        "axis",
        "device",
        "event",
        "input_buffer",
        "is_staged",
        "output",
        "postprocess",
        "work",
    )

    def __init__(
        self,
        axis: Axis,
        event: Event,
        work: Any,
        output: Tensor,
        finish: Callable[[Tensor], Tensor],
        device: torch.device,
        keep: Tensor,
        is_staged: bool,
    ) -> None:
        self.axis = axis
        self.event = event
        self.work = work
        self.output = output
        self.postprocess = finish
        self.device = device
        self.is_staged = is_staged
        # The input must stay alive until the communication has read it.
        self.input_buffer: Tensor | None = keep
        if axis.trace.enabled and event.algorithm == NATIVE:
            _record_completion(event, work, device)

    def wait(self) -> Tensor:
        event, work, trace = self.event, self.work, self.axis.trace
        event.wait_time = time.perf_counter()
        stop = None
        if trace.enabled or trace.time_waits:
            stop = _start_stopwatch(event, self.device)
            if trace.time_waits:
                trace.waited_events.append(event)
        try:
            # Sums may be computed by the thread that waits.
            if _has_saving_mode():
                with hide_from_dispatch_modes():
                    work.wait()
            else:
                work.wait()
        except RuntimeError as error:
            raise CommunicationError(_failure_message(self.axis, event, error)) from error
        output = self.output
        # Staged through the host: copy the result back to the device.
        if self.is_staged:
            output = output.to(self.device, non_blocking=True)
        if stop is not None:
            if event.algorithm != NATIVE:
                event.done_time = work.done_time
                event.sent_bytes = work.sent_bytes
                event.num_rounds = work.num_rounds
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
    rank = axis.ranks[axis.index]
    recent = "; ".join(axis.trace.recent_ops)
    return (
        f"{event.op} over {axis} of {event.bytes} bytes at {event.where or '?'} failed on rank "
        f"{rank} (index {axis.index} of ranks {list(axis.ranks)}): {error}."
        f"{_find_culprits(axis, error)} All ranks of an axis must issue the same communication and "
        "stay alive. Check the errors of the other ranks first; the last operations on this rank "
        f"were: {recent}."
    )


def _find_culprits(axis: Axis, error: RuntimeError) -> str:
    """Returns a sentence about the ranks that a failure goes back to; empty if the error has it."""
    store = distributed.distributed_c10d._get_default_store()
    rank = axis.ranks[axis.index]
    suspects: Sequence[int] = axis.ranks
    seconds = ANSWER_SECONDS
    if isinstance(error, LostRankError):
        suspects = [error.rank]
        # A rank that has ended does not answer any more, but may have before.
        seconds = 0.0 if error.has_ended else ANSWER_SECONDS
    # The store may have ended with the rank that is lost.
    try:
        lost = find_lost_ranks(store, rank, suspects, seconds)
    except RuntimeError:
        return ""
    if not lost or (isinstance(error, LostRankError) and lost == [error.rank]):
        return ""
    names = ", ".join(map(str, lost))
    return f" It goes back to rank {names}, which does not respond."


def _start_collective(
    op: str,
    axis: Axis,
    num_bytes: int,
    x: Tensor,
    output: Tensor,
    call: Callable[[Tensor, Tensor], Any],
    finish: Callable[[Tensor], Tensor],
    algorithm: str = NATIVE,
) -> PendingTensor:
    """Records the event, checks it in debug mode, stages tensors if needed, issues the call."""
    event = axis.trace.record_event(op, axis.names, num_bytes)
    event.algorithm = algorithm
    if axis.trace.check_collectives and op not in POINT_TO_POINT_OPS:
        # Ranks may scatter different numbers of rows in a reduce-scatter and in an all-to-all.
        whole = x if op == "reduce_scatter" else output
        shape = tuple(whole.shape[1:] if op == "all_to_all" else whole.shape)
        _check_same_collective(axis, f"{op} {shape} {output.dtype} at {event.where}")
    device = x.device
    # Sums are written into memory without a graph, possibly while gradients are enabled.
    if x.requires_grad and output is not x:
        x = x.detach()
    # A selective-checkpoint mode may have saved `x`, which an in-place operation overwrites.
    if output is x and _has_saving_mode():
        with hide_from_dispatch_modes():
            x = output = x.clone()
    is_staged = x.is_cuda and distributed.get_backend(axis.group) == "gloo"
    if is_staged:
        x = _stage_on_host(x)
        output = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    try:
        if _has_saving_mode():
            with hide_from_dispatch_modes():
                work = call(output, x)
        else:
            work = call(output, x)
    except RuntimeError as error:
        raise CommunicationError(_failure_message(axis, event, error)) from error
    return PendingTensor(
        output, _WorkHandle(axis, event, work, output, finish, device, x, is_staged)
    )


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


def _empty_rows(like: Tensor, rows: int, axis: Axis) -> Tensor:
    """Returns memory with `rows` rows like `like` for a result, hidden from dispatch modes."""
    return _empty((rows, *like.shape[1:]), like, axis)


def _empty(shape: Sequence[int], like: Tensor, axis: Axis) -> Tensor:
    """Returns memory for a result over an axis, hidden from dispatch modes."""
    assert axis.runner is not None, f"a collective over {axis}: this grid has no processes"
    if _has_saving_mode():
        with hide_from_dispatch_modes():
            return like.new_empty(shape)
    return axis.runner.empty(shape, like)


def _empty_like(x: Tensor, axis: Axis) -> Tensor:
    """Returns contiguous memory like `x` for a result, hidden from dispatch modes."""
    if x.nbytes < LARGE_BYTES and not _has_saving_mode():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _empty(x.shape, x, axis)


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
    gather_into(every, mine.to(device), group=axis.group)
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
    if dim == 0:
        return x.contiguous()
    return x.movedim(dim, 0).contiguous()


def _move_first_dim(x: Tensor, dim: int) -> Tensor:
    """Returns `x` with its first dim as `dim`; the inverse of `_move_dim_first`."""
    if dim == 0:
        return x
    return x.movedim(0, dim)


def _reuse_saved_result(verb: CollectiveFunction[P]) -> CollectiveFunction[P]:
    """Wraps a collective so that a recomputed block reuses its saved result.

    See `memory.saved_results`. The bucket scheduler shares gathered weights between both runs.
    """

    @functools.wraps(verb)
    def call(x: Tensor, axis: Axis, /, *args: P.args, **kwargs: P.kwargs) -> PendingTensor:
        results = axis.trace.saved_results
        # No block is running, the axis has one rank, or weights are gathered.
        if results is None or axis.size == 1 or axis.channel in WEIGHT_CHANNELS:
            return verb(x, axis, *args, **kwargs)
        return PendingTensor(results.run_once(lambda: verb(x, axis, *args, **kwargs).wait()))

    return call


def _choose_algorithm(
    op: str, axis: Axis, num_bytes: int, *, ragged: bool = False
) -> tuple[str, CollectiveRunner]:
    """Returns the algorithm of a collective, and what runs it. ragged: parts differ in size."""
    assert axis.runner is not None, f"{op} over {axis}: this grid has no processes"
    assert axis.rules is not None
    algorithm = axis.rules.algorithm(op, num_bytes)
    # The backends have no collectives of unequal parts.
    if ragged and algorithm == NATIVE:
        algorithm = RAGGED_ALGORITHM
    return algorithm, axis.runner


def _return(out: Tensor) -> Tensor:
    return out


@_reuse_saved_result
def all_gather(
    x: Tensor, axis: Axis, dim: int = 0, *, counts: Sequence[int] | None = None
) -> PendingTensor:
    """Concatenates the tensors of all ranks along `dim`.

    x: `[..., n, ...]`; y: `[..., n·size, ...]`. counts: the n of each rank, if they differ.
    Communicates: all-gather over axis.
    """
    if axis.size == 1:
        return PendingTensor(x)
    if torch.compiler.is_compiling():
        return PendingTensor(functional.all_gather(x, axis, dim, counts))
    counts = _unequal_counts(counts)
    part = _move_dim_first(x, dim)
    rows = part.shape[0] * axis.size if counts is None else sum(counts)
    num_bytes = rows * math.prod(part.shape[1:]) * part.element_size()
    algorithm, runner = _choose_algorithm("all_gather", axis, num_bytes, ragged=counts is not None)
    output = _empty_rows(part, rows, axis)

    if algorithm == NATIVE:
        # c10d gathers in the order of sorted ranks; the axis may have another order.
        def call(out: Tensor, part: Tensor) -> Any:
            return gather_into(out, part, group=axis.group, async_op=True)

        def finish(out: Tensor) -> Tensor:
            return _move_first_dim(functional.reorder_parts(out, axis, to_group=False), dim)
    else:

        def call(out: Tensor, part: Tensor) -> Any:
            return runner.all_gather(algorithm, part, out, _elements(part, counts))

        def finish(out: Tensor) -> Tensor:
            return _move_first_dim(out, dim)

    return _start_collective("all_gather", axis, num_bytes, part, output, call, finish, algorithm)


@_reuse_saved_result
def reduce_scatter(
    x: Tensor, axis: Axis, dim: int = 0, *, counts: Sequence[int] | None = None
) -> PendingTensor:
    """Sums over all ranks and returns this rank's part along `dim`.

    x: `[..., n·size, ...]`; y: `[..., n, ...]`. counts: the n of each rank, if they differ.
    Communicates: reduce-scatter over axis.
    """
    if axis.size == 1:
        return PendingTensor(x)
    if counts is None:
        assert x.shape[dim] % axis.size == 0, (x.shape, dim, axis.size)
    if torch.compiler.is_compiling():
        return PendingTensor(functional.reduce_scatter(x, axis, dim, counts))
    counts = _unequal_counts(counts)
    parts = _move_dim_first(x, dim)
    rows = parts.shape[0] // axis.size if counts is None else counts[axis.index]
    algorithm, runner = _choose_algorithm(
        "reduce_scatter", axis, x.nbytes, ragged=counts is not None
    )
    output = _empty_rows(parts, rows, axis)

    if algorithm == NATIVE:
        parts = functional.reorder_parts(parts, axis, to_group=True)

        def call(out: Tensor, parts: Tensor) -> Any:
            return scatter_into(out, parts, group=axis.group, async_op=True)
    else:

        def call(out: Tensor, parts: Tensor) -> Any:
            return runner.reduce_scatter(algorithm, parts, out, _elements(parts, counts))

    return _start_collective(
        "reduce_scatter",
        axis,
        x.nbytes,
        parts,
        output,
        call,
        lambda out: _move_first_dim(out, dim),
        algorithm,
    )


def _unequal_counts(counts: Sequence[int] | None) -> Sequence[int] | None:
    """Returns the counts, or None if they are equal, so that any algorithm can run."""
    return None if counts is None or len(set(counts)) == 1 else counts


def _elements(x: Tensor, counts: Sequence[int] | None) -> list[int] | None:
    """Returns the elements of parts with these numbers of rows."""
    if counts is None:
        return None
    row = math.prod(x.shape[1:])
    return [count * row for count in counts]


@_reuse_saved_result
def all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum") -> PendingTensor:
    """Reduces over all ranks (sum, max or min); `x` must not change until the result is waited for.

    Communicates: all-reduce over axis.
    """
    if axis.size == 1:
        return PendingTensor(x)
    if torch.compiler.is_compiling():
        return PendingTensor(functional.all_reduce(x, axis, op))
    num_bytes = x.nbytes
    algorithm, runner = _choose_algorithm("all_reduce", axis, num_bytes)
    if algorithm != NATIVE:
        return _start_collective(
            "all_reduce",
            axis,
            num_bytes,
            x.contiguous(),
            _empty_like(x, axis),
            lambda out, x: runner.all_reduce(algorithm, x, out, op),
            _return,
            algorithm,
        )
    # c10d reduces in place, but `x` must not change.
    copy = x.clone(memory_format=torch.contiguous_format)

    def call(out: Tensor, value: Tensor) -> Any:
        # They differ if the tensor was staged on the host.
        if out is not value:
            out.copy_(value)
        return distributed.all_reduce(out, REDUCE_OPS[op], group=axis.group, async_op=True)

    return _start_collective("all_reduce", axis, x.nbytes, copy, copy, call, _return)


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
    assert (send is None) == (receive is None), "give both send and receive counts, or neither"
    algorithm, runner = _choose_algorithm("all_to_all", axis, x.nbytes)
    parts = x.contiguous()
    output = _empty_rows(parts, parts.shape[0] if receive is None else sum(receive), axis)
    if algorithm == SHARED_MEMORY:
        memory = runner.shared_memory
        assert memory is not None
        return _start_collective(
            "all_to_all",
            axis,
            x.nbytes,
            parts,
            output,
            lambda out, parts: memory.all_to_all(
                parts, out, _elements(parts, send), _elements(parts, receive)
            ),
            _return,
            algorithm,
        )
    # Parts are permuted to the order of the group before the exchange, and back after it.
    parts = functional.reorder_parts(parts, axis, to_group=True, counts=send)
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
        x.nbytes,
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
    algorithm, runner = _choose_algorithm("broadcast", axis, x.nbytes)
    copy = x.clone(memory_format=torch.contiguous_format)

    def call(out: Tensor, value: Tensor) -> Any:
        if out is not value:
            out.copy_(value)
        if algorithm == SHARED_MEMORY:
            assert runner.shared_memory is not None
            return runner.shared_memory.broadcast(out, out, index)
        return distributed.broadcast(out, axis.ranks[index], group=axis.group, async_op=True)

    return _start_collective("broadcast", axis, x.nbytes, copy, copy, call, _return, algorithm)


def send(x: Tensor, axis: Axis, to: int) -> PendingTensor:
    """Sends to the rank at index `to` of the axis. Communicates: point to point over axis."""
    part = x.contiguous()
    algorithm, runner = _choose_algorithm("send", axis, x.nbytes)

    def call(_: Tensor, part: Tensor) -> Any:
        if algorithm == SHARED_MEMORY:
            assert runner.shared_memory is not None
            return runner.shared_memory.send(part, to)
        return distributed.isend(part, axis.ranks[to], group=axis.group)

    return _start_collective("send", axis, x.nbytes, part, part, call, _return, algorithm)


def receive(like: Tensor, axis: Axis, source: int) -> PendingTensor:
    """Receives a tensor like `like` from index `source`. Communicates: point to point over axis."""
    algorithm, runner = _choose_algorithm("receive", axis, like.nbytes)
    output = _empty(like.shape, like, axis)

    def call(out: Tensor, _: Tensor) -> Any:
        if algorithm == SHARED_MEMORY:
            assert runner.shared_memory is not None
            return runner.shared_memory.receive(out, source)
        return distributed.irecv(out, axis.ranks[source], group=axis.group)

    return _start_collective("receive", axis, like.nbytes, output, output, call, _return, algorithm)

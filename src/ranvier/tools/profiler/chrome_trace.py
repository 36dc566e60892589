"""Kernels of a profile: read from a Chrome trace, with their group, FLOPs and bytes.

A trace contains the events of the host (operators with the shapes of their inputs, driver calls)
and of the device (kernels, copies). A kernel has the correlation id of the call that launched it,
and the call is nested in operators. So each kernel has an operator, whose shapes give

    matmul          2 · m · n · k
    attention       4 · b · h · s · s · k, half of it if causal; backward 2.5 times that
    other           bytes of inputs and outputs, each tensor once (even if a Triton kernel, whose
                    code is not known, both reads and writes it)

Values that do not follow from shapes are None: operators outside the tables below, lists of tensors
(the trace does not contain their dtype), attention over ragged documents, kernels of a CUDA graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

OPTIMIZER_SCOPE = "optimizer"
"""Name under which the profiler records the optimizer step."""
TRITON_PREFIX = "triton::"
"""Prefix of the names of Triton functions that the profiler records."""
KERNEL_GROUPS = (
    *("matmul", "attention", "norm, elementwise", "cross-entropy", OPTIMIZER_SCOPE),
    *("copies", "communication", "other"),
)
ELEMENT_BYTES = {
    "double": 8,
    "float": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
"""Bytes of an element by the name of its dtype in traces."""
FLOAT_TYPES = ("double", "float", "c10::BFloat16", "c10::Half")
HALF_TYPES = ("c10::BFloat16", "c10::Half")
FLOAT8_TYPES = ("c10::Float8_e4m3fn", "c10::Float8_e5m2")
MATMUL_OPS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0}
"""Matmuls, and the index of the left factor; the right one follows it."""
ATTENTION_OPS = tuple(
    f"_scaled_dot_product_{kind}_attention{where}"
    for kind, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
)
COMPARISON_OPS = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "logical_and", "logical_or"),
}
"""Elementwise operators whose output is bool."""
POINTWISE_OPS = COMPARISON_OPS | {
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sign", "exp", "log", "sqrt", "rsqrt"),
    *("reciprocal", "pow", "square", "sigmoid", "silu", "gelu", "relu", "tanh", "cos", "sin"),
    *("clamp", "clamp_min", "clamp_max", "where", "addcmul", "addcdiv", "lerp", "masked_fill"),
    *("maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_not", "sigmoid_backward"),
    *("silu_backward", "gelu_backward", "tanh_backward", "threshold_backward"),
}
"""Operators whose output has the broadcast shape of their inputs."""
REDUCTION_OPS = {"sum", "mean", "amax", "amin", "prod", "linalg_vector_norm", "max", "min", "any"}
COPY_OPS = {"copy_", "_to_copy", "clone", "contiguous", "fill_", "zero_", "cat", "stack", "index"}


@dataclass(frozen=True)
class Op:
    """A host operator as a trace describes it; one entry per argument."""

    name: str
    dims: Sequence[Any] = ()
    types: Sequence[str] = ()
    strides: Sequence[Any] = ()
    values: Sequence[str] = ()
    """Arguments that are not tensors, as text."""

    @property
    def base_name(self) -> str:
        """The name without its namespace."""
        return self.name.rpartition("::")[2]


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or (on a CPU) operator; times are in microseconds."""

    name: str
    op: str
    """The operator that launched it; empty if unknown."""
    start: float
    duration: float
    """On a CPU without the time of nested operators."""
    shapes: tuple[Any, ...] = ()
    """Shapes of the inputs of the operator."""
    stream: str = ""
    types: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    """Operators and annotations around its launch, outermost first."""
    flops: float | None = None
    bytes: float | None = None
    span: float | None = None
    """On a CPU: time from start to end, with nested operators."""

    @property
    def end(self) -> float:
        """Time of its end."""
        return self.start + (self.duration if self.span is None else self.span)

    @property
    def is_local(self) -> bool:
        """Whether it moves bytes only within the device's own memory."""
        return not self.name.startswith(("Memcpy HtoD", "Memcpy DtoH", "Memcpy PtoP"))

    @property
    def group(self) -> str:
        """Its group, one of KERNEL_GROUPS."""
        return classify_kernel(self.name, self.op, self.scope)


# ---- groups and names -----------------------------------------------------------------------

_COMMUNICATION = re.compile(r"nccl|rccl|^c10d::|^gloo:|record_param_comms|_c10d_functional", re.I)
_ATTENTION = re.compile(r"attention|attn|flash_|fmha|sdpa", re.I)
_MATMUL = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|scaled_mm|triton_tem\w*_(add|b)?mm_|Cijk_", re.I
)
_FUSED = re.compile(r"triton_(poi|red|per)_")
_LOSS = re.compile(r"loss|cross_?entropy|log_softmax", re.I)
_ELEMENTWISE = re.compile(r"norm|softmax|elementwise|reduce_kernel|^triton_|rotary|dropout", re.I)


def classify_kernel(name: str, op: str, scope: Sequence[str] = ()) -> str:
    """Returns the group of a kernel by its name, its operator and the scopes around it."""
    base = op.rpartition("::")[2]
    around = [name, op, *scope]
    plain = base.removesuffix("_")
    # The order of the tests matters: a name can match several groups, and the first match counts.
    if any(_COMMUNICATION.search(word) for word in around):
        return "communication"
    if OPTIMIZER_SCOPE in scope:
        return OPTIMIZER_SCOPE
    # The name of a fused kernel also lists neighboring operators, so "attention" in it is not
    # significant.
    fused = _FUSED.match(name)
    if not fused and any(_ATTENTION.search(word) for word in around):
        return "attention"
    if base in MATMUL_OPS or _MATMUL.search(name):
        return "matmul"
    if any(_LOSS.search(word) for word in around):
        return "cross-entropy"
    if name.startswith(("Memcpy", "Memset")) or base in COPY_OPS:
        return "copies"
    if (
        op.startswith(TRITON_PREFIX)
        or plain in POINTWISE_OPS | REDUCTION_OPS
        or any(map(_ELEMENTWISE.search, (name, base)))
    ):
        return "norm, elementwise"
    return "other"


def short_kernel_name(name: str) -> str:
    """Returns a kernel's name without types, arguments and namespaces."""
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    plain = name.removeprefix("void ").removeprefix("autograd::engine::evaluate_function: ")
    text, arguments = _strip_brackets(plain.replace("(anonymous namespace)::", ""))
    base = (text.split() or [name])[-1].rpartition("::")[2]
    # CUTLASS kernels all have this generic name; the template argument identifies the kernel.
    if base.lower() in ("kernel", "kernel2", "device_kernel") and arguments:
        return short_kernel_name(arguments.split(",")[0])
    return base or name


def _strip_brackets(name: str) -> tuple[str, str]:
    """Returns the part of a name outside of brackets, and the content of the first angle
    brackets.
    """
    outside = []
    inside = []
    depth = 0
    first = True
    for letter in name:
        if letter in ">)":
            depth = max(depth - 1, 0)
            first = first and not (letter == ">" and depth == 0)
        elif letter in "<(":
            depth += 1
        elif depth == 0:
            outside.append(letter)
        if depth > 0 and first:
            inside.append(letter)
    return "".join(outside), "".join(inside).removeprefix("<")


# ---- work -----------------------------------------------------------------------------------


def argument_bytes(op: Op, i: int) -> int | None:
    """Returns the bytes of an argument; 0 if it is not a tensor, None if dtype or shape is
    unknown.
    """
    if i < len(op.types):
        kind = op.types[i]
    else:
        kind = ""
    if kind in ("", "Scalar", "ScalarList"):
        return 0
    if kind not in ELEMENT_BYTES or i >= len(op.dims):
        return None
    dims = op.dims[i]
    if i < len(op.strides):
        strides = op.strides[i]
    else:
        strides = []
    # A dimension of stride 0 (expanded) reads the same element repeatedly: count it once.
    if len(strides) == len(dims):
        dims = [n for n, stride in zip(dims, strides, strict=True) if stride != 0 or n == 0]
    return int(math.prod(dims)) * ELEMENT_BYTES[kind]


def _input_bytes(op: Op) -> int | None:
    """Returns the bytes of all inputs; None if one is unknown."""
    sizes = [argument_bytes(op, i) for i in range(len(op.types))]
    if None in sizes:
        return None
    return sum(size or 0 for size in sizes)


def _tensor_inputs(op: Op) -> list[tuple[list[int], str]]:
    """Returns shape and dtype of the inputs that are tensors."""
    pairs = zip(op.dims, op.types, strict=False)
    return [(list(dims), kind) for dims, kind in pairs if kind in ELEMENT_BYTES]


def _argument_indices(name: str, *arguments: str) -> tuple[int, ...] | None:
    """Returns the positions of arguments in the schema of an aten operator; None if one is
    missing.
    """
    try:
        schema = getattr(torch.ops.aten, name).default._schema
        names = [argument.name for argument in schema.arguments]
        return tuple(names.index(argument) for argument in arguments)
    except (AttributeError, ValueError):
        return None


def count_flops(op: Op) -> int | None:
    """Returns the FLOPs of a matmul or of attention; None for anything else."""
    if not op.name.startswith("aten::"):
        return None
    if op.base_name in MATMUL_OPS:
        left, right = (op.dims[i] if i < len(op.dims) else [] for i in _factor_indices(op))
        # [m, k] x [k, n], or with a batch dim in front: 2 · (b ·) m · k · n.
        if len(left) not in (2, 3) or len(right) != len(left) or left[-1] != right[-2]:
            return None
        return 2 * int(math.prod(left)) * int(right[-1])
    if op.base_name.removesuffix("_backward") in ATTENTION_OPS:
        return _attention_flops(op)
    return None


def _factor_indices(op: Op) -> tuple[int, int]:
    return MATMUL_OPS[op.base_name], MATMUL_OPS[op.base_name] + 1


def _attention_flops(op: Op) -> int | None:
    """Returns the FLOPs for q, k `[b, h, s, d]`: 4 · b · h · s · s · d; half if causal, 2.5 times
    that in backward.
    """
    places = _argument_indices(op.base_name, "query", "key", "is_causal")
    if places is None or max(places) >= min(len(op.dims), len(op.values)):
        return None
    query, key, causal = places
    if len(op.dims[query]) != 4 or len(op.dims[key]) != 4:
        return None
    full = 4 * int(math.prod(op.dims[query])) * int(op.dims[key][2])
    if op.values[causal] == "True":
        full = full // 2
    # Backward has five matmuls (it recomputes the scores), forward two.
    if op.base_name.endswith("_backward"):
        return full * 5 // 2
    return full


def count_bytes(op: Op) -> int | None:
    """Returns the bytes of inputs and outputs of an operator, each once; None if unknown."""
    inputs = _input_bytes(op)
    if inputs is None or not op.types:
        return None
    # The arguments of a Triton function include its outputs.
    if op.name.startswith((TRITON_PREFIX, "triton_")):
        return inputs
    if not op.name.startswith("aten::"):
        return None
    first = argument_bytes(op, 0) or 0
    # In-place operators: the destination is an argument. `copy_` and fills only write it; others
    # also read it.
    if op.base_name == "copy_":
        return inputs
    if op.base_name in ("fill_", "zero_"):
        return first
    if op.base_name.endswith("_") and op.base_name.removesuffix("_") in POINTWISE_OPS:
        return inputs + first
    out = _output_bytes(op)
    if out is None:
        return None
    return inputs + out


def _output_bytes(op: Op) -> int | None:
    """Returns the bytes of the output of an operator; None if unknown."""
    tensors = _tensor_inputs(op)
    plain = op.base_name.removesuffix("_backward")
    if not tensors:
        return None
    if op.base_name in MATMUL_OPS:
        left, right = (op.dims[i] for i in _factor_indices(op))
        kind = ELEMENT_BYTES.get(op.types[0], 0)
        same = op.base_name != "_scaled_mm" and len(left) in (2, 3) and len(right) == len(left)
        if same:
            return int(math.prod(left[:-1])) * int(right[-1]) * kind
        return None
    if op.base_name in POINTWISE_OPS:
        try:
            shape = torch.broadcast_shapes(*(dims for dims, _ in tensors))
        except RuntimeError:
            return None
        return int(math.prod(shape)) * (
            1 if op.base_name in COMPARISON_OPS else _result_itemsize(tensors)
        )
    # The output has the shape of q; gradients have the shapes of q, k and v, which follow it.
    if plain in ATTENTION_OPS:
        size = [math.prod(dims) * ELEMENT_BYTES[kind] for dims, kind in tensors]
        if op.base_name.endswith("_backward"):
            return sum(size[1:4])
        return size[0]
    if op.base_name in ("sum", "mean", "amax", "amin"):
        return _reduction_bytes(op)
    return None


def _result_itemsize(tensors: Sequence[tuple[list[int], str]]) -> int:
    """Returns the bytes per element of the result, by torch's type promotion.

    Floats take precedence over integers, tensors with dims over scalars.
    """
    whole = [kind for dims, kind in tensors if dims] or [kind for _, kind in tensors]
    real = [kind for kind in whole if kind in FLOAT_TYPES]
    return max(ELEMENT_BYTES[kind] for kind in real or whole)


def _reduction_bytes(op: Op) -> int | None:
    """Returns the bytes of the output of a reduction whose dims the trace contains."""
    dims, kind = _tensor_inputs(op)[0]
    if len(op.values) > 1:
        over = op.values[1]
    else:
        over = ""
    if not re.fullmatch(r"\[[-\d, ]*\]", over) or (len(op.values) > 3 and op.values[3]):
        return None
    if dims:
        gone = {int(i) % len(dims) for i in re.findall(r"-?\d+", over)}
    else:
        gone = set()
    # An empty list of dims reduces all of them to one element.
    kept = [n for i, n in enumerate(dims) if gone and i not in gone]
    return int(math.prod(kept)) * ELEMENT_BYTES[kind]


# ---- reading a trace ------------------------------------------------------------------------


@dataclass
class _HostEvent:
    """An event of the host, and the event that encloses it."""

    raw: Mapping[str, Any]
    parent: _HostEvent | None = None
    inner_time: float = 0.0
    """Microseconds of the operators directly nested in it."""
    key: int = 0

    @property
    def is_op(self) -> bool:
        """Whether it is a torch operator."""
        return self.raw.get("cat") == "cpu_op"

    @property
    def is_scope(self) -> bool:
        """Whether it can enclose other events; driver calls cannot."""
        return self.raw.get("cat") in ("cpu_op", "user_annotation")

    def get_argument(self, name: str) -> Any:
        """Returns an argument of the event in the trace; None if missing."""
        return self.raw.get("args", {}).get(name)

    def enclosing_events(self) -> list[_HostEvent]:
        """Returns the event itself and the events that enclose it, innermost first."""
        return [self, *(self.parent.enclosing_events() if self.parent else [])]

    def to_op(self) -> Op:
        """Returns the event as an operator."""
        told = self.raw.get("args", {})
        names = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
        dims, types, strides, values = (told.get(name, ()) for name in names)
        return Op(str(self.raw["name"]), dims, types, strides, values)


DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")


def read_kernels(trace: Mapping[str, Any]) -> list[Kernel]:
    """Returns the kernels of a Chrome trace sorted by start; for a CPU trace, its operators."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    host = _nest_events([event for event in events if event.get("cat") in HOST_CATEGORIES])
    device = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    if device:
        return _device_kernels(device, host)
    kernels = [_kernel_from_op(event) for event in host if event.is_op]
    return sorted(kernels, key=lambda kernel: kernel.start)


def _nest_events(events: Iterable[Mapping[str, Any]]) -> list[_HostEvent]:
    """Returns the events of the host, each nested in the last open event on its thread."""
    open_on: dict[Any, list[_HostEvent]] = {}
    made = []
    # Of events that start together, the longest encloses the others, so it comes first.
    order = sorted(events, key=lambda raw: (float(raw["ts"]), -float(raw.get("dur", 0.0))))
    for key, raw in enumerate(order):
        stack = open_on.setdefault((raw["pid"], raw["tid"]), [])
        while stack and _end_time(stack[-1].raw) <= float(raw["ts"]):
            stack.pop()
        event = _HostEvent(raw, stack[-1] if stack else None, key=key)
        # The time of nested operators is subtracted from the innermost operator around them, across
        # annotations.
        outer = next((one for one in event.enclosing_events()[1:] if one.is_op), None)
        if outer is not None and event.is_op:
            outer.inner_time += float(raw.get("dur", 0.0))
        if event.is_scope:
            stack.append(event)
        made.append(event)
    return made


def _end_time(raw: Mapping[str, Any]) -> float:
    return float(raw["ts"]) + float(raw.get("dur", 0.0))


def _kernel_from_op(event: _HostEvent) -> Kernel:
    """Returns a CPU operator as a kernel."""
    op = event.to_op()
    span = float(event.raw.get("dur", 0.0))
    return Kernel(
        op.name,
        op.name,
        float(event.raw["ts"]),
        max(span - event.inner_time, 0.0),
        tuple(op.dims),
        str(event.raw["tid"]),
        tuple(op.types),
        tuple(str(one.raw["name"]) for one in reversed(event.enclosing_events()[1:])),
        count_flops(op),
        count_bytes(op),
        span,
    )


def _device_kernels(
    device: Iterable[Mapping[str, Any]], host: Sequence[_HostEvent]
) -> list[Kernel]:
    """Returns kernels with the operators that launched them, and their share of the work."""
    # Two ways from a kernel to its operator: by the driver call that launched it, and by the
    # external id of the operator itself. The first one that finds an operator counts.
    calls = {event.get_argument("correlation"): event for event in host if not event.is_scope}
    numbered = {event.get_argument("External id"): event for event in host if event.is_op}
    for table in (calls, numbered):
        table.pop(None, None)
    kernels: list[Kernel] = []
    owned: dict[int, tuple[_HostEvent, list[int]]] = {}
    for raw in sorted(device, key=lambda raw: float(raw["ts"])):
        told = raw.get("args", {})
        found = (calls.get(told.get("correlation")), numbered.get(told.get("External id")))
        chains = [event.enclosing_events() for event in found if event]
        around = next((c for c in chains if any(one.is_op for one in c)), (chains or [[]])[0])
        ops = [event for event in around if event.is_op]
        op = ops[0].to_op() if ops else Op("")
        kernels.append(
            Kernel(
                str(raw["name"]),
                op.name,
                float(raw["ts"]),
                float(raw.get("dur", 0.0)),
                tuple(op.dims),
                str(told.get("stream", raw["tid"])),
                tuple(op.types),
                tuple(str(event.raw["name"]) for event in reversed(around) if event.is_scope),
            )
        )
        # An operator may launch several kernels; its work is assigned once all of them are known.
        owner = _owning_op(ops)
        if raw["cat"] != "kernel":
            kernels[-1] = replace(kernels[-1], bytes=_copied_bytes(raw))
        elif owner is not None:
            owned.setdefault(owner.key, (owner, []))[1].append(len(kernels) - 1)
    for owner, places in owned.values():
        _assign_work(kernels, places, owner.to_op())
    return kernels


def _copied_bytes(raw: Mapping[str, Any]) -> float | None:
    """Returns the bytes that a copy or fill moves in device memory. A copy to or from the host
    counts once.
    """
    size = raw.get("args", {}).get("bytes")
    if size is None:
        return None
    return float(size) * (2.0 if "DtoD" in str(raw["name"]) else 1.0)


def _owning_op(ops: Sequence[_HostEvent]) -> _HostEvent | None:
    """Returns the operator whose work a kernel does: the innermost one with known work."""
    if ops and count_bytes(ops[0].to_op()) is not None:
        return ops[0]
    return next((event for event in ops if count_flops(event.to_op()) is not None), None)


def _assign_work(kernels: list[Kernel], places: Sequence[int], op: Op) -> None:
    """Assigns the work of an operator to its longest kernel.

    Other kernels of the same name get zero, which keeps their sum correct. For kernels with another
    name the work is unknown; it is unknown for all if the operator is neither a matmul nor
    attention.
    """
    work = count_flops(op)
    size = count_bytes(op)
    main = max(places, key=lambda i: kernels[i].duration)
    same = [i for i in places if kernels[i].name == kernels[main].name]
    if work is None and len(same) < len(places):
        return
    for i in same:
        some = 1.0 if i == main else 0.0
        kernels[i] = replace(
            kernels[i],
            flops=None if work is None else work * some,
            bytes=None if size is None else size * some,
            types=tuple(op.types),
        )

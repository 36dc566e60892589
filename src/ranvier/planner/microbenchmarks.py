"""Microbenchmarks: rates of the ranks of a machine, measured as rows of a cluster file.

Ranks on CPUs share cores, so each row has the number of concurrent ranks. All of them start
together and continue for some milliseconds, and the mean is taken. Processor time is counted,
scaled by the ranks per core, so that other processes on the machine do not matter. An accelerator
(CUDA) is measured on one rank.

    matmuls     x Wᵀ, dy W, dyᵀ x                  FLOPs per second by m, n, k and dtype
    attention   causal, forward and backward       FLOPs per second: 2 b h s² k, and 2.5 times that
    memory      y = x                              bytes read and written per second
    between     silu, norm, sums and products      the same, one operation after the other
    update      one fused AdamW                    parameters per second; norm: of their squares
    cast        to 8 bits, plain and transposed    bytes of the 16-bit tensor per second
    launch      one small operation from Python    seconds, alone (launch), with backward (pair)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.nn import float8
from ranvier.nn.attention_backends import BACKENDS, AttentionFunction, supports_inputs
from ranvier.nn.autotune import random_tensors
from ranvier.optim import fused_adamw
from ranvier.optim.adamw import UpdateScalars
from ranvier.optim.low_precision_states import Moments
from ranvier.planner.cluster import AttentionRate, MatmulRate, MeasuredRate

MeasuredRow = MatmulRate | AttentionRate | MeasuredRate
Barrier = Callable[[], None]
WARMUP_CALLS = 3
"""Number of untimed calls: libraries select their kernels in the first ones."""
ELEMENTWISE_TENSORS = 16
"""Number of tensors that the elementwise operations read and write, each in its own memory."""
HEATUP_SECONDS = 3.0
"""Seconds of load before a device is measured."""
ROWWISE_TOKENS = 16384
"""Number of tokens of matmuls with row-wise scales."""
CHAINED_OPS = 32
"""Number of small operations in a row."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def ranks_per_core(ranks: int) -> float:
    """Returns the ranks per core, at least 1."""
    return max(ranks / (os.cpu_count() or 1), 1.0)


@dataclass(frozen=True)
class BenchmarkShapes:
    """The shapes that are measured."""

    matmuls: tuple[tuple[int, int, int], ...]
    """Tokens, output features, input features."""
    attention: tuple[tuple[int, int, int, int, int], ...]
    """Samples, tokens per sample, heads, key and value heads, head_dim."""
    copy_bytes: int
    """Bytes of a copied tensor."""
    update_parameters: int
    """Parameters per optimizer update."""
    min_seconds: float
    """Minimum time for which a number is measured."""


CUDA_LAYER_SHAPES = (
    *((1024, 1024), (1536, 1024), (8192, 1024), (1024, 4096)),
    *((2048, 2048), (3072, 2048), (16384, 2048), (2048, 8192)),
    *((3072, 3072), (5120, 3072), (16384, 3072), (3072, 8192)),
    *((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)),
)
"""Output and input features of layers of models that are trained on accelerators."""
HOST_LAYER_SHAPES = ((96, 96), (192, 192), (768, 192), (192, 768))
CUDA_SHAPES = BenchmarkShapes(
    matmuls=(
        *((t, o, i) for t in (4096, 16384, 32768) for o, i in CUDA_LAYER_SHAPES),
        *((t, 128256, i) for t in (1024, 4096) for i in (1024, 2048, 4096)),
        *((512, 4096, 4096), (128, 4096, 4096)),
    ),
    attention=(
        *((4, 4096, 16, 8, 64), (4, 4096, 32, 8, 64), (4, 4096, 24, 8, 128)),
        *((1, 4096, 32, 8, 128), (4, 2048, 32, 8, 128), (1, 16384, 32, 8, 128)),
    ),
    copy_bytes=2**28,
    update_parameters=2**27,
    min_seconds=0.03,
)
HOST_SHAPES = BenchmarkShapes(
    matmuls=(
        *((t, o, i) for t in (96, 384, 1536) for o, i in HOST_LAYER_SHAPES),
        *((192, 4096, 192), (768, 4096, 192), (256, 1024, 1024)),
    ),
    attention=((1, 96, 3, 3, 64), (8, 96, 6, 6, 32), (2, 256, 8, 8, 64)),
    copy_bytes=2**19,
    update_parameters=2**20,
    min_seconds=0.01,
)


@dataclass
class Microbenchmark:
    """A rank that runs the benchmarks, alone or with others."""

    device: torch.device
    ranks: int = 1
    """Number of ranks that run the same benchmark at the same time."""
    barrier: Barrier = lambda: None
    """Waits for all of them."""
    shapes: BenchmarkShapes = HOST_SHAPES
    dtypes: tuple[str, ...] = ("fp32",)
    """Dtypes of matmuls."""
    on_progress: Callable[[str], None] = lambda _: None
    """Called with the name of the current benchmark."""
    rows: list[MeasuredRow] = field(default_factory=list)

    @classmethod
    def for_device(cls, device: torch.device, **rest: Any) -> Microbenchmark:
        """Returns a benchmark with the shapes and dtypes of a device."""
        if device.type != "cuda":
            return cls(device, **rest)
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        kinds: tuple[str, ...] = ("bf16" if has else "fp16", "fp32")
        kinds += ("fp8", "fp8row") if has and float8.supports_device(device) else ()
        return cls(device, shapes=CUDA_SHAPES, dtypes=kinds, **rest)

    def run_all(self) -> list[MeasuredRow]:
        """Returns all rows of a device."""
        # Attention is measured outside of no_grad, as it needs a backward pass.
        with torch.no_grad():
            self.heat_up()
            for part in (
                self.benchmark_launches,
                self.benchmark_memory,
                self.benchmark_updates,
                self.benchmark_matmuls,
                self.benchmark_casts,
            ):
                self.rows += part()
        self.rows += self.benchmark_attention()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self.rows

    def time_call(self, work: Callable[[], object]) -> float:
        """Returns the seconds per call: the mean of as many calls as fit into `min_seconds`, with
        all ranks in parallel.
        """
        for _ in range(WARMUP_CALLS):
            work()
        self.synchronize()
        # One timed call determines the number of repetitions.
        begin = time.perf_counter()
        work()
        self.synchronize()
        each = max(time.perf_counter() - begin, 1e-7)
        count = max(min(int(self.shapes.min_seconds / each), 10_000), 2)
        # All ranks start together, so that they compete for cores the whole time.
        self.barrier()
        # On CUDA the calls are queued without synchronizing and timed by events on the device.
        if self.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(count):
                work()
            last.record()
            last.synchronize()
            taken: float = first.elapsed_time(last) / 1e3
            return taken / count
        begin = time.perf_counter()
        busy = time.process_time()
        done = 0
        while done < 2 or time.perf_counter() - begin < self.shapes.min_seconds:
            work()
            done += 1
        # Processor time includes all threads, so with several threads wall time is used.
        if torch.get_num_threads() > 1:
            return (time.perf_counter() - begin) / done
        return (time.process_time() - busy) / done * ranks_per_core(self.ranks)

    def heat_up(self) -> None:
        """Runs a device until it has the clock of a long run, which its power limit lowers."""
        if self.device.type != "cuda":
            return
        self.on_progress("warming up the device")
        (x,) = random_tensors([(8192, 8192)], DTYPES[self.dtypes[0]], self.device)
        begin = time.perf_counter()
        while time.perf_counter() - begin < HEATUP_SECONDS:
            for _ in range(20):
                x @ x
            self.synchronize()

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rate_row(self, kind: str, value: float) -> MeasuredRate:
        """Returns a row with one number."""
        return MeasuredRate(kind, value, self.ranks)

    # ---- benchmarks ---------------------------------------------------------------------

    def benchmark_matmuls(self) -> Iterator[MeasuredRow]:
        """Yields rates of matmuls: forward, gradient of the input, gradient of the weight."""
        for kind in self.dtypes:
            self.on_progress(f"matmuls in {kind}")
            for tokens, out, into in self.shapes.matmuls:
                # Few models are trained in fp32 on accelerators: square shapes are enough.
                if kind == "fp32" and self.device.type == "cuda" and out != into:
                    continue
                # Like one scale, but a little slower at all sizes: one size is enough.
                if kind == "fp8row" and tokens != ROWWISE_TOKENS:
                    continue
                for name, (m, n, k), seconds in self._time_matmuls(kind, tokens, out, into):
                    yield MatmulRate(m, n, k, kind, 2.0 * m * n * k / seconds, self.ranks, name)

    def _time_matmuls(
        self, kind: str, t: int, o: int, i: int
    ) -> Iterator[tuple[str, tuple[int, int, int], float]]:
        x, w, dy = random_tensors(
            [(t, i), (o, i), (t, o)], DTYPES.get(kind, torch.bfloat16), self.device
        )
        forward = (t, o, i)
        into = (t, i, o)
        weight = (o, i, t)
        if kind in DTYPES:
            yield "y", forward, self.time_call(lambda: x @ w.t())
            yield "dx", into, self.time_call(lambda: dy @ w)
            yield "dw", weight, self.time_call(lambda: dy.t() @ x)
            return
        one = float8.Float8Linear("rowwise" if kind == "fp8row" else "tensorwise")
        eighths = [
            one.quantize_both(a, t)
            for a, t in ((x, float8.E4M3), (w, float8.E4M3), (dy, one.grad_dtype))
        ]
        (x8, x8t), (w8, w8t), (dy8, dy8t) = eighths
        yield "y", forward, self.time_call(lambda: float8.scaled_matmul(x8, w8, x.dtype, fast=True))
        yield "dx", into, self.time_call(lambda: float8.scaled_matmul(dy8, w8t, x.dtype))
        yield "dw", weight, self.time_call(lambda: float8.scaled_matmul(dy8t, x8t, x.dtype))

    def benchmark_casts(self) -> Iterator[MeasuredRow]:
        """Yields rates of the scale of a tensor (its largest magnitude) and of casts to 8 bits,
        plain and transposed.
        """
        if "fp8" not in self.dtypes:
            return
        one = float8.Float8Linear("tensorwise")
        (x,) = random_tensors([(16384, 4096)], torch.bfloat16, self.device)
        yield self.rate_row(
            "scale", x.nbytes / self.time_call(lambda: one.compute_scales(x, float8.E4M3, 1))
        )
        yield self.rate_row("cast", x.nbytes / self.time_call(lambda: one.quantize(x, float8.E4M3)))
        yield self.rate_row(
            "both", x.nbytes / self.time_call(lambda: one.quantize_both(x, float8.E4M3))
        )

    def benchmark_memory(self) -> Iterator[MeasuredRow]:
        """Yields rates of copies in device memory and of elementwise operations."""
        self.on_progress("memory")
        x = torch.zeros(self.shapes.copy_bytes, dtype=torch.uint8, device=self.device)
        y = torch.zeros_like(x)
        yield self.rate_row("memory", 2.0 * x.nbytes / self.time_call(lambda: y.copy_(x)))
        a, b = random_tensors(
            [(self.shapes.copy_bytes // 1024, 256)] * 2, torch.float32, self.device
        )

        def between() -> None:
            a * b
            a + b
            F.silu(a)
            torch.ops.aten.silu_backward(a, b)
            a * torch.rsqrt(a.square().mean(-1, keepdim=True))

        yield self.rate_row("between", ELEMENTWISE_TENSORS * a.nbytes / self.time_call(between))

    def benchmark_attention(self) -> Iterator[MeasuredRow]:
        """Yields rates of causal attention, forward and backward, with the fastest backend."""
        self.on_progress("attention")
        for kind in self.dtypes[:2]:
            for shape in self.shapes.attention:
                yield self._benchmark_attention_shape(kind, *shape)

    def _benchmark_attention_shape(
        self, kind: str, b: int, s: int, heads: int, kv: int, width: int
    ) -> AttentionRate:
        sizes = [(b, s, heads, width), (b, s, kv, width), (b, s, kv, width)]
        q, k, v = (x.requires_grad_() for x in random_tensors(sizes, DTYPES[kind], self.device))
        (dy,) = random_tensors([(b, s, heads, width)], DTYPES[kind], self.device)
        # A run autotunes its attention backend, so the fastest one counts.
        ways = [way for name, way in BACKENDS.items() if supports_inputs(name, q, k, v)]
        forward, backward = min((self._time_attention(way, q, k, v, dy) for way in ways), key=sum)
        # Two matmuls of 2 s² width each, halved by the causal mask; backward has 2.5 times that.
        work = 2.0 * b * heads * s * s * width
        return AttentionRate(s, width, kind, work / forward, 2.5 * work / backward, self.ranks)

    def _time_attention(
        self, way: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, dy: Tensor
    ) -> tuple[float, float]:
        forward = self.time_call(partial(way, q, k, v))
        y = way(q, k, v)
        back = partial(torch.autograd.grad, y, (q, k, v), dy, retain_graph=True)
        return forward, self.time_call(back)

    def benchmark_updates(self) -> Iterator[MeasuredRow]:
        """Yields rates of AdamW on flat tensors, as in the optimizer; 16-bit weights have master
        weights.
        """
        self.on_progress("updates")
        kind = DTYPES[self.dtypes[0]]
        weight, mean, square = (
            torch.zeros(self.shapes.update_parameters, device=self.device) for _ in range(3)
        )
        grad = torch.zeros_like(weight, dtype=kind)
        if kind != weight.dtype:
            out = grad.clone()
        else:
            out = None
        one, good = (
            torch.ones((), device=self.device, dtype=t) for t in (torch.float64, torch.bool)
        )
        now = UpdateScalars.for_update(one, good, None, (0.9, 0.95), 1e-4)
        moments = Moments(mean, square)
        work = partial(fused_adamw.fused_adamw, weight, grad, moments, now=now, decay=0.1, out=out)
        yield self.rate_row("update", weight.numel() / self.time_call(work))
        yield self.rate_row(
            "norm", weight.numel() / self.time_call(lambda: fused_adamw.sum_of_squares([grad]))
        )

    def benchmark_launches(self) -> Iterator[MeasuredRow]:
        """Yields the overhead of Python and torch per small operation."""
        self.on_progress("small operations")
        x = torch.zeros(8, 8, device=self.device)
        leaf = x.clone().requires_grad_()

        def forward(x: Tensor) -> Tensor:
            for _ in range(CHAINED_OPS):
                x = x * 0.5
            return x

        def both() -> None:
            with torch.enable_grad():
                forward(leaf).backward(x)

        yield self.rate_row("launch", self.time_call(lambda: forward(x)) / CHAINED_OPS)
        yield self.rate_row("pair", self.time_call(both) / CHAINED_OPS)

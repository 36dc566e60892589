"""Matmuls of few rows on one GPU: Ranvier's choice of kernels against cuBLAS, layer by layer.

    python benchmarks/inference_matmul.py --csv inference_matmul.csv
    python benchmarks/inference_matmul.py --models llama3-8b --rows 2,32,64,112

A layer has more weights than the caches of the device hold. Its matmuls are captured as one CUDA
graph, each behind an elementwise kernel that writes its rows, as in a step of the engine; both are
timed. Before that, outputs are compared with those in fp32. The shapes `other` were not used to
choose tiles.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from paged_attention import copy_bandwidth, make_flush
from right_step import checked_ratio
from right_tokens import check_outputs
from rows import package_hash
from script_parser import ScriptParser
from torch import Tensor

from ranvier.nn.inference_matmul import ThinMatmul, can_multiply_thin

SHAPES = {
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_669, 1024)),
    "llama3-1b": ((3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048)),
    "2.8b": ((4608, 3072), (3072, 3072), (18_432, 3072), (3072, 9216), (100_003, 3072)),
    "llama3-8b": ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)),
    "other": ((1792, 3584), (5120, 1280), (7168, 2560), (3584, 18_944), (50_257, 768)),
}
"""Outputs and inputs of the layers of a model."""
TOY_SHAPES = {"toy": ((48, 32), (32, 48))}
GRAPH_BYTES = 3e8
"""Weights that a graph reads, so that the next replay finds none of them in a cache."""
MAX_LAYERS = 48
MAX_ERROR = 0.02
"""Of outputs in bf16, relative to the largest one."""
COLUMNS = ("model", "outputs", "inputs", "rows", "cublas_us", "ranvier_us", "speedup", "source")
Matmul = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """Weights of one shape, and the rows that they are multiplied with."""

    weights: Sequence[Tensor]
    source: Tensor
    x: Tensor
    """A copy of `source`, which the kernel before each matmul writes."""

    @classmethod
    def draw(cls, shape: tuple[int, int], rows: int, device: torch.device) -> Layer:
        """Returns a layer with random values."""
        num_outputs, num_inputs = shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        count = max(2, min(MAX_LAYERS, int(GRAPH_BYTES / (2 * num_outputs * num_inputs))))
        random = partial(torch.randn, device=device, dtype=dtype)
        weights = [
            random(shape) * num_inputs**-0.5 for _ in range(count if device.type == "cuda" else 2)
        ]
        source = random(rows, num_inputs)
        return cls(weights, source, source.clone())

    def run(self, matmul: Matmul) -> None:
        """Multiplies with each weight, behind an elementwise kernel."""
        for weight in self.weights:
            torch.mul(self.source, 1.0, out=self.x)
            matmul(self.x, weight)

    def outputs_of(self, matmul: Matmul) -> tuple[Tensor, Tensor]:
        """Returns the output of one matmul, and the same in fp32."""
        weight = self.weights[0]
        return matmul(self.x, weight), self.x.float() @ weight.float().T


def replay_seconds(layer: Layer, matmul: Matmul, flush: Tensor, repeats: int) -> float:
    """Returns the time of a matmul in a CUDA graph: a median over replays."""
    layer.run(matmul)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run(matmul)
    times = []
    for _ in range(repeats + 1):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[1:]) / len(layer.weights)


def main() -> None:
    """Prints a line for each layer and number of rows."""
    parser = ScriptParser(
        __doc__,
        smoke="--rows 2,5",
        skipped="the kernels need a GPU; layers are drawn, and their outputs checked.",
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="comma-separated")
    parser.add_argument("--rows", default="2,8,16,32,64,112", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="replays of each graph")
    parser.add_argument("--csv", type=Path, help="table to write")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_kernels = can_multiply_thin(device)
    matmuls: dict[str, Matmul] = {"cuBLAS": F.linear}
    if has_kernels:
        matmuls["Ranvier"] = ThinMatmul().forward
        flush = make_flush()
        print(f"{torch.cuda.get_device_name()}: copy {copy_bandwidth(flush) / 1e12:.2f} TB/s")
    shapes = SHAPES if has_kernels else TOY_SHAPES
    models = options.models.split(",") if has_kernels else list(shapes)
    table = []
    for model in models:
        if model not in shapes:
            parser.error(f"{model!r} is not a model. Use some of {', '.join(shapes)}.")
        for shape in shapes[model]:
            for rows in map(int, options.rows.split(",")):
                layer = Layer.draw(shape, rows, device)
                checks = [
                    check_outputs(name, *layer.outputs_of(matmul), MAX_ERROR)
                    for name, matmul in matmuls.items()
                ]
                line = f"{model:12} {shape[0]:7,} x {shape[1]:6,}, {rows:3} rows: "
                if not has_kernels:
                    print(line + str(checks[0]))
                    continue
                cublas, own = (
                    1e6 * replay_seconds(layer, matmul, flush, options.repeats)
                    for matmul in matmuls.values()
                )
                ratio = checked_ratio(cublas / own, checks)
                print(f"{line}cuBLAS {cublas:7.1f} µs, Ranvier {own:7.1f} µs, {ratio}", flush=True)
                if all(check.passed for check in checks):
                    cells = (f"{cublas:.1f}", f"{own:.1f}", f"{cublas / own:.3f}")
                    table.append((model, *shape, rows, *cells, package_hash()))
    if options.csv is not None and table:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(table)


if __name__ == "__main__":
    main()

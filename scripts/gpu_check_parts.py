"""The parts of `gpu_check.py`: features in tiny shapes, compared with formulas in float64.

The formulas are in `gpu_check_twin.py`. Weights are random and large enough that every gradient
counts, and representable in bf16.

A comparison has an error and a bound. For a tensor there are two: the norm of the difference over
the norm of the twin's tensor, which is sharp for single elements, and the difference of their scale
<x, twin> / <twin, twin> from 1, in which rounding averages out, so that one per cent of a gradient
is seen in bf16, too.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check_twin import SEED, Twin, TwinOptimizer, attend, draw_weights
from ranvier import launch
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig, run_from_tables
from ranvier.data.dataset import open_data
from ranvier.data.prepare import prepare_corpus
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.grid import Grid
from ranvier.infer.engine import open_engine
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import Decoder, RecurrentDecoder
from ranvier.models.config import DecoderConfig
from ranvier.models.recurrent_decoder import draw_recurrence
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.build_model import DTYPES
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.step import begin_model_step, forward_backward
from ranvier.train.trainer import Trainer

VOCAB = ByteTokenizer().vocab_size
CPU_SLOWDOWN = 5.0
"""Factor of all time limits on a CPU, where a check is not meant to be quick."""


# ---- parts and comparisons -----------------------------------------------------------------------


@dataclass
class Check:
    """The device and folder of a part, and its comparisons."""

    device: torch.device
    folder: Path
    worst: float = 0.0
    where: str = ""
    failures: list[str] = field(default_factory=list)

    @property
    def patience(self) -> float:
        """Seconds to wait for a command or a server, less than the limit of a part."""
        return 60.0 if self.is_gpu else 60.0 * CPU_SLOWDOWN

    def at_most(self, name: str, error: float, bound: float) -> None:
        """Compares an error with its bound; NaN is a failure."""
        share = error / bound if math.isfinite(error) else math.inf
        text = f"{name}: {error:.2e} of {bound:.0e}"
        if share > self.worst or not self.where:
            self.worst, self.where = share, text
        if share > 1.0:
            self.failures.append(f"{text} at most")

    def close(self, name: str, found: Tensor, want: Tensor, bound: float, scale: float) -> None:
        """Compares a tensor with its twin in float64.

        bound: of the relative norm of the difference; scale: of the difference of the scale from 1.
        """
        x = found.detach().double().cpu().flatten()
        y = want.detach().double().cpu().flatten()
        if x.shape != y.shape:
            self.failures.append(f"{name}: {tuple(found.shape)} instead of {tuple(want.shape)}")
            return
        size = float(y.norm())
        if size == 0.0:
            self.at_most(f"{name} (zero)", float(x.norm()), 1e-30)
            return
        self.at_most(name, float((x - y).norm()) / size, bound)
        self.at_most(f"scale of {name}", abs(float(x @ y) / size**2 - 1.0), scale)

    def expect(self, is_true: bool, problem: str) -> None:
        """Fails if a condition does not hold."""
        if not is_true:
            self.failures.append(problem)

    @property
    def is_gpu(self) -> bool:
        """Whether kernels run."""
        return self.device.type == "cuda"

    @cached_property
    def corpus(self) -> str:
        """A tokenized corpus of documents of different lengths."""
        texts = self.folder / "texts"
        texts.mkdir()
        for i in range(60):
            line = f"{i} times {i} is {i * i}, {i % 7} and {(3 * i) % 11}; "
            (texts / f"{i:03}.txt").write_text(line * (1 + i % 5))
        prepare_corpus([texts], self.folder / "corpus", ByteTokenizer())
        return str(self.folder / "corpus")


@dataclass(frozen=True)
class Part:
    """A function that checks a feature."""

    name: str
    function: Callable[[Check], None]
    seconds: float
    """About how long it takes on an H200, so that long ones begin first."""
    limit: float
    gpu_only: str
    """Why it does not run on a CPU; empty if it does."""


PARTS: dict[str, Part] = {}


def part(
    name: str, *, seconds: float = 10.0, limit: float = 90.0, gpu_only: str = ""
) -> Callable[[Callable[[Check], None]], Callable[[Check], None]]:
    """Registers a part."""

    def register(function: Callable[[Check], None]) -> Callable[[Check], None]:
        PARTS[name] = Part(name, function, seconds, limit, gpu_only)
        return function

    return register


# ---- training ------------------------------------------------------------------------------------

SHAPE = {
    "layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128,
    "vocab": VOCAB, "max_seq": 128,
}  # fmt: skip
BASE: dict[str, Any] = {
    **{f"model.{name}": value for name, value in SHAPE.items()},
    "data.seq_len": 64,
    "data.validation_fraction": 0.1,
    "plan.global_batch": 8,
    "plan.micro_batch": 4,
    "plan.compile": "off",
    "optim.lr": 2e-3,
    "optim.eps": 1e-3,
    "optim.warmup_steps": 2,
    "optim.max_grad_norm": 0.5,
    "train.steps": 4,
    "train.dtype": "fp32",
    "train.eval_interval": 0,
    "train.sample_prompt": "",
}
"""Settings of all runs. With a small `eps` noise would decide the updates of small gradients."""


@dataclass(frozen=True)
class Bounds:
    """Of losses, and of gradients and updates: relative norms of differences, and their scales."""

    loss: float
    grad: float
    scale: float
    update: float
    update_scale: float


FP32 = Bounds(loss=2e-6, grad=5e-4, scale=2e-4, update=5e-3, update_scale=2e-3)
BF16 = Bounds(loss=5e-3, grad=4e-2, scale=1e-2, update=1e-1, update_scale=3e-2)
FLOAT8 = Bounds(loss=5e-3, grad=1.5e-1, scale=3e-2, update=3e-1, update_scale=8e-2)


def resolve(settings: Mapping[str, Any]) -> RunConfig:
    """Returns a run on one rank from settings by their dotted names."""
    tables: dict[str, dict[str, Any]] = {"model": {"size": "tiny"}}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = value
    return resolve_run(run_from_tables(tables), ResolveContext(world_size=1))


def make_trainer(check: Check, settings: Mapping[str, Any], device: str = "") -> Trainer:
    """Returns a trainer in this process."""
    run: Any = resolve({**BASE, **settings})
    data = open_data(
        [check.corpus],
        seq=run.data.seq_len,
        seed=run.train.seed,
        held_out=run.data.validation_fraction,
        packed=run.data.document_mask,
    )
    trainer = Trainer.from_run(run, Grid({}), torch.device(device or check.device), data)
    compiled = get_parallel_model(trainer.state.model).compiled_blocks
    if compiled is not None and not check.is_gpu:
        # Traces like Inductor, without a C++ compiler.
        compiled.backend = "aot_eager"
    return trainer


def count_graphs() -> int:
    """Returns the number of graphs that were compiled in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def read_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the gradients that a pass has left."""
    scheduler = trainer.state.parallel.bucket_scheduler
    return {
        weight.name: part.detach().clone()
        for bucket, pieces in scheduler.finish_gradients()
        for weight, part in bucket.split_by_weight(pieces)
    }


def read_masters(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the master weights by name, in their shapes."""
    shapes = {name: x.shape for name, (x, _) in trainer.state.parallel.sharded_state().items()}
    masters = {
        name.removesuffix(".master"): x.detach().cpu().clone()
        for name, (x, _) in state_tensors(trainer.state).items()
        if name.endswith(".master")
    }
    return {name: x.view(shapes[name]) for name, x in masters.items()}


def compare_training(
    check: Check,
    settings: Mapping[str, Any],
    bounds: Bounds,
    *,
    label: str = "",
    passes: bool = True,
) -> Trainer:
    """Compares a run with its twin: the gradients of a pass, all losses and norms, all updates.

    passes: whether forward and backward run alone first, so that gradients are compared.
    """
    num_graphs = count_graphs()
    trainer = make_trainer(check, settings)
    run, parallel = trainer.run, trainer.state.parallel
    label = f"{label} " if label else ""
    shapes = {name: tuple(x.shape) for name, (x, _) in parallel.sharded_state().items()}
    start = draw_weights(shapes)
    parallel.load_full_state(start)
    twin = Twin(
        run.decoder,
        start,
        dtype=DTYPES[run.train.dtype],
        lora_scale=run.lora.alpha / run.lora.rank if run.lora.rank else 0.0,
        float8=run.train.float8 != "off",
    )
    twin.seed = run.train.seed

    def begin_twin_step(step: int) -> None:
        if run.decoder.is_recurrent:
            drawn = draw_recurrence(run.train.seed, step, run.decoder)
            twin.recurrence = drawn.without_grad, drawn.with_grad

    # On one rank the batches of a step are the same tensors on every device.
    make_batch = trainer._batch_maker()
    begin_twin_step(0)
    if passes:
        batches = make_batch(0)
        begin_model_step(trainer.state.model, 0)
        on_device = [batch.to(trainer.device) for batch in batches]
        loss = forward_backward(trainer.state.model, on_device).item()
        want_loss, want = twin.gradients(batches)
        check.at_most(f"{label}loss", abs(loss - want_loss), bounds.loss)
        found = read_gradients(trainer)
        check.expect(
            found.keys() == want.keys(), f"{label}gradients of {found.keys() ^ want.keys()}"
        )
        for name in found.keys() & want.keys():
            check.close(f"{label}d {name}", found[name], want[name], bounds.grad, bounds.scale)
    optimizer = TwinOptimizer(twin, run)
    rows = list(trainer.run_steps())
    check.expect(len(rows) == run.train.steps, f"{label}{len(rows)} of {run.train.steps} steps")
    for step, row in enumerate(rows):
        begin_twin_step(step)
        loss, grads = twin.gradients(make_batch(step))
        norm = optimizer.step(grads, row["lr"])
        check.at_most(
            f"{label}loss of step {step}", abs(row["loss"] - loss), bounds.loss * (step + 1)
        )
        error = abs(row["grad_norm"] / norm - 1.0)
        check.at_most(f"{label}norm of step {step}", error, bounds.scale * (step + 1))
    is_compiled = count_graphs() > num_graphs
    check.expect(is_compiled or run.plan.compile == "off", f"{label}no block was compiled")
    for name, x in read_masters(trainer).items():
        if not twin.masters[name].requires_grad:
            continue
        moved, want_moved = x - start[name], twin.masters[name] - start[name]
        check.close(
            f"{label}update of {name}", moved, want_moved, bounds.update, bounds.update_scale
        )
    return trainer


@part("train-eager", seconds=12)
def train_eager(check: Check) -> None:
    """Training without compiling, in fp32 and in bf16."""
    compare_training(check, {}, FP32, label="fp32")
    compare_training(check, {"train.dtype": "bf16"}, BF16, label="bf16")


@part("train-compiled", seconds=35)
def train_compiled(check: Check) -> None:
    """Compiled blocks, in fp32 and in bf16."""
    compare_training(check, {"plan.compile": "on"}, FP32, label="fp32")
    compare_training(check, {"plan.compile": "on", "train.dtype": "bf16"}, BF16, label="bf16")


@part("packed-documents", seconds=15)
def packed_documents(check: Check) -> None:
    """Samples of many documents, which do not see each other; and samples of one."""
    settings = {"data.seq_len": 128, "model.sliding_window": 0}
    trainer = compare_training(check, {**settings, "train.dtype": "bf16"}, BF16, label="bf16")
    (batch, *_) = trainer._batch_maker()(0)
    check.expect(int(batch.documents.max()) > 0, "no sample has several documents")
    whole = {"data.document_mask": False, "train.dtype": "bf16"}
    compare_training(check, whole, BF16, label="whole")


@part("float8", seconds=25)
def float8(check: Check) -> None:
    """Linear layers of blocks in fp8, eager and compiled."""
    settings = {"train.dtype": "bf16", "train.float8": "tensorwise"}
    compare_training(check, settings, FLOAT8, label="eager")
    compare_training(check, {**settings, "plan.compile": "on"}, FLOAT8, label="compiled")


@part("mixture", seconds=30)
def mixture(check: Check) -> None:
    """Experts: training in fp32, eager and compiled, and the products of bf16 for given routes."""
    settings = {"model.experts": 4, "model.expert_mlp": 64}
    compare_training(check, settings, FP32, label="eager")
    compare_training(check, {**settings, "plan.compile": "on"}, FP32, label="compiled")
    compare_experts(check)


def compare_experts(check: Check) -> None:
    """Compares a mixture in bf16, whose routes are given, with a loop over its experts."""
    from ranvier.nn.moe.local import local_moe
    from ranvier.nn.moe.permutation import sort_by_expert

    generator = torch.Generator().manual_seed(SEED)
    tokens, choices, num_experts, embed, hidden = 300, 2, 8, 64, 96

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    experts = torch.rand(tokens, num_experts - 1, generator=generator).topk(choices).indices
    weights = torch.rand(tokens, choices, generator=generator)
    x, dy = draw(tokens, embed), draw(tokens, embed)
    gate, up = (draw(num_experts, hidden, embed) / 8 for _ in range(2))
    down = draw(num_experts, embed, hidden) / 8
    names = ("x", "weights", "gate", "up", "down")
    leaves = [y.to(check.device).requires_grad_() for y in (x, weights, gate, up, down)]
    order = sort_by_expert(experts.to(check.device), num_experts)
    y = local_moe(leaves[0], leaves[1], order, *leaves[2:], "swiglu")
    found = [y, *torch.autograd.grad(y, leaves, dy.to(check.device))]
    wide = [z.double().requires_grad_() for z in (x, weights, gate, up, down)]
    want = torch.zeros(tokens, embed, dtype=torch.float64)
    for e in range(num_experts):
        share = (wide[1] * (experts == e)).sum(1, keepdim=True)
        hidden_e = F.silu(wide[0] @ wide[2][e].T) * (wide[0] @ wide[3][e].T)
        want = want + share * (hidden_e @ wide[4][e].T)
    wants = [want, *torch.autograd.grad(want, wide, dy.double())]
    for name, have, one in zip(("y", *(f"d {n}" for n in names)), found, wants, strict=True):
        check.close(f"experts in bf16: {name}", have, one, 2e-2, 3e-3)


@part("lora", seconds=25)
def lora(check: Check) -> None:
    """Adapters on all linear layers: their gradients, and no others."""
    settings = {"lora.rank": 4, "lora.alpha": 6.0}
    compare_training(check, settings, FP32, label="fp32")
    compiled = {**settings, "plan.compile": "on", "train.dtype": "bf16"}
    compare_training(check, compiled, BF16, label="compiled bf16")


@part("muon", seconds=15)
def muon(check: Check) -> None:
    """Matrices that Muon updates, in fp32 and with its kernels of bf16."""
    settings = {"optim.name": "muon", "optim.muon_dtype": "fp32"}
    bounds = replace(FP32, update=2e-2, update_scale=5e-3)
    compare_training(check, settings, bounds, label="fp32")
    # The iteration amplifies the rounding of small singular values.
    bounds = replace(FP32, loss=1e-3, update=2e-1, update_scale=1e-2, scale=1e-3)
    compare_training(check, {**settings, "optim.muon_dtype": "bf16"}, bounds, label="bf16")
    if check.is_gpu:
        compare_symmetric_products(check)


def compare_symmetric_products(check: Check) -> None:
    """Compares the kernels for X Xᵀ and for the polynomial of a symmetric matrix."""
    from ranvier.optim import muon_kernels

    generator = torch.Generator().manual_seed(SEED)
    for shape in ((2, 256, 512), (1, 520, 712)):
        x = torch.randn(*shape, generator=generator).to(torch.bfloat16)
        wide = x.double()
        found = muon_kernels.symmetric_product(x.to(check.device))
        check.close(f"X Xᵀ of {shape}", found, wide @ wide.mT, 5e-3, 2e-4)
        square = x[:, :, : shape[1]]
        a = ((square + square.mT) / 32).contiguous()
        found = muon_kernels.symmetric_polynomial(a.to(check.device), -4.775, 2.0315)
        want = -4.775 * a.double() + 2.0315 * a.double() @ a.double()
        check.close(f"polynomial of {shape}", found, want, 5e-3, 2e-4)


@part("cuda-graph", seconds=30, gpu_only="there are no CUDA graphs on a CPU")
def cuda_graph(check: Check) -> None:
    """A step as one graph, whose replays read the batch and the learning rate of their step."""
    settings = {"plan.cuda_graph": True, "data.document_mask": False, "train.steps": 8}
    compare_training(check, settings, FP32, label="eager", passes=False)
    compiled = {**settings, "plan.compile": "on"}
    compare_training(check, compiled, FP32, label="compiled", passes=False)


@part("recomputation", seconds=30)
def recomputation(check: Check) -> None:
    """Blocks that are computed again in backward."""
    for kind in ("selective", "full"):
        compare_training(check, {"plan.recompute": kind}, FP32, label=kind)
    settings = {"plan.recompute": "selective", "plan.compile": "on", "train.dtype": "bf16"}
    compare_training(check, settings, BF16, label="compiled bf16")


@part("offload", seconds=25)
def offload(check: Check) -> None:
    """Optimizer states, weights and activations on the host."""
    tiles = {"memory.offload_tile": 4096, "memory.optimizer_step_on": "device"}
    states = {"memory.optimizer_states": "host", **tiles}
    if not check.is_gpu:
        # On a CPU nothing can be offloaded to the host; a file works in the same way.
        folder = check.folder / "states"
        folder.mkdir()
        states |= {"memory.optimizer_states": "disk", "memory.offload_dir": str(folder)}
    compare_training(check, states, FP32, label="states")
    if check.is_gpu:
        weights = {**states, "memory.parameters": "host"}
        compare_training(check, weights, FP32, label="weights", passes=False)
        split = {**tiles, "memory.optimizer_states": "split"}
        split |= {"memory.optimizer_states_on_device_gib": 1e-4}
        compare_training(check, split, FP32, label="split")
        compare_offloaded_activations(check)


def compare_offloaded_activations(check: Check) -> None:
    """Compares a run whose activations wait on the host, also small ones."""
    from ranvier.memory.activation_offload import ActivationOffload
    from ranvier.train.memory import placement

    settings = {"memory.activation_offload_fraction": 1.0, "model.layers": 4}
    # Small activations stay on the device otherwise.
    with patch.object(placement, "ActivationOffload", partial(ActivationOffload, small=1)):
        trainer = compare_training(check, settings, FP32, label="activations")
    store = trainer.state.parallel.step_context.save_policy.store
    check.expect(getattr(store, "offloaded_bytes", 0) > 0, "no activation was offloaded")


# ---- kernels -------------------------------------------------------------------------------------


def draw_heads(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Returns random tensors on the CPU."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@part("context-kernels", seconds=20)
def context_kernels(check: Check) -> None:
    """Attention of segments of queries to segments of keys, forward and backward."""
    from ranvier.models.segment_attention import SegmentAttention

    tokens = 300
    cases = {
        "zigzag": (((0, 150, 0, 150), (150, 300, 0, 300)), 0),
        "segments": (((0, 120, 80, 300), (125, 220, 0, 60), (220, 221, 0, 300)), 0),
        "window": (((0, 150, 0, 150), (150, 300, 0, 300)), 37),
    }
    for name, (pairs, window) in cases.items():
        q, k, v, dy = draw_heads((tokens, 8, 64), (tokens, 2, 64), (tokens, 2, 64), (tokens, 8, 64))
        how = SegmentAttention(pairs, tokens, tokens, causal=True, window=window)
        on_device = [x.to(check.device) for x in (q, k, v)]
        o, lse = how.forward(*on_device)
        found = [o, *how.backward(dy.to(check.device), *on_device, o, lse)]
        visible = torch.zeros(tokens, tokens, dtype=torch.bool)
        for first, last, start, stop in pairs:
            # The last query of a segment is at its last key.
            at = torch.arange(first, last).unsqueeze(1) - last + stop
            keys = torch.arange(tokens)
            seen = (keys >= start) & (keys <= at) & (keys < stop)
            visible[first:last] |= seen & (keys > at - window) if window else seen
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        want = attend(*(x.unsqueeze(0) for x in wide), visible.unsqueeze(0))[0]
        wants = [want, *torch.autograd.grad(want, wide, dy.double())]
        for label, have, one in zip(("y", "dq", "dk", "dv"), found, wants, strict=True):
            check.close(f"{name} {label}", have, one, 1e-2, 2e-3)


@part("prefix-kernels", seconds=10)
def prefix_kernels(check: Check) -> None:
    """Attention within documents and to a prefix of each sample, forward and backward."""
    from ranvier.models.document_attention import Documents
    from ranvier.models.prefix_attention import prefixed_attention

    samples, seq, prefix = 3, 192, 48
    shapes = [(samples, seq, 8, 64), (samples, seq, 2, 64), (samples, seq, 2, 64)]
    *inputs, dy = draw_heads(*shapes, *2 * [(samples * prefix, 2, 64)], shapes[0])
    ids = torch.zeros(samples, seq, dtype=torch.long)
    ids[0, 50:], ids[0, 130:], ids[1, 7:] = 1, 2, 1
    for documents in (None, ids):
        leaves = [x.to(check.device).requires_grad_() for x in inputs]
        known = None if documents is None else Documents.from_ids(documents, check.device)
        y = prefixed_attention(*leaves, known)
        found = [y, *torch.autograd.grad(y, leaves, dy.to(check.device))]
        visible = torch.ones(seq, seq, dtype=torch.bool).tril().expand(samples, seq, seq)
        if documents is not None:
            visible = visible & (documents.unsqueeze(1) == documents.unsqueeze(2))
        visible = torch.cat([visible.new_ones(samples, seq, prefix), visible], 2)
        wide = [x.double().requires_grad_() for x in inputs]
        k, v = (
            torch.cat([wide[i + 2].unflatten(0, (samples, prefix)), wide[i]], 1) for i in (1, 2)
        )
        want = attend(wide[0], k, v, visible)
        wants = [want, *torch.autograd.grad(want, wide, dy.double())]
        label = "samples" if documents is None else "documents"
        names = ("y", "dq", "dk", "dv", "d prefix k", "d prefix v")
        for name, have, one in zip(names, found, wants, strict=True):
            check.close(f"{label} {name}", have, one, 1e-2, 2e-3)


@part("paged-kernels", seconds=25, gpu_only="Triton kernels need a GPU")
def paged_kernels(check: Check) -> None:
    """Attention to a cache in blocks: decoding, prompts, mixed steps, with and without splits."""
    from ranvier.infer import paged_kernels as kernels
    from ranvier.infer.step_input import SequenceChunk, build_sequences
    from ranvier.models.paged_attention import KVCache, num_split_counters

    decode = [(1, 1), (1, 16), (1, 17), (1, 65), (1, 700), (1, 1500)]
    mixed = [(1, 300), (1, 5), (7, 7), (40, 40), (33, 200), (2, 513)]
    block_size, kv_heads = 16, 2
    for label, chunks in (("decode", decode), ("mixed", mixed)):
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 8e-3)):
            generator = torch.Generator().manual_seed(SEED)
            counts = [-(-total // block_size) for _, total in chunks]
            order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
            tables = [[order.pop() for _ in range(count)] for count in counts]
            tokens = sum(new for new, _ in chunks)
            cached = torch.randn(
                2, sum(counts) + 1, kv_heads, block_size, 64, generator=generator
            ).to(dtype)
            for (_, total), blocks in zip(chunks, tables, strict=True):
                # Kernels clear the values after the last token.
                cached[1, blocks[-1], :, total - (len(blocks) - 1) * block_size :] = 0.0
            q = torch.randn(tokens, 8, 64, generator=generator).to(dtype)
            new = torch.randn(2, tokens, kv_heads, 64, generator=generator).to(dtype)
            steps = [
                SequenceChunk([0] * count, total - count, total, blocks)
                for (count, total), blocks in zip(chunks, tables, strict=True)
            ]
            sequences = build_sequences(steps, tokens, block_size, check.device)
            want, after = attend_to_tables(q, new, cached, chunks, tables, block_size)
            on_device = [x.to(check.device) for x in (q, *new)]
            counters = torch.zeros(
                num_split_counters(64, 1), dtype=torch.int32, device=check.device
            )
            unknown = replace(sequences, host_lens=None)
            # As in a graph, in which the host knows no lengths, and as outside of it.
            ways = {"known": sequences, "captured": unknown, "invariant": sequences}
            if label == "decode":
                ways["captured decode"] = replace(unknown, is_decode=True, split_counters=counters)
            for way, known in ways.items():
                cache = KVCache(*(x.to(check.device, copy=True) for x in cached))
                for (count, total), blocks in zip(chunks, tables, strict=True):
                    # Values of earlier sequences need not be finite.
                    for block in blocks[-(-(total - count) // block_size) :]:
                        cache.values[block] = float("nan")
                function = kernels.paged_attention
                if way == "invariant":
                    function = kernels.batch_invariant_attention
                y = function(*on_device, cache, known, 0, 0.0)
                check.close(f"{label} {way} {dtype}", y, want, bound, bound / 8)
                written = torch.stack([cache.keys, cache.values])[:, 1:].cpu()
                check.expect(torch.equal(written, after[:, 1:]), f"{label} {way}: other cache")
            check.expect(not counters.any(), f"{label}: counters are not zero after a step")


def attend_to_tables(
    q: Tensor,
    new: Tensor,
    cached: Tensor,
    chunks: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Returns attention to a cache in float64, one sequence after the other, and the cache with
    the new keys and values."""
    cached = cached.clone()
    outputs, first = [], 0
    for (count, total), blocks in zip(chunks, tables, strict=True):
        for i in range(count):
            place = total - count + i
            cached[:, blocks[place // block_size], :, place % block_size] = new[:, first + i]
        # (2, blocks, g, block_size, k) to (2, total, g, k)
        both = cached[:, list(blocks)].transpose(2, 3).flatten(1, 2)[:, :total].double()
        at = torch.arange(total - count, total).unsqueeze(1)
        visible = torch.arange(total) <= at
        rows = q[first : first + count].double().unsqueeze(0)
        outputs.append(attend(rows, both[:1], both[1:], visible.unsqueeze(0))[0])
        first += count
    return torch.cat(outputs), cached


# ---- engines -------------------------------------------------------------------------------------


PROMPT_LENGTHS = (1, 3, 17, 40, 40, 55)
NEW_TOKENS = 12


def make_prompts(count: int = len(PROMPT_LENGTHS)) -> list[list[int]]:
    """Returns prompts; two of the same length begin with the same tokens."""
    sizes = PROMPT_LENGTHS[:count]
    return [[(7 * n + 5 * i * i + i) % VOCAB for i in range(n)] for n in sizes]


def compare_tokens(
    check: Check,
    label: str,
    twin: Twin,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    bound: float,
) -> None:
    """Compares greedy tokens and their log-probabilities with the twin."""
    check.expect(len(tokens) == NEW_TOKENS, f"{label}: {len(tokens)} of {NEW_TOKENS} tokens")
    if not tokens:
        return
    with torch.no_grad():
        known = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = twin.logits(known)[0, len(prompt) - 1 :]
    want = logits.log_softmax(-1)
    chosen = want.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    error = float((torch.tensor(logprobs, dtype=torch.float64) - chosen).abs().max())
    check.at_most(f"{label} log-probability", error, bound)
    # Greedy: nothing is more likely, but for rounding.
    check.at_most(f"{label} best token", float((want.amax(1) - chosen).max()), bound)


def compare_engine(
    check: Check,
    config: DecoderConfig,
    *,
    label: str,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    graphs: Any = "off",
    bound: float = 2e-3,
    **options: Any,
) -> None:
    """Compares an engine with the twin, twice, so that the second time reads cached prefixes."""
    torch.manual_seed(0)
    model = Decoder(config) if not config.is_recurrent else RecurrentDecoder(config)
    weights = draw_weights({name: tuple(x.shape) for name, x in model.named_parameters()})
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(weights[name])
    weights = {name: x.detach().double().clone() for name, x in model.named_parameters()}
    plan = Plan(data=1, compile="on" if compiled else "off")
    parallel = parallelize(model, Grid({}), plan, device=str(check.device), dtype=dtype).eval()
    blocks = get_parallel_model(parallel).compiled_blocks
    if blocks is not None and not check.is_gpu:
        blocks.backend = "aot_eager"
    twin = Twin(config, weights, dtype=dtype)
    if config.is_recurrent:
        twin.recurrence = (config.mean_recurrence, 0)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    settings = EngineConfig(
        block_size=16,
        cuda_graphs=graphs if check.is_gpu else "off",
        max_num_batched_tokens=64,
        max_num_seqs=8,
        **options,
    )
    num_graphs = count_graphs()
    prompts = make_prompts()
    answers: dict[str, list[tuple[int, float]]] = {}
    with open_engine(parallel, settings, num_blocks=80) as engine:
        for repeat in ("cold", "warm"):
            for i, prompt in enumerate(prompts):
                name = f"{repeat} {i}"
                request = Request(request_id=name, prompt_token_ids=tuple(prompt), params=params)
                engine.add(request)
            while engine.has_unfinished:
                for output in engine.step():
                    pairs = zip(output.token_ids, output.logprobs, strict=True)
                    answers.setdefault(output.request_id, []).extend(
                        (token, score.logprob) for token, score in pairs
                    )
        is_compiled = count_graphs() > num_graphs
        check.expect(is_compiled or not compiled, f"{label}: no block was compiled")
        if graphs != "off" and check.is_gpu:
            check.expect(engine.runner.step_graphs is not None, f"{label}: no CUDA graphs")
        check.expect(engine.stats().prefix_cache_hits > 0, f"{label}: no cached prefix was read")
    for name, answer in answers.items():
        prompt = prompts[int(name.split()[1])]
        tokens, logprobs = zip(*answer, strict=True)
        compare_tokens(check, f"{label} {name}", twin, prompt, tokens, logprobs, bound)
    check.expect(len(answers) == 2 * len(prompts), f"{label}: {len(answers)} answers")


@part("generate", seconds=15)
def generate(check: Check) -> None:
    """The engine without compiling, without and with CUDA graphs."""
    config = DecoderConfig(**SHAPE)
    compare_engine(check, config, label="eager")
    compare_engine(check, config, label="graphs", graphs="first_use")
    mixed = replace(config, experts=4, expert_mlp=64)
    compare_engine(check, mixed, label="mixture")


@part("generate-compiled", seconds=35, gpu_only="an engine compiles blocks only on a GPU")
def generate_compiled(check: Check) -> None:
    """The engine with compiled blocks and CUDA graphs, in fp32 and bf16."""
    config = DecoderConfig(**SHAPE)
    options = {"compiled": True, "graphs": "first_use"}
    compare_engine(check, config, label="fp32", **options)
    bf16 = torch.bfloat16
    compare_engine(check, config, label="bf16", dtype=bf16, bound=0.15, **options)


RECURRENT = {
    "layers": 4, "prelude_layers": 1, "core_layers": 2, "coda_layers": 1, "mean_recurrence": 4,
    "backprop_depth": 2,
}  # fmt: skip


@part("recurrent", seconds=30)
def recurrent(check: Check) -> None:
    """Recurrent depth: training, compiled and not, and the engine."""
    settings = {f"model.{name}": value for name, value in RECURRENT.items()}
    bounds = replace(FP32, loss=2e-5, grad=2e-3, scale=5e-4, update=1e-2)
    compare_training(check, settings, bounds, label="eager")
    compare_training(check, {**settings, "plan.compile": "on"}, bounds, label="compiled")
    compare_engine(check, DecoderConfig(**{**SHAPE, **RECURRENT}), label="engine")


@part("ladder", seconds=30)
def ladder(check: Check) -> None:
    """A ladder residual: training, compiled and not, and the engine."""
    settings = {"model.residual": "ladder", "model.layers": 3}
    compare_training(check, settings, FP32, label="eager")
    compare_training(check, {**settings, "plan.compile": "on"}, FP32, label="compiled")
    config = DecoderConfig(**{**SHAPE, "layers": 3}, residual="ladder")
    compare_engine(check, config, label="engine", graphs="first_use")


@part("streams", seconds=35)
def streams(check: Check) -> None:
    """Parallel streams with prefixes: training in fp32 and bf16, and the engine."""
    sizes = {"parscale_streams": 2, "parscale_prefix_tokens": 5}
    settings = {f"model.{name}": value for name, value in sizes.items()}
    compare_training(check, settings, FP32, label="fp32")
    compiled = {**settings, "plan.compile": "on", "train.dtype": "bf16"}
    compare_training(check, compiled, BF16, label="compiled bf16")
    # Attention to the prefixes of streams is not one operation of a CUDA graph.
    compare_engine(check, DecoderConfig(**SHAPE, **sizes), label="engine")


# ---- commands ------------------------------------------------------------------------------------


def command_of(*words: str) -> list[str]:
    """Returns the words of a `ranvier` command in a process of its own."""
    return [sys.executable, "-m", "ranvier", *words]


def options_of(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as options of a command."""
    words = []
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def train_command(check: Check, settings: Mapping[str, Any], out: Path, ranks: int) -> list[str]:
    """Returns the words that train on the corpus of a check."""
    words = ["train", "--nproc", str(ranks), *options_of(settings)]
    words += ["--data.sources", check.corpus, "--train.output-dir", str(out)]
    return [*words, "--train.device", check.device.type]


def call(check: Check, command: Sequence[str], *, status: int = 0) -> str:
    """Runs a command to its end, and returns what it prints."""
    environment = {**os.environ, "NO_COLOR": "1"}
    log = check.folder / "command.log"
    short = " ".join(command[2:5])
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, cwd=check.folder, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(check.patience)
            ended = f"exit status {process.returncode}"
            check.expect(process.returncode == status, f"{short}: {ended} instead of {status}")
        except subprocess.TimeoutExpired:
            # SIGTERM, with which the launcher also ends its ranks.
            process.terminate()
            process.wait(10)
            check.failures.append(f"{short}: not finished after {check.patience:.0f} s")
        finally:
            process.kill()
    text = log.read_text("utf-8", errors="replace")
    print(text[-3000:], file=sys.stderr)
    return text


def compare_run(
    check: Check, settings: Mapping[str, Any], out: Path, bounds: Bounds, label: str = ""
) -> None:
    """Compares the metrics and the last checkpoint of a run with the twin.

    The twin starts from the weights that the same settings draw on the CPU.
    """
    label = f"{label} " if label else ""
    serial = {name: x for name, x in settings.items() if name not in AXIS_SETTINGS}
    trainer = make_trainer(check, {**serial, "plan.compile": "off"}, "cpu")
    run = trainer.run
    start = read_masters(trainer)
    twin = Twin(run.decoder, start, dtype=DTYPES[run.train.dtype])
    optimizer = TwinOptimizer(twin, run)
    make_batch = trainer._batch_maker()
    path = out / "metrics.jsonl"
    if not path.is_file():
        check.failures.append(f"{label}no metrics")
        return
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    steps = [row["step"] for row in rows]
    check.expect(steps == list(range(run.train.steps)), f"{label}steps {steps}")
    for row in rows:
        loss, grads = twin.gradients(make_batch(row["step"]))
        norm = optimizer.step(grads, row["lr"])
        name, factor = f"{label}loss of step {row['step']}", row["step"] + 1
        check.at_most(name, abs(row["loss"] - loss), bounds.loss * factor)
        error = abs(row["grad_norm"] / norm - 1.0)
        check.at_most(f"{label}norm of step {row['step']}", error, bounds.scale * factor)
    checkpoints = find_checkpoints(out / "checkpoints")
    check.expect(bool(checkpoints), f"{label}no checkpoint")
    for name, x in load_full_tensors(checkpoints[-1]).items() if checkpoints else ():
        begun = start[name].double()
        moved, want = x.double().view(begun.shape) - begun, twin.masters[name].detach() - begun
        check.close(f"{label}update of {name}", moved, want, bounds.update, bounds.update_scale)


AXIS_SETTINGS = (
    *(f"plan.{axis}" for axis in ("auto", "pipe", "data", "expert", "context", "depth", "row")),
    *("plan.col", "plan.micro_batch", "train.backend"),
)
"""Settings that change how a run computes, but not what."""
GRID: dict[str, Any] = {
    **BASE,
    "plan.auto": False,
    "plan.micro_batch": 2,
    "model.init_std": 0.2,
    # An update of SGD is the gradient, so that the weights show whether any part of it was lost.
    "optim.name": "sgd",
    "optim.lr": 0.1,
    "train.steps": 3,
}


def compare_grid(check: Check, ranks: int, **settings: Any) -> None:
    """Trains on several ranks that share the device, and compares with one process."""
    settings = {**GRID, **{name.replace("__", "."): value for name, value in settings.items()}}
    options = dict(settings)
    if check.is_gpu:
        options |= {"launch.share_gpu": True, "train.backend": "nccl"}
    out = check.folder / "run"
    call(check, command_of(*train_command(check, options, out, ranks)))
    compare_run(check, settings, out, FP32)


@part("nccl-tensor", seconds=30)
def nccl_tensor(check: Check) -> None:
    """Four ranks: tensor parallelism and sharded weights."""
    compare_grid(check, 4, plan__row=2, plan__depth=2)


@part("nccl-pipeline", seconds=28)
def nccl_pipeline(check: Check) -> None:
    """Two stages of a pipeline, four micro-batches."""
    compare_grid(check, 2, plan__pipe=2)


@part("nccl-context", seconds=28)
def nccl_context(check: Check) -> None:
    """Two ranks that share the tokens of packed samples."""
    compare_grid(check, 2, plan__context=2)


@part("nccl-experts", seconds=29)
def nccl_experts(check: Check) -> None:
    """Three ranks with two experts each."""
    experts = {"model__experts": 6, "model__expert_mlp": 64, "plan__global_batch": 12}
    compare_grid(check, 3, plan__expert=3, **experts)


@part("train-command", seconds=35)
def train_default(check: Check) -> None:
    """`ranvier train` with its own choice of types and compiling, and the evaluation at its end."""
    chosen = ("plan.compile", "train.dtype", "train.eval_interval", "train.sample_prompt")
    settings = {name: value for name, value in BASE.items() if name not in chosen}
    settings |= {"model.init_std": 0.2, "plan.micro_batch": -1}
    out = check.folder / "run"
    call(check, command_of(*train_command(check, settings, out, 1)))
    evaluated = re.findall(r'"val_loss": \d', (out / "metrics.jsonl").read_text("utf-8"))
    check.expect(bool(evaluated), "no held-out loss")
    dtype = "bf16" if check.is_gpu else "fp32"
    compare_run(check, {**settings, "train.dtype": dtype}, out, BF16 if check.is_gpu else FP32)


KILL_AFTER = 5


@part("kill-and-resume", seconds=35)
def kill_and_resume(check: Check) -> None:
    """A run that is killed between two checkpoints resumes as if it had not been killed."""
    settings = {**BASE, "model.init_std": 0.2, "checkpoint.interval": 2, "train.steps": 8}
    out = check.folder / "run"
    words = train_command(check, settings, out, 1)
    killed = [sys.executable, str(Path(__file__).resolve()), "--train-until-killed", *words]
    call(check, killed, status=-signal.SIGKILL)
    saved = find_checkpoints(out / "checkpoints")
    check.expect(bool(saved), "no checkpoint of the killed run")
    said = call(check, command_of("train", str(out), "--nproc", "1"))
    check.expect("resum" in said.lower(), "the second command does not say that it resumes")
    compare_run(check, settings, out, FP32)


def train_until_killed(words: Sequence[str]) -> None:
    """Trains, and kills the process in the middle."""
    from ranvier.cli.main import main as command_line

    issue = Trainer.issue_step

    def issue_step(self: Trainer, *args: Any, **options: Any) -> Any:
        if self.state.step == KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return issue(self, *args, **options)

    Trainer.issue_step = issue_step  # type: ignore[method-assign]
    command_line(list(words))


# ---- serving -------------------------------------------------------------------------------------

PUBLISHED_NAMES = {
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp.enter.gate": "mlp.gate_proj",
    "mlp.enter.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def write_published_model(folder: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Writes a Llama in Hugging Face format, and returns its weights by our names."""
    from safetensors.torch import save_file

    folder.mkdir()
    ByteTokenizer().save(folder / "tokenizer.json")
    model = Decoder(config)
    weights = draw_weights({name: tuple(x.shape) for name, x in model.named_parameters()})
    tensors = {}
    for name, x in weights.items():
        theirs = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
        module = name.removesuffix(".weight")
        if module.startswith("blocks."):
            _, number, layer = module.split(".", 2)
            published = f"model.layers.{number}.{PUBLISHED_NAMES[layer]}"
        else:
            published = theirs[module]
        tensors[f"{published}.weight"] = x.float().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "num_hidden_layers": config.layers,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": ByteTokenizer().eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return weights


@contextmanager
def serving(check: Check, command: Sequence[str]) -> Iterator[str]:
    """A server, and its address once it is ready."""
    log = check.folder / "server.log"
    with log.open("w") as file:
        environment = {**os.environ, "NO_COLOR": "1"}
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=check.folder
        )
    try:
        deadline = time.monotonic() + check.patience
        while "Ready:" not in (text := log.read_text()):
            if process.poll() is not None:
                last_line = text.strip().rpartition("\n")[2]
                raise RuntimeError(
                    f"the server ended with exit status {process.returncode}: {last_line}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server was not ready after {check.patience:.0f} s")
            time.sleep(0.05)
        yield re.findall(r"http://127\.0\.0\.1:\d+", text)[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        print(log.read_text()[-3000:], file=sys.stderr)


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of a server to a request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@part("serve", seconds=40)
def serve(check: Check) -> None:
    """`ranvier serve` answers through HTTP what the twin says."""
    config = DecoderConfig(**SHAPE)
    weights = write_published_model(check.folder / "model", config)
    twin = Twin(config, weights)
    words = ["serve", str(check.folder / "model"), "--device", check.device.type]
    words += ["--serve.port", "0", "--engine.max-num-seqs", "4"]
    words += ["--engine.max-num-batched-tokens", "64", "--engine.kv-cache-gib", "0.25"]
    with serving(check, command_of(*words)) as url:
        body = {
            "model": "model", "prompt": make_prompts(), "max_tokens": NEW_TOKENS, "logprobs": 0,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        for repeat in ("cold", "warm"):
            answer = post(f"{url}/v1/completions", body)
            for choice, prompt in zip(answer["choices"], make_prompts(), strict=True):
                logprobs = choice["logprobs"]["token_logprobs"]
                label = f"{repeat} {choice['index']}"
                compare_tokens(check, label, twin, prompt, choice["token_ids"], logprobs, 2e-3)


# ---- the worker ----------------------------------------------------------------------------------


def versions(device: str) -> dict[str, str]:
    """Returns what a row says about the machine."""

    def version_of(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    name = torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "transformers": version_of("transformers"),
    }


def run_part(name: str, device: str) -> dict[str, Any]:
    """Runs a part; returns the worst comparison and the failures."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix=f"gpu-check-{name}-", ignore_cleanup_errors=True) as at:
        check = Check(torch.device(device), Path(at))
        try:
            PARTS[name].function(check)
        except Exception as error:
            traceback.print_exc()
            first = str(error).strip().partition("\n")[0]
            check.failures.insert(0, f"{type(error).__name__}: {first[:300]}")
        finally:
            # Graphs, allocations and errors of one part do not reach the next.
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    more = len(check.failures) - 6
    failures = check.failures[:6] + [f"and {more} more"] * (more > 0)
    worst = min(check.worst, 1e9)
    return {"worst": worst, "where": check.where, "failures": failures}


def main(words: Sequence[str] | None = None) -> None:
    """Runs the parts that are named on standard input; answers with one line of JSON each."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--train-until-killed"]:
        train_until_killed(words[1:])
        return
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("device", nargs="?", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="print the parts")
    options = parser.parse_args(words)
    if options.list:
        for one in PARTS.values():
            gpu = " (GPU only)" if one.gpu_only else ""
            print(f"{one.name:<20} {(one.function.__doc__ or '').splitlines()[0]}{gpu}")
        return
    # What the parts print goes into the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    launch.die_with_parent()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device. Use --device cpu, or run on a GPU.")
    parts = [
        {
            "name": one.name,
            "seconds": one.seconds,
            "limit": one.limit * (1.0 if options.device == "cuda" else CPU_SLOWDOWN),
            "skipped": one.gpu_only if options.device == "cpu" else "",
        }
        for one in PARTS.values()
    ]
    print(
        json.dumps({"parts": parts, "versions": versions(options.device)}), file=answers, flush=True
    )
    for line in sys.stdin:
        print(json.dumps(run_part(line.strip(), options.device)), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Compares mixtures of experts on one GPU: Ranvier, torchtitan and transformers, in one loop.

All train the same shape on the same random tokens: weights, gradients and both moments of torch's
fused AdamW in bf16. Each contestant is built, warmed up and timed; Ranvier is first and last, so
that drifting clocks are visible.

    python benchmarks/moe.py --json moe.json
    python benchmarks/moe.py --shapes 32x1408 --contestants ranvier,titan
    python benchmarks/moe.py --tiny

titan is torchtitan's Llama with its MoE layer, compiled as torchtitan does. titan-block is the same
with whole blocks compiled; the faster of the two counts. hf is transformers' Qwen3-MoE with
grouped_mm experts as the library runs it; it has no shared expert and so less work. hf-compiled is
the same under torch.compile, reported separately.
MFU counts 6 · (active weights without the embedding) + 12·L·D·S FLOPs per token.
Required: 1.10x the tokens per second of titan and 1.5x of transformers, and no more memory than
titan.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_gpu import GIB, chosen, versions
from peers import (
    FOLDER,
    RATE,
    UNUSED,
    Shape,
    Task,
    cross_entropy,
    first_line,
    import_titan,
    run_of,
    stubbed,
)
from torch import Tensor, nn

from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import Batch
from ranvier.errors import PlanError, RanvierError
from ranvier.grid import Grid
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.build_model import build_model
from ranvier.train.metrics import DeviceEvent, peak_flops
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.step import forward_backward

KINDS = {"titan": ("titan", "titan-block"), "hf": ("hf",)}
FASTER = {"titan": 1.10, "hf": 1.5}
"""Required speed relative to the fastest of each kind."""


@dataclass(frozen=True, kw_only=True)
class Mixed(Shape):
    """A Llama in which every MLP is a mixture of experts."""

    @property
    def active(self) -> int:
        """Active parameters per token, without the embedding."""
        attention = self.embed * (self.heads + self.kv_heads) * self.head_dim * 2
        experts = (
            3 * self.embed * (self.experts_per_token * self.expert_mlp + self.shared_expert_mlp)
        )
        norms = 2 * self.embed
        layer = attention + experts + norms + self.experts * self.embed
        return self.layers * layer + self.vocab * self.embed + self.embed

    @property
    def parameters(self) -> int:
        """All parameters."""
        idle = 3 * self.embed * (self.experts - self.experts_per_token) * self.expert_mlp
        return self.active + self.layers * idle + self.vocab * self.embed

    def flops(self, *, full: bool = True) -> int:
        """FLOPs per token, forward and backward."""
        attention = self.layers * self.heads * self.head_dim * self.max_seq
        return 6 * self.active + (12 if full else 6) * attention


def _shape(experts: int, top: int, width: int, **rest: Any) -> Mixed:
    sizes = {
        "experts": experts,
        "experts_per_token": top,
        "expert_mlp": width,
        "shared_expert_mlp": width,
    }
    return Mixed.of(16, 2048, 32, width, **{**sizes, **rest})  # type: ignore[return-value]


SHAPES: dict[str, tuple[Mixed, int]] = {
    "32x1408": (_shape(32, 4, 1408), 4),
    "64x704": (_shape(64, 8, 704, shared_expert_mlp=1408), 4),
}
"""Shapes and sequences per step."""
TINY = {
    "tiny": (
        replace(
            _shape(8, 2, 64, vocab=512, max_seq=64),
            layers=2,
            embed=64,
            heads=4,
            kv_heads=2,
            head_dim=16,
        ),
        2,
    )
}
"""A shape that a CPU trains quickly."""

# ---- contestants ------------------------------------------------------------------------


@dataclass
class Contestant:
    """Weights, and the function that computes their gradients."""

    weights: list[Tensor]
    learn: Callable[[Tensor, Tensor], Tensor]
    """Returns the mean loss of tokens and targets, and leaves gradients in the weights."""
    shape: Mixed
    undo: Callable[[], None] = lambda: None
    forget: Callable[[], None] | None = None
    """Frees the gradients; None if the optimizer does."""
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Takes one step."""
        loss = self.learn(tokens, targets)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.forget is not None:
            self.forget()
        return loss.detach()


def ours(task: Task, settings: Sequence[str] = ()) -> Contestant:
    """Returns Ranvier on a grid of one rank; its buckets are the weights of the loop's AdamW."""
    assert isinstance(task.shape, Mixed), task.shape
    chosen_ = dict(text.partition("=")[::2] for text in settings)
    known = {"train.dtype": "bf16", "plan.recompute": "none", **chosen_}
    run = resolve_run(
        run_of(task.shape, task.batch, known, task.device.type),
        ResolveContext(world_size=1, device=task.device),
    )
    grid = Grid({})
    model = build_model(run, grid, task.device, local_ranks=1)
    flow = ActivationShape(task.batch, task.shape.max_seq, 2, statistics_itemsize=4)
    for note in choose_arithmetic(run, model, grid, task.device, flow):
        print(f"    {note}")
    parallel = get_parallel_model(model)
    queue = parallel.bucket_scheduler

    def passes(tokens: Tensor, targets: Tensor) -> Tensor:
        micros = Batch(tokens, targets).split_micro_batches(grid, task.batch)
        loss = forward_backward(model, micros)
        grid.trace.waited_events = []  # as the trainer does
        return loss

    passes(*task.pairs[0])  # shows in which pieces gradients come
    pieces = [
        (bucket, at, len(grad)) for bucket, found in queue.finish_gradients() for at, grad in found
    ]
    weights = [nn.Parameter(bucket.data[at : at + size]) for bucket, at, size in pieces]
    queue.begin_step("")

    def learn(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = passes(tokens, targets)
        grads = [grad for _, found in queue.finish_gradients() for _, grad in found]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.to(weight.dtype).view_as(weight)
        return loss

    return Contestant(weights, learn, task.shape, forget=partial(queue.begin_step, ""))


def _plain(model: nn.Module, loss_of: Callable[..., Tensor], shape: Mixed, **rest: Any) -> Any:
    """Returns a contestant whose model has its own weights."""
    model.train()

    def learn(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        return loss

    return Contestant(list(model.parameters()), learn, shape, **rest)


def titan(task: Task, *, whole: bool = False) -> Contestant:
    """Returns torchtitan's Llama with its MoE layer. whole: compile whole blocks, with graph
    breaks.
    """
    transformer, arguments, _ = import_titan()
    with stubbed(*UNUSED):
        from torchtitan.models.llama4.infra.parallelize import apply_compile
        from torchtitan.models.moe import moe

    shape = task.shape
    assert isinstance(shape, Mixed), shape
    router = {"score_func": "softmax", "route_norm": True, "load_balance_coeff": None}
    shared = shape.shared_expert_mlp // shape.expert_mlp
    sizes = {
        "num_experts": shape.experts,
        "top_k": shape.experts_per_token,
        "num_shared_experts": shared,
    }
    with torch.device(task.device), torch.no_grad():
        model = transformer(
            arguments(
                dim=shape.embed,
                n_layers=shape.layers,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                vocab_size=shape.vocab,
                rope_theta=shape.rope_theta,
                max_seq_len=shape.max_seq,
            )
        )
        model.init_weights()
        for block in model.layers.values():
            layer = moe.MoE(moe.MoEArgs(**sizes, **router), shape.embed, shape.expert_mlp)
            layer.init_weights(0.02, task.device)
            block.feed_forward, block.moe_enabled = layer, True
            for param in block.parameters():  # at once: whole it would be twice as large
                param.data = param.data.bfloat16()
        for param in model.parameters():
            param.data = param.data.bfloat16()  # not the buffer: rotary angles are complex
    plain = moe._run_experts_grouped_mm

    def undo() -> None:
        moe._run_experts_grouped_mm = plain

    of_logits: Any = cross_entropy
    if task.cuda:
        if whole:
            torch._dynamo.config.capture_scalar_outputs = True
            for block in model.layers.values():
                block.compile()
        else:
            apply_compile(model, types.SimpleNamespace(backend="inductor"), ep_enabled=False)
        of_logits = torch.compile(cross_entropy)
    return _plain(model, lambda x, y: of_logits(model(x), y), shape, undo=undo)  # type: ignore[no-any-return]


def transformers(task: Task, *, eager: bool = False) -> Contestant:
    """Returns transformers' Qwen3-MoE with grouped matmuls; it has no shared expert."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    shape = replace(task.shape, shared_expert_mlp=0)
    assert isinstance(shape, Mixed), shape
    config = module.Qwen3MoeConfig(
        hidden_size=shape.embed,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        moe_intermediate_size=shape.expert_mlp,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_seq,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=1e-5,
        use_cache=False,
    )
    with torch.device(task.device):
        model = module.Qwen3MoeForCausalLM._from_config(
            config,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
            dtype=torch.bfloat16,
        )
    call = model if eager or not task.cuda else torch.compile(model)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = call(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return loss

    return _plain(model, loss_of, shape)  # type: ignore[no-any-return]


CONTESTANTS: dict[str, Callable[[Task], Contestant]] = {
    "ranvier": ours,
    "titan": titan,
    "titan-block": partial(titan, whole=True),
    "hf": partial(transformers, eager=True),
    "hf-compiled": transformers,
}
"""How each contestant is made."""

# ---- the loop ---------------------------------------------------------------------------


def tried(make: Callable[[Task], Contestant], task: Task, asked: Any) -> dict[str, Any]:
    """Builds, warms up and times a contestant; returns its memory, or why it failed."""
    if task.cuda:
        torch.cuda.reset_peak_memory_stats()
    one: Contestant | None = None
    found: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        torch.manual_seed(0)
        one = make(task)
        for i in range(asked.warm):
            one.step(*task.pairs[i % len(task.pairs)])
        if task.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what compilers and tuning took
            torch.cuda.reset_peak_memory_stats()
        found["build_seconds"] = time.perf_counter() - start
        found |= _timed(one, task, asked)
    except Exception as error:
        if asked.trace:
            raise
        found["failed"] = first_line(error)
    if one is not None:
        one.undo()
    del one
    torch._dynamo.reset()  # what was compiled keeps weights
    gc.collect()
    if task.cuda:
        torch.cuda.empty_cache()
    return found


def _timed(one: Contestant, task: Task, asked: Any) -> dict[str, Any]:
    shape, times = one.shape, []
    count = sum(weight.numel() for weight in one.weights)
    extra = (count - shape.parameters) / shape.parameters
    if abs(extra) > 1e-3:  # queries' and keys' norms, a few numbers of padding
        raise ValueError(f"it has {count:,} parameters, not {shape.parameters:,}")
    loss = torch.zeros(())
    for _ in range(asked.windows):
        begin = DeviceEvent(task.device)
        for i in range(asked.steps):
            loss = one.step(*task.pairs[i % len(task.pairs)])
        end = DeviceEvent(task.device)
        end.synchronize()
        times.append(end.seconds_since(begin) / asked.steps)
    seconds, tokens = statistics.median(times), task.batch * shape.max_seq
    peak = peak_flops(task.device, torch.bfloat16)
    return {
        "ms": seconds * 1e3,
        "spread": (max(times) - min(times)) / seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": None if peak is None else shape.flops() * tokens / seconds / peak,
        "memory": torch.cuda.max_memory_allocated() if task.cuda else 0,
        "active": shape.active,
        "parameters": count,
        "loss": float(loss),
    }


def line(name: str, row: dict[str, Any], best: float | None) -> str:
    """Formats the numbers of a contestant."""
    if "failed" in row:
        return f"{name:12} failed: {row['failed']}"
    mfu = "     -" if row["mfu"] is None else f"{row['mfu']:6.1%}"
    speed = row["tokens_per_second"]
    ratio = "" if best is None else f"  ranvier is {best / speed:.3f}x"
    return (
        f"{name:12} {speed:9,.0f} tok/s {row['ms']:9.2f} ms ±{row['spread'] / 2:5.1%}  MFU {mfu}  "
        f"{row['memory'] / GIB:6.1f} GiB  loss {row['loss']:.3f}  built in "
        f"{row['build_seconds']:.0f} s{ratio}"
    )


def verdicts(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Returns whether speed and memory reach the requirements."""
    done = {name: row for name, row in rows.items() if "failed" not in row}
    mine = [row for name, row in done.items() if name.startswith("ranvier")]
    if not mine:
        return ["ranvier was not timed"]
    speed = statistics.mean(row["tokens_per_second"] for row in mine)
    memory = max(row["memory"] for row in mine)
    found = []
    for kind, factor in FASTER.items():
        theirs = [row for name, row in done.items() if name in KINDS[kind]]
        if not theirs:
            found.append(f"{kind}: not timed")
            continue
        best = max(theirs, key=lambda row: float(row["tokens_per_second"]))
        ratio = speed / best["tokens_per_second"]
        word = "reached" if ratio >= factor else "MISSED"
        found.append(f"{kind}: {ratio:.3f}x, required {factor}x, {word}")
        if kind == "titan":
            word = "reached" if memory <= best["memory"] else "MISSED"
            sizes = f"{memory / GIB:.1f} of {best['memory'] / GIB:.1f} GiB"
            found.append(f"memory: {sizes}, {word}")
    return found


def play(name: str, task: Task, asked: Any, names: Sequence[str]) -> dict[str, Any]:
    """Runs one shape: all contestants, and Ranvier again at the end."""
    shape = task.shape
    assert isinstance(shape, Mixed), shape
    print(
        f"\n{name}: {shape.parameters / 1e9:.3f}B parameters, {shape.active / 1e9:.3f}B active, "
        f"{task.batch} x {shape.max_seq} tokens",
        flush=True,
    )
    made = {**CONTESTANTS, "ranvier": partial(ours, settings=asked.ours)}
    turns = [(one, one) for one in names]
    if "ranvier" in names and len(names) > 1:
        turns.append(("ranvier-2", "ranvier"))
    rows: dict[str, dict[str, Any]] = {}
    for title, one in turns:
        rows[title] = tried(made[one], task, asked)
        best = rows.get("ranvier", {}).get("tokens_per_second")
        print(line(title, rows[title], None if title.startswith("ranvier") else best), flush=True)
    words = verdicts(rows) if task.cuda else ["no verdict on a CPU"]
    print("; ".join(words), flush=True)
    return {"shape": name, "config": asdict(shape), "contestants": rows, "verdicts": words}


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", help=f"comma-separated list of {', '.join(SHAPES)} (default: all)")
    add("--contestants", help=f"comma-separated list of {', '.join(CONTESTANTS)} (default: all)")
    add("--ours", action="append", default=[], metavar="KEY=VALUE", help="a setting of Ranvier")
    add("--windows", type=int, default=3, help="windows of each contestant")
    add("--steps", type=int, default=5, help="steps per window")
    add("--warm", type=int, default=3, help="steps before the first window, which also compile")
    add("--json", type=Path, metavar="FILE", help="file to write all results to")
    add("--trace", action="store_true", help="stop at the first failure, with its traceback")
    add("--tiny", action="store_true", help="a small model on the CPU, as a check")
    return parser.parse_args()


def compare(asked: argparse.Namespace) -> None:
    """Runs all selected shapes."""
    if not asked.tiny and not torch.cuda.is_available():
        raise PlanError("torch sees no CUDA device. The benchmark needs one. Use --tiny here.")
    device = torch.device("cpu") if asked.tiny else torch.device("cuda", 0)
    shapes = TINY if asked.tiny else SHAPES
    names = chosen(asked.contestants, list(CONTESTANTS), "contestant")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    kind = platform.machine() if asked.tiny else torch.cuda.get_device_name(device)
    facts: dict[str, Any] = {"command": sys.argv, "device": kind, "versions": versions()}
    print(f"{kind}, " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # of all
    facts["results"] = []
    for name in chosen(asked.shapes, list(shapes), "shape"):
        shape, batch = shapes[name]
        task = Task.of(shape, batch, device, clip=False)
        facts["results"].append(play(name, task, asked, names))
        if asked.json is not None:
            asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Compares; prints user errors without a traceback."""
    try:
        compare(settings())
    except RanvierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

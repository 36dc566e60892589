"""Compares mixtures of experts on one GPU: Ranvier, torchtitan and transformers, in one loop.

All train the same shape on the same random tokens: weights, gradients and both moments of torch's
fused AdamW in bf16. Each contestant is built, warmed up and timed; Ranvier is first and last, so
that drifting clocks are visible.

    python benchmarks/moe.py --json moe.json
    python benchmarks/moe.py --shapes 32x1408 --contestants ranvier,titan
    python benchmarks/moe.py --smoke

titan is torchtitan's Llama with its MoE layer, compiled as torchtitan does. titan-block is the same
with whole blocks compiled; the faster of the two counts. hf is transformers' Qwen3-MoE with
grouped_mm experts as the library runs it; it has no shared expert and so less work. hf-compiled is
the same under torch.compile, reported separately.
Before it is timed, each contestant gets the weights of a plain twin in fp32 and takes four steps,
which must be the twin's (`right_step.py`); there is no ratio with one that differs. The printed
loss is the last one of these.
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
from one_gpu import GIB, TOY_RATE, chosen, versions
from peers import (
    EXPERT_NAME,
    FOLDER,
    LAYER_NAME,
    RATE,
    UNUSED,
    Location,
    Locations,
    Shape,
    Task,
    cross_entropy,
    first_line,
    import_titan,
    load_model,
    model_gradients,
    run_of,
    stubbed,
    titan_location,
)
from right_step import (
    Check,
    NamedTensors,
    Reference,
    TwinWeights,
    UpdateRule,
    check_step,
    checked_ratio,
    load_parallel,
    parallel_gradients,
)
from rows import append_rows, checked_cell, data_columns, package_hash
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
TOY = {
    "toy": (
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

    task: Task
    weights: list[Tensor]
    learn: Callable[[Tensor, Tensor], Tensor]
    """Returns the mean loss of tokens and targets, and leaves gradients in the weights."""
    load: Callable[[TwinWeights], None]
    """Loads the weights of the twin."""
    named_gradients: Callable[[TwinWeights], NamedTensors]
    """Yields the gradients that `learn` has left, by Hugging Face name."""
    undo: Callable[[], None] = lambda: None
    forget: Callable[[], None] | None = None
    """Frees the gradients; None if the optimizer does."""
    loss: Tensor | None = None
    on_gradients: Callable[[NamedTensors], None] | None = None
    rule: UpdateRule = field(init=False)

    def __post_init__(self) -> None:
        self.rule = UpdateRule(self.task.lr, dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(
            self.weights,
            lr=self.rule.lr,
            betas=self.rule.betas,
            weight_decay=self.rule.weight_decay,
            fused=True,
        )

    def load_weights(self, weights: TwinWeights) -> None:
        """Loads the weights of the twin."""
        self.load(weights)
        self.twin_weights = weights

    def step(self, i: int) -> None:
        """Takes one step on batch number i."""
        self.loss = self.learn(*self.task.pairs[i % len(self.task.pairs)]).detach()
        if self.on_gradients is not None:
            self.on_gradients(self.named_gradients(self.twin_weights))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.forget is not None:
            self.forget()


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
    weights = {
        (bucket, start, len(grad)): nn.Parameter(bucket.data[start : start + len(grad)])
        for bucket, pieces in queue.finish_gradients()
        for start, grad in pieces
    }
    queue.begin_step("")

    def learn(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = passes(tokens, targets)
        for bucket, pieces in queue.finish_gradients():
            for start, grad in pieces:
                weights[bucket, start, len(grad)].grad = grad.to(bucket.data.dtype)
        return loss

    return Contestant(
        task,
        list(weights.values()),
        learn,
        partial(load_parallel, parallel),
        partial(parallel_gradients, parallel),
        forget=partial(queue.begin_step, ""),
    )


def _plain(
    task: Task,
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    locate: Locations,
    undo: Callable[[], None] = lambda: None,
) -> Contestant:
    """Returns a contestant whose model has its own weights."""
    model.train()

    def learn(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        return loss

    return Contestant(
        task,
        list(model.parameters()),
        learn,
        partial(load_model, model, locate=locate),
        partial(model_gradients, model, locate=locate),
        undo=undo,
    )


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
    router = {
        "score_func": "softmax",
        "route_norm": True,
        "load_balance_coeff": None,
        # By default it multiplies the inputs of experts by their weights, which is another model:
        # the others multiply the outputs.
        "score_before_experts": False,
        "use_grouped_mm": task.cuda,
    }
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
    locate = partial(titan_location, shape)
    return _plain(task, model, lambda x, y: of_logits(model(x), y), locate, undo)


def fused_location(name: str) -> Location:
    """Returns where transformers has a tensor: all experts of a layer in one parameter."""
    layer = LAYER_NAME.fullmatch(name.removesuffix(".weight"))
    expert = None if layer is None else EXPERT_NAME.fullmatch(layer[2])
    if layer is None or expert is None:
        return Location(name)
    number, kind = int(expert[1]), expert[2]
    prefix = f"model.layers.{layer[1]}.mlp.experts"
    if kind == "down_proj":
        return Location(f"{prefix}.down_proj", lambda x: x[number])
    half = ("gate_proj", "up_proj").index(kind)
    return Location(f"{prefix}.gate_up_proj", lambda x: x[number].chunk(2)[half])


def without_shared_expert(shape: Shape) -> Mixed:
    """Returns the shape of transformers' Qwen3-MoE."""
    assert isinstance(shape, Mixed), shape
    return replace(shape, shared_expert_mlp=0, qk_norm="per_head")


def transformers(task: Task, *, eager: bool = False) -> Contestant:
    """Returns transformers' Qwen3-MoE with grouped matmuls; it has no shared expert."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    shape = without_shared_expert(task.shape)
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

    return _plain(task, model, loss_of, fused_location)


CONTESTANTS: dict[str, Callable[[Task], Contestant]] = {
    "ranvier": ours,
    "titan": titan,
    "titan-block": partial(titan, whole=True),
    "hf": partial(transformers, eager=True),
    "hf-compiled": transformers,
}
"""How each contestant is made."""
NEED_GPU = ("titan", "titan-block", "hf-compiled")
"""Contestants without a CPU path, or that would be the same as another there."""
SHAPED: dict[str, Callable[[Shape], Mixed]] = {
    "hf": without_shared_expert,
    "hf-compiled": without_shared_expert,
}
"""Contestants of another shape than asked for."""


def shape_of(name: str, task: Task) -> Mixed:
    """Returns the shape that a contestant has."""
    shape = SHAPED[name](task.shape) if name in SHAPED else task.shape
    assert isinstance(shape, Mixed), shape
    return shape


# ---- the loop ---------------------------------------------------------------------------


def tried(
    title: str,
    make: Callable[[Task], Contestant],
    task: Task,
    reference: Reference,
    asked: Any,
) -> dict[str, Any]:
    """Builds, checks, warms up and times a contestant; returns its numbers, or why it failed."""
    # First, while no contestant holds memory.
    reference.record(UpdateRule(task.lr, dtype=torch.bfloat16))
    if task.cuda:
        torch.cuda.reset_peak_memory_stats()
    one: Contestant | None = None
    found: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        torch.manual_seed(0)
        one = make(task)
        check = check_step(title, one, reference)
        print(f"    {check}", flush=True)
        found |= {"checked": check.passed, "check": str(check), "loss": check.loss}
        for i in range(asked.warm):
            one.step(i)
        if task.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what compilers and tuning took
            torch.cuda.reset_peak_memory_stats()
        found["build_seconds"] = time.perf_counter() - start
        shape = reference.weights.config
        assert isinstance(shape, Mixed), shape
        found |= _timed(one, shape, task, asked)
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


def _timed(one: Contestant, shape: Mixed, task: Task, asked: Any) -> dict[str, Any]:
    times = []
    count = sum(weight.numel() for weight in one.weights)
    extra = (count - shape.parameters) / shape.parameters
    if abs(extra) > 1e-3:  # queries' and keys' norms, a few numbers of padding
        raise ValueError(f"it has {count:,} parameters, not {shape.parameters:,}")
    for _ in range(asked.windows):
        begin = DeviceEvent(task.device)
        for i in range(asked.steps):
            one.step(i)
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
    }


def check_of(name: str, row: dict[str, Any]) -> Check:
    """Returns the check of a row."""
    return Check(name, "", () if row["checked"] else (row["check"],))


def line(name: str, row: dict[str, Any], ours: dict[str, Any] | None) -> str:
    """Formats the numbers of a contestant."""
    if "failed" in row:
        return f"{name:12} failed: {row['failed']}"
    mfu = "     -" if row["mfu"] is None else f"{row['mfu']:6.1%}"
    speed = row["tokens_per_second"]
    ratio = ""
    if ours is not None and "failed" not in ours:
        checks = (check_of("ranvier", ours), check_of(name, row))
        ratio = f"  ranvier is {checked_ratio(ours['tokens_per_second'] / speed, checks)}"
    return (
        f"{name:12} {speed:9,.0f} tok/s {row['ms']:9.2f} ms ±{row['spread'] / 2:5.1%}  MFU {mfu}  "
        f"{row['memory'] / GIB:6.1f} GiB  loss {row['loss']:.3f}  built in "
        f"{row['build_seconds']:.0f} s{ratio}"
    )


def verdicts(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Returns whether speed and memory reach the requirements."""
    done = {name: row for name, row in rows.items() if "failed" not in row and row["checked"]}
    mine = [row for name, row in done.items() if name.startswith("ranvier")]
    if not mine:
        return ["ranvier was not timed, or is wrong"]
    speed = statistics.mean(row["tokens_per_second"] for row in mine)
    memory = max(row["memory"] for row in mine)
    found = []
    for kind, factor in FASTER.items():
        theirs = [row for name, row in done.items() if name in KINDS[kind]]
        if not theirs:
            found.append(f"{kind}: not timed, or wrong")
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


CSV_NAMES = {
    "ranvier": "ranvier",
    "ranvier-2": "ranvier",
    "titan": "torchtitan's MoE layer, compiled",
    "titan-block": "torchtitan's MoE layer, whole blocks compiled",
    "hf": "transformers, grouped_mm, no shared expert",
    "hf-compiled": "transformers under torch.compile",
}
"""Names of the contestants in moe_one_gpu.csv."""


def csv_rows(shape: Mixed, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of moe_one_gpu.csv; a ratio is relative to the mean of ours."""
    timed = {name: row for name, row in rows.items() if "failed" not in row}
    own = [row for name, row in timed.items() if name.startswith("ranvier")]
    csv_rows = []
    for name, row in timed.items():
        is_own = name.startswith("ranvier")
        checks = [check_of(name, row)] + ([] if is_own else [check_of("ranvier", x) for x in own])
        cells: dict[str, Any] = {
            "shape": f"{shape.experts} experts of {shape.expert_mlp}, "
            f"top {shape.experts_per_token}",
            "contestant": CSV_NAMES[name],
            "tokens_per_second": f"{row['tokens_per_second']:.0f}",
            "mfu_full_percent": "" if row["mfu"] is None else f"{100 * row['mfu']:.1f}",
            "memory_gib": f"{row['memory'] / GIB:.1f}",
            "note": time.strftime("%Y-%m-%d") + (", " * is_own) + _turn_of(name),
            "checked": checked_cell(*checks),
            "source": package_hash(),
        }
        if own and not is_own and cells["checked"]:
            speed = statistics.mean(x["tokens_per_second"] for x in own)
            cells["ranvier_speedup"] = f"{speed / row['tokens_per_second']:.3f}"
        csv_rows.append(cells)
    return csv_rows


def _turn_of(name: str) -> str:
    return {"ranvier": "first", "ranvier-2": "last"}.get(name, "")


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
    references: dict[Mixed, Reference] = {}
    for title, one in turns:
        own_shape = shape_of(one, task)
        reference = references.setdefault(
            own_shape, replace(task, shape=own_shape).reference(dtype=torch.bfloat16)
        )
        rows[title] = tried(title, made[one], task, reference, asked)
        ours_row = None if title.startswith("ranvier") else rows.get("ranvier")
        print(line(title, rows[title], ours_row), flush=True)
    words = verdicts(rows) if task.cuda else ["no verdict on a CPU"]
    print("; ".join(words), flush=True)
    if asked.csv is not None:
        append_rows(asked.csv, data_columns("moe_one_gpu.csv"), csv_rows(shape, rows))
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
    add("--csv", type=Path, metavar="FILE", help="file to append rows to, as moe_one_gpu.csv")
    add("--trace", action="store_true", help="stop at the first failure, with its traceback")
    add("--smoke", action="store_true", help="a small model on the CPU, as a check")
    return parser.parse_args()


def compare(asked: argparse.Namespace) -> None:
    """Runs all selected shapes."""
    if not asked.smoke and not torch.cuda.is_available():
        raise PlanError("torch sees no CUDA device. The benchmark needs one. Use --smoke here.")
    device = torch.device("cpu") if asked.smoke else torch.device("cuda", 0)
    shapes = TOY if asked.smoke else SHAPES
    if asked.smoke:
        asked.windows, asked.steps, asked.warm = 1, 1, 1
        torch.set_num_threads(1)
    names = chosen(asked.contestants, list(CONTESTANTS), "contestant")
    if asked.smoke:
        for name in NEED_GPU:
            print(f"{name} is skipped: it needs a GPU")
        names = [name for name in names if name not in NEED_GPU]
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    kind = platform.machine() if asked.smoke else torch.cuda.get_device_name(device)
    facts: dict[str, Any] = {"command": sys.argv, "device": kind, "versions": versions()}
    print(f"{kind}, " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # of all
    facts["results"] = []
    for name in chosen(asked.shapes, list(shapes), "shape"):
        shape, batch = shapes[name]
        rate = TOY_RATE if asked.smoke else RATE
        task = Task.of(shape, batch, device, clip=False, lr=rate)
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

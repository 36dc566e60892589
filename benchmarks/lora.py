"""Compares LoRA on one GPU with PEFT: the same model, in one process, alternating.

Both train adapters of the same rank on all linear layers of a Llama with frozen weights in bf16, on
the same random tokens. PEFT trains the model of transformers with torch's attention and fused
AdamW, as its users do; `--compile` also compiles its blocks.

    python benchmarks/lora.py --size 8b --batch 1
    python benchmarks/lora.py --smoke

Before they are timed, both get the weights of a plain twin, adapters included, and take four steps,
which must be the twin's (`right_step.py`); there is no ratio otherwise. DoRA has no twin.
MFU counts 4·N + 6·L·D·S FLOPs per token, because gradients of frozen weights are not computed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from one_gpu import SIZES, TOY, TOY_RATE
from peers import (
    RATE,
    Contestant,
    Location,
    Ours,
    Shape,
    Task,
    cross_entropy,
    load_model,
    model_gradients,
    rule_of_run,
    run_of,
)
from right_step import Check, NamedTensors, TwinWeights, UpdateRule, check_step, checked_ratio
from rows import append_rows, checked_cell, data_columns, package_hash
from torch import Tensor

from ranvier.models.config import AdapterConfig
from ranvier.train.metrics import peak_flops

GIB = 2**30


def peft_location(name: str) -> Location:
    """Returns where PEFT has a tensor."""
    return Location(f"base_model.model.{name}")


class Theirs:
    """transformers and PEFT."""

    def __init__(self, task: Task, rank: int, *, dora: bool, compiled: bool, again: bool) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = task.shape
        config = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.embed,
            intermediate_size=shape.mlp,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.max_seq,
            rms_norm_eps=shape.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=shape.tie_embeddings,
        )
        torch.set_default_dtype(torch.bfloat16 if task.cuda else torch.float32)
        with torch.device(task.device):
            model: Any = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        self.model = get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=16, target_modules=every, use_dora=dora)
        )
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        if compiled:
            for layer in model.model.layers:
                layer.compile()
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.parameters = sum(param.numel() for param in params)
        # PEFT has adapters in fp32 whatever the base's dtype.
        self.rule = UpdateRule(task.lr, dtype=params[0].dtype)
        self.optimizer = torch.optim.AdamW(
            params,
            lr=self.rule.lr,
            betas=self.rule.betas,
            weight_decay=self.rule.weight_decay,
            fused=task.cuda,
        )
        self.task = task
        self.loss: Tensor | None = None
        self.on_gradients: Callable[[NamedTensors], None] | None = None

    def load_weights(self, weights: TwinWeights) -> None:
        """Loads the weights of the twin, adapters included."""
        load_model(self.model, weights, peft_location)
        self.weights = weights

    def step(self, i: int) -> None:
        """Takes one optimizer step on batch number i."""
        tokens, targets = self.task.pairs[i % len(self.task.pairs)]
        loss: Tensor = cross_entropy(self.model(tokens, use_cache=False).logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.on_gradients is not None:
            self.on_gradients(model_gradients(self.model, self.weights, peft_location))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()

    def close(self) -> None:
        """Frees all memory."""
        self.__dict__.clear()


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, *TOY], default="8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=0, help="tokens per sample; 0: as the size has")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--compile", action="store_true", help="also compile the blocks of PEFT")
    parser.add_argument("--checkpointing", action="store_true", help="PEFT recomputes activations")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="file to append a row to, as lora.csv")
    parser.add_argument("--smoke", action="store_true", help="a small model on the CPU, as a check")
    words = parser.parse_args()
    if words.smoke:
        words.size, words.device, words.rank, words.turns, words.steps = "toy", "cpu", 4, 1, 1
        torch.set_num_threads(1)
    return words


def timed(one: Contestant, steps: int, first: int, device: torch.device) -> float:
    """Returns the seconds per step."""
    _wait(device)
    began = time.perf_counter()
    for i in range(first, first + steps):
        one.step(i)
    _wait(device)
    return (time.perf_counter() - began) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations(shape: Shape) -> int:
    """Returns the FLOPs per token."""
    weights = shape.parameters - shape.table
    return 4 * weights + 6 * shape.layers * shape.heads * shape.head_dim * shape.max_seq


def main() -> None:
    """Builds both, alternates between them, and prints a table."""
    words = settings()
    shape = {**SIZES, **TOY}[words.size][0]
    if words.seq:
        shape = Shape(**{**vars(shape), "max_seq": words.seq})
    device = torch.device(words.device)
    task = Task.of(shape, words.batch, device, clip=False, lr=TOY_RATE if words.smoke else RATE)
    ours: Mapping[str, str] = {
        "lora.rank": str(words.rank),
        "lora.dora": str(words.dora),
        "guard.on_spike": "off",
    }
    peer = "PEFT" + " compiled" * words.compile + " checkpointing" * words.checkpointing
    makers: dict[str, Any] = {
        "Ranvier": lambda: Ours(task, ours),
        peer: lambda: Theirs(
            task, words.rank, dora=words.dora, compiled=words.compile, again=words.checkpointing
        ),
    }
    contestants, memory, checks = {}, {}, list[Check | None]()
    run = run_of(shape, words.batch, ours, device.type)
    reference = task.reference(AdapterConfig(rank=words.rank), dtype=torch.bfloat16)
    # First, while no contestant holds memory.
    for rule in () if words.dora else (rule_of_run(run, task.lr), UpdateRule(task.lr)):
        reference.record(rule)
    for name, make in makers.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        contestants[name] = make()
        checks.append(None if words.dora else check_step(name, contestants[name], reference))
        print(checks[-1] or f"{name}: not checked, as the twin has no DoRA", flush=True)
        timed(contestants[name], 3, 0, device)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        memory[name] = (peak - before) / GIB
        gc.collect()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(words.turns):
        for name, one in contestants.items():
            times[name].append(timed(one, words.steps, turn * words.steps, device))
    tokens, peak_speed = words.batch * shape.max_seq, peak_flops(device, torch.bfloat16)
    print(f"{words.size}, {words.batch} x {shape.max_seq} tokens, rank {words.rank}, on {device}")
    speeds = {name: tokens / statistics.median(found) for name, found in times.items()}
    for name, speed in speeds.items():
        mfu = f"  MFU {speed * operations(shape) / peak_speed:.1%}" if peak_speed else ""
        check = checks[list(contestants).index(name)]
        loss = f"{check.loss:.3f}" if check is not None else "-"
        print(f"{name:24} {speed:9,.0f} tokens/s{mfu}  {memory[name]:.1f} GiB  loss {loss}")
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    ratio = checked_ratio(statistics.median(ratios), checks)
    passed = all(check is not None and check.passed for check in checks)
    print(f"ratio {ratio}" + (f" ({min(ratios):.2f} to {max(ratios):.2f})" if passed else ""))
    if words.csv is not None:
        row: dict[str, Any] = {
            "size": words.size,
            "batch": words.batch,
            "peft": "compiled blocks" if words.compile else "eager",
            "ranvier_tokens_per_second": f"{speeds['Ranvier']:.0f}",
            "ranvier_gib": f"{memory['Ranvier']:.1f}",
            "peft_tokens_per_second": f"{speeds[peer]:.0f}",
            "peft_gib": f"{memory[peer]:.1f}",
            "note": time.strftime("%Y-%m-%d"),
            "checked": checked_cell(*checks),
            "source": package_hash(),
        }
        if peak_speed:
            mfu_percent = 100 * speeds["Ranvier"] * operations(shape) / peak_speed
            row["ranvier_mfu_percent"] = f"{mfu_percent:.1f}"
        if passed:
            row["speedup"] = f"{statistics.median(ratios):.3f}"
            row["speedup_low"], row["speedup_high"] = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        append_rows(words.csv, data_columns("lora.csv"), [row])


if __name__ == "__main__":
    main()

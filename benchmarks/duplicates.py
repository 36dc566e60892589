"""Counts all-to-all bytes of experts, with and without duplicated tokens, and in recomputation.

If the ranks of a tensor-parallel group have the same tokens, each of them sends all tokens to the
experts; DeepSpeed-TED drops these duplicates. In Ranvier a rank of row and col has a part of the
tokens and of their features, so its bytes decrease with row·col. The baseline repeats them as often
as a group with duplicates would. Bytes and calls are counted in torch's fake process group, below
the code of Ranvier, on one of many ranks. Nothing is computed (meta device). Experts are balanced.

    python benchmarks/duplicates.py
    python benchmarks/duplicates.py --size moe-tiny --expert 4 --seq 64 --json duplicates.json

Required: the bytes of a rank do not grow with row·col, and saved collectives add no call.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from script_parser import ScriptParser

from ranvier import launch
from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig, MemoryConfig, TrainConfig
from ranvier.grid import Grid
from ranvier.nn.moe.layer import MoELayer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.build_model import build_model
from ranvier.train.memory.usage import blank_batch
from ranvier.train.step import forward_backward

META = torch.device("meta")
GRIDS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (8, 1))
"""Degrees of row and col."""
MICRO = 4


@dataclass(frozen=True)
class Row:
    """A forward and backward pass of a rank."""

    row: int
    col: int
    ours: int
    """Bytes of all-to-alls."""
    duplicated: int


def run_of(
    size: str, *, expert: int, row: int, col: int, seq: int, keep: bool, full: bool
) -> RunConfig:
    """Returns two layers of a size, of which at least one is an MoE layer."""
    plan = Plan(
        data=1,
        expert=expert,
        row=row,
        col=col,
        global_batch=MICRO * expert,
        micro_batch=MICRO,
        recompute="full" if full else "none",
    )
    kept: Literal["save", "rerun"] = "save" if keep else "rerun"
    return RunConfig(
        model=replace(named_model(size), layers=2),
        plan=plan,
        data=DataConfig(seq_len=seq, document_mask=False),
        train=TrainConfig(dtype="bf16"),
        memory=MemoryConfig(recompute_collectives=kept),
    ).check_and_resolve(plan.world_size)


def called(run: RunConfig, *, duplicated: bool = False) -> list[launch.CommCall]:
    """Returns the calls of a forward and backward pass of the first rank."""
    with launch.fake_process_group(run.plan.world_size, 0):
        grid = Grid.from_plan(run.plan, rank=0, connected=True)
        model = build_model(run, grid, META, local_ranks=1)
        for leaf in get_parallel_model(model).layers.values():
            if isinstance(leaf, MoELayer):
                leaf.duplicate_tokens = duplicated
        with launch.count_comm_calls() as calls:
            forward_backward(model, [blank_batch(run, MICRO, grid, META)])
    return calls


def swapped(calls: list[launch.CommCall]) -> int:
    """Returns the bytes of all-to-alls."""
    return sum(call.bytes for call in calls if call.op == "all_to_all")


def rows(size: str, expert: int, seq: int) -> list[Row]:
    """Returns the bytes of every grid, without and with duplicates."""
    found = []
    for row, col in GRIDS:
        run = run_of(size, expert=expert, row=row, col=col, seq=seq, keep=False, full=False)
        both = [swapped(called(run, duplicated=how)) for how in (False, True)]
        found.append(Row(row, col, *both))
    return found


def repeated(size: str, expert: int, seq: int) -> dict[str, int]:
    """Returns the calls of a pass on expert x 2 x 2 ranks by recomputation: none, full, saved."""
    ways = {"none": (False, False), "full, rerun": (False, True), "full, save": (True, True)}
    shape = {"expert": expert, "row": 2, "col": 2, "seq": seq}
    return {
        name: len(called(run_of(size, **shape, keep=keep, full=full)))
        for name, (keep, full) in ways.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Counts, prints and compares."""
    parser = ScriptParser(
        __doc__, smoke="--size moe-tiny --expert 4 --seq 64 --json {folder}/rows.json"
    )
    parser.add_argument("--size", default="ted-6.7b-16e")
    parser.add_argument("--expert", type=int, default=16)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--json", default="")
    asked = parser.parse_args(arguments)
    found = rows(asked.size, asked.expert, asked.seq)
    print(f"{asked.size}, 2 layers, expert={asked.expert}, {MICRO} x {asked.seq} tokens per pass")
    print(f"{'row':>4}{'col':>4}{'MB sent':>12}{'duplicated':>12}{'times':>8}")
    for one in found:
        times = one.duplicated / one.ours
        sizes = f"{one.ours / 1e6:>12.3f}{one.duplicated / 1e6:>12.3f}"
        print(f"{one.row:>4}{one.col:>4}{sizes}{times:>8.1f}")
    again = repeated(asked.size, asked.expert, asked.seq)
    print("calls per pass, row=2 col=2: " + ", ".join(f"{k} {n}" for k, n in again.items()))
    if asked.json:
        facts = {"rows": [asdict(one) for one in found], "calls": again}
        Path(asked.json).write_text(json.dumps(facts, indent=1))
    grown = [one for one in found if one.ours > found[0].ours]
    good = not grown and again["none"] == again["full, save"] < again["full, rerun"]
    print("PASS" if good else f"FAIL: {grown} {again}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

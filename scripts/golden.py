"""Golden records: bit-exact results of a commit, to compare a refactoring with.

Usage: python scripts/golden.py record [REV] [--only NAME ...]
       python scripts/golden.py compare BEFORE [AFTER]

`record` checks out a commit into a separate worktree and runs a fixed set of configurations there:
20 steps each, with one thread per rank. It stores losses and gradient norms as hexadecimal floats,
the SHA-256 of every checkpoint tensor, the communication events of the last step of every rank, and
the JSON of several plans. `compare` prints one line per configuration and exits with 1 if any
differs. A commit without a record is recorded first.

Records are written to `.cache/golden/` and are not committed. The settings below have their current
names. RENAMED translates them for commits from before a renaming.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / ".cache" / "golden"

RENAMED = {
    "train.output_dir": "train.out",
    "train.sample_prompt": "train.prompt",
    "train.trace_comm": "train.trace",
    "train.eval_interval": "train.evaluate",
    "train.eval_samples": "train.evaluate_samples",
    "data.seq_len": "data.seq",
    "model.tie_embeddings": "model.tied",
    "plan.global_batch": "plan.batch",
    "plan.schedule": "plan.policy",
    "plan.virtual_stages": "plan.chunks",
    "plan.col_splits": "plan.inner",
    "plan.rank_order": "plan.order",
    "plan.reshard_after": "plan.gathered",
    "memory.optimizer_states": "memory.states",
    "memory.parameters": "memory.weights",
}
"""Current name of a setting -> its name before settings had a format number."""
RENAMED_VALUES = {("plan.schedule", "message_driven"): "message"}
"""(current setting, current value) -> its previous value."""
RENAMED_KEYS = {
    "held_out_loss": "val_loss",
    "rivals": "baselines",
    "again": "recompute",
    "inner": "col_splits",
    "order": "rank_order",
    "batch": "global_batch",
    "policy": "schedule",
    "chunks": "virtual_stages",
    "gathered": "reshard_after",
    "states": "optimizer_states",
}
"""Previous key in metrics.jsonl or in the JSON of a plan -> its current name."""
RENAMED_WORDS = {
    ("reshard_after", "again"): "micro_batch",
    ("reshard_after", "keep"): "step",
    ("schedule", "message"): "message_driven",
}
"""(current key, previous value) -> its current value."""
UNCOMPARED_PLAN_KEYS = {"command", "why"}
"""Keys in the JSON of a plan with sentences and commands, which may be reworded."""


@dataclass(frozen=True)
class Training:
    """A run of 20 steps."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that differ from SMALL."""
    ranks: int = 1


SMALL = {
    "train.steps": "20",
    "train.dtype": "fp32",
    "train.device": "cpu",
    "comm.algorithm": "native",
    "train.sample_prompt": "",
    "train.trace_comm": "True",
    "train.eval_interval": "10",
    "train.eval_samples": "8",
    "model.layers": "4",
    "model.embed": "32",
    "model.heads": "4",
    "model.kv_heads": "4",
    "model.head_dim": "8",
    "model.mlp": "64",
    "data.seq_len": "32",
    "plan.global_batch": "8",
    "plan.micro_batch": "2",
}

PIPELINE = {"plan.pipe": "2", "plan.micro_batch": "1"}
CUBE = {"plan.depth": "2", "plan.row": "2", "plan.col": "2"}

TRAININGS = {
    "dense": Training(),
    "grouped-kv-heads": Training({"model.kv_heads": "2", "plan.row": "2"}, 2),
    "mixture": Training(
        {"model.experts": "4", "model.expert_mlp": "32", "plan.expert": "2", "plan.row": "2"}, 4
    ),
    "lora": Training({"lora.rank": "4", "plan.row": "2"}, 2),
    "dora": Training({"lora.rank": "4", "lora.dora": "True", "plan.depth": "2"}, 2),
    "tied": Training(
        {"model.tie_embeddings": "True", "plan.pipe": "2", "plan.micro_batch": "2"}, 2
    ),
    "pipeline-message": Training({**PIPELINE, "plan.schedule": "message_driven"}, 2),
    "pipeline-1f1b": Training({**PIPELINE, "plan.schedule": "1f1b", "plan.data": "2"}, 4),
    "pipeline-interleaved": Training(
        {**PIPELINE, "plan.schedule": "interleaved", "plan.virtual_stages": "2"}, 2
    ),
    "pipeline-zero-bubble": Training({**PIPELINE, "plan.schedule": "zero-bubble"}, 2),
    "cube-samples": Training(
        {**CUBE, "plan.col_splits": "samples", "plan.recompute": "selective"}, 8
    ),
    "cube-features": Training({**CUBE, "plan.col_splits": "features", "plan.recompute": "full"}, 8),
    "pruned": Training({"prune.sparsity": "0.5", "plan.data": "2"}, 2),
    "host-states": Training({"memory.optimizer_states": "host", "memory.parameters": "host"}, 1),
    "bf16": Training({"train.dtype": "bf16", "plan.data": "2", "plan.depth": "2"}, 4),
}

PLANS = {
    "plan-8b": ["--model.size", "llama3-8b", "--cluster", "dgx-h100", "--nodes", "4"],
    "plan-70b": ["--model.size", "llama3-70b", "--cluster", "dgx-h100", "--nodes", "16"],
    "plan-mixtral": ["--model.size", "mixtral-8x7b", "--cluster", "frontier", "--nodes", "16"],
    "plan-gpt2": ["--model.size", "gpt2", "--cluster", "perlmutter", "--nodes", "1"],
}


@dataclass(frozen=True)
class Revision:
    """A commit and the directory in which its source is checked out."""

    commit: str
    tree: Path

    def run(self, arguments: Sequence[str]) -> None:
        """Run its command line with one thread per rank."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree / "src"),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "ranvier", *arguments]
        done = subprocess.run(
            command, cwd=self.tree, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")

    @property
    def has_settings_format(self) -> bool:
        """Whether its settings have their current names."""
        path = self.tree / "src" / "ranvier" / "config" / "run.py"
        return path.exists() and "SETTINGS_FORMAT" in path.read_text()

    @property
    def has_algorithms(self) -> bool:
        """Whether it has other algorithms for collectives than those of the backend."""
        return (self.tree / "src" / "ranvier" / "comm" / "algorithms").exists()

    def options(self, settings: Mapping[str, str]) -> list[str]:
        """Returns the settings as options of its command line."""
        options: list[str] = []
        for setting, value in settings.items():
            if setting == "comm.algorithm" and not self.has_algorithms:
                continue
            old = RENAMED.get(setting)
            if old is not None and not self.has_settings_format:
                value = RENAMED_VALUES.get((setting, value), value)
                setting = old
            options += [f"--{setting}", value]
        return options


@contextlib.contextmanager
def checked_out(rev: str) -> Iterator[Revision]:
    """Context of a worktree of a commit, which is removed afterwards."""
    commit = _git("rev-parse", f"{rev}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield Revision(commit, tree)
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def record_training(revision: Revision, training: Training) -> dict[str, Any]:
    """Returns losses, gradient norms, checkpoint tensors and events of a run."""
    with tempfile.TemporaryDirectory(prefix="golden-run-") as folder:
        output = Path(folder) / "run"
        settings = {**SMALL, **training.settings, "train.output_dir": str(output)}
        arguments = ["train", "--nproc", str(training.ranks), *revision.options(settings)]
        revision.run(arguments)
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        rows = [_rename_keys(row) for row in rows]
        return {
            "loss": [float(row["loss"]).hex() for row in rows],
            "grad_norm": [float(row["grad_norm"]).hex() for row in rows],
            "val_loss": [_hex(row["val_loss"]) for row in rows],
            "tensors": _checkpoint_tensors(output / "checkpoints"),
            "events": {
                path.stem: _events(path) for path in sorted(output.glob("trace-rank*.json"))
            },
        }


def _hex(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def _checkpoint_tensors(checkpoints: Path) -> dict[str, str]:
    """Returns the SHA-256 of each tensor of the latest checkpoint, by file and name."""
    newest = max(path for path in checkpoints.iterdir() if path.name.startswith("step-"))
    digests = {}
    for path in sorted(newest.glob("*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for name, entry in sorted(header.items()):
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']}".encode())
            digest.update(content[8 + length + begin : 8 + length + end])
            digests[f"{path.name} {name}"] = digest.hexdigest()
    return digests


def _events(path: Path) -> list[str]:
    """Returns operation, axis and bytes of each communication event, sorted, because issue times
    vary."""
    events = json.loads(path.read_text())["traceEvents"]
    threads = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("tid") is not None and event["ph"] == "M"
    }
    return sorted(
        f"{event['name']} over {threads[event['tid']]}: {event['args']['bytes']} bytes"
        for event in events
        if event["ph"] == "X" and event["cat"] != "compute"
    )


def record_plan(revision: Revision, words: Sequence[str]) -> Any:
    """Returns the JSON of a plan, without the time of the search and without sentences."""
    with tempfile.TemporaryDirectory(prefix="golden-plan-") as folder:
        path = Path(folder) / "plan.json"
        revision.run(["plan", *words, "--json", str(path), "--cache", "False"])
        plan: dict[str, Any] = _rename_keys(json.loads(path.read_text()))
        plan.pop("seconds")  # of the search
        return plan


def _rename_keys(value: Any) -> Any:
    if isinstance(value, dict):
        settings = {before: now for now, before in RENAMED.items()}
        names = {**RENAMED_KEYS, **settings}
        renamed = {
            names.get(key, key): _rename_keys(item)
            for key, item in value.items()
            if key not in UNCOMPARED_PLAN_KEYS
        }
        return {key: _rename_word(key, item) for key, item in renamed.items()}
    if isinstance(value, list):
        return [_rename_keys(item) for item in value]
    return value


def _rename_word(key: str, value: Any) -> Any:
    """Returns the current name of a value; key: its setting, with or without the section."""
    if isinstance(value, str):
        return RENAMED_WORDS.get((key.rpartition(".")[2], value), value)
    return value


def record(rev: str, only: Sequence[str] = ()) -> Path:
    """Runs all configurations on a commit; returns the file of its record, which is updated each
    time."""
    with checked_out(rev) as revision:
        path = RECORDS / f"{revision.commit}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for name in only or (*TRAININGS, *PLANS):
            print(f"{revision.commit[:9]} {name}", file=sys.stderr, flush=True)
            if name in TRAININGS:
                found[name] = record_training(revision, TRAININGS[name])
            else:
                found[name] = record_plan(revision, PLANS[name])
            path.write_text(json.dumps(found, indent=1))
    return path


def find_record(rev: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the record of a commit, and creates it if there is none."""
    commit = _git("rev-parse", f"{rev}^{{commit}}")
    path = RECORDS / f"{commit}.json"
    wanted = list(only) or [*TRAININGS, *PLANS]
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    missing = [name for name in wanted if name not in found]
    if missing:
        found = json.loads(record(rev, missing).read_text())
    return {name: found[name] for name in wanted}


def find_difference(before: Any, after: Any, where: str = "") -> str | None:
    """Returns where two records first differ; None if they are identical."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.keys() != after.keys():
            return f"{where}: only one record has {sorted(before.keys() ^ after.keys())[:4]}"
        pairs = [(f"{where}.{key}", before[key], after[key]) for key in before]
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{where}: {len(before)} entries, then {len(after)}"
        pairs = [
            (f"{where}[{index}]", old, new)
            for index, (old, new) in enumerate(zip(before, after, strict=True))
        ]
    else:
        return None if before == after else f"{where}: {before}, then {after}"
    differences = (find_difference(old, new, place) for place, old, new in pairs)
    return next((difference for difference in differences if difference is not None), None)


def compare(before: str, after: str, only: Sequence[str] = ()) -> int:
    """Prints one line per configuration; returns 1 if any differs."""
    first = find_record(before, only)
    second = find_record(after, only)
    failed = False
    for name in first:
        difference = find_difference(_rename_keys(first[name]), _rename_keys(second[name]))
        failed = failed or difference is not None
        print(f"{name:<24} {'identical' if difference is None else 'DIFFERS ' + difference}")
    return int(failed)


def main() -> int:
    """Records or compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run all configurations on a commit")
    recording.add_argument("rev", nargs="?", default="HEAD")
    comparing = actions.add_parser("compare", help="compare the records of two commits")
    comparing.add_argument("before")
    comparing.add_argument("after", nargs="?", default="HEAD")
    for action in (recording, comparing):
        action.add_argument("--only", nargs="+", default=[], choices=[*TRAININGS, *PLANS])
    asked = parser.parse_args()
    if asked.action == "record":
        print(record(asked.rev, asked.only))
        return 0
    return compare(asked.before, asked.after, asked.only)


if __name__ == "__main__":
    sys.exit(main())

"""Converts a published run into a job, a layout, a machine and a framework.

The names of GPUs in the runs differ from the names of data sheets: `cluster.device` knows both.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import published_frameworks as frameworks
from published_frameworks import Framework

from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.planner import cluster
from ranvier.planner.cluster import Cluster, Device, Link
from ranvier.planner.model_spec import ModelSpec, dense_decoder
from ranvier.planner.predict import Candidate, Workload

DATA = Path(__file__).parent / "data"
BASE = {70: "summit", 80: "dgx-a100", 90: "dgx-h100", 100: "dgx-b200"}
"""The machine whose links a device has if the machine of the run is not built in."""
OWN = {"BLOOM": "jean-zay"}
"""Built-in machines."""
FRAMEWORKS = {
    "Megatron-DeepSpeed": frameworks.MEGATRON_DEEPSPEED,
    "DeepSpeed + Megatron": frameworks.MEGATRON_DEEPSPEED,
    "DeepSpeed + Megatron-LM": frameworks.MEGATRON_DEEPSPEED,
    "Megatron-LM + DeepSpeed": frameworks.MEGATRON_DEEPSPEED,
    "DeepSpeed ZeRO-3": frameworks.DEEPSPEED3,
    "torchtitan": frameworks.TORCHTITAN,
    "nanotron": frameworks.NANOTRON,
    "llm-foundry": frameworks.FOUNDRY,
    "llm-foundry/Composer FSDP": frameworks.FOUNDRY,
    "AxoNN": frameworks.AXONN,
    "Megatron-LM": frameworks.MEGATRON_CORE,
    "Megatron-Core": frameworks.MEGATRON_CORE,
    "Megatron-Bridge": frameworks.MEGATRON_CORE,
    "NeMo": frameworks.MEGATRON_CORE,
    "NeMo Framework": frameworks.MEGATRON_CORE,
    "NeMo Megatron": frameworks.MEGATRON_CORE,
}
"""Framework by its full name without a version; other names are unknown."""
YEARS = {2019: 20, 2020: 20, 2021: 21, 2022: 22}
"""Years in which Megatron-LM had an older row."""
OLDER = {20: frameworks.MEGATRON20, 21: frameworks.MEGATRON21, 22: frameworks.MEGATRON22}
VERSION = r"v?\d+(\.[\dx]+)*([.-]?(rc|a|b|post|dev)\d*)?"
"""A version or a year after a name, e.g. `24.07`, `v0.5` or `2021`."""
WHOLE = {"none", "ddp", "no_shard", "fsdp no_shard", "zero0", "zero 0"}
"""Words for: each data-parallel rank has all states."""
STATES = {"zero1", "zero 1", "distributed optimizer", "dist opt"}
"""Words for: states are sharded over data."""
ALL = {"zero3", "zero 3", "fsdp", "fsdp1", "fsdp2", "full_shard", "fsdp full_shard"}
"""Words for: weights are sharded over data. `fsdp2` is the name of an API, `fsdp8` means eight
ranks.
"""
KEPT = {"fsdp shard_grad_op", "shard_grad_op", "zero2", "zero 2"}
"""Words for: weights stay gathered for a step; gradients and states are sharded."""
NODES = {"hsdp", "fsdp hybrid_shard", "hybrid_shard"}
"""Words for: weights are sharded inside a node."""
CHUNKS = 12
"""Maximum number of chunks per stage, if a run does not report it."""


@dataclass(frozen=True)
class Split:
    """What data-parallel ranks shard."""

    depth: int
    """Number of ranks over which weights are sharded."""
    states: bool | None
    """Whether states are sharded over all ranks; None: as the framework does."""
    keep: bool = False
    """Whether weights stay gathered for a step."""


def known_framework(name: str) -> Framework | None:
    """Returns the profile of a framework; None if it is unknown."""
    plain = " + ".join(part.strip() for part in re.sub(r"\(.*?\)", "", name).split("+"))
    found = re.fullmatch(rf"(?P<name>.*?)(?:[ -](?P<version>{VERSION}))?", plain)
    assert found is not None
    rows = {key.lower(): row for key, row in FRAMEWORKS.items()}
    row = rows.get(plain.lower()) or rows.get(found["name"].strip().lower())
    year = found["version"] or ""
    if found["name"].strip().lower() == "megatron-lm" and year.isdigit() and int(year) in YEARS:
        return OLDER[YEARS[int(year)]]
    return row


def known_split(row: Row) -> Split | None:
    """Returns the meaning of the sharding word of a run; None if it is unknown."""
    dp = row.number("dp")
    plain = re.sub(r"\(.*?\)", "", row.facts["sharding"]).lower().replace("-", " ")
    word = " ".join(plain.split())
    if word == "":
        return Split(1, None)
    if word in WHOLE:
        return Split(1, False)
    if word in STATES:
        return Split(1, True)
    if word in ALL:
        return Split(dp, True)
    if word in KEPT:
        return Split(dp, True, keep=True)
    inside = max(row.number("gpus_per_node", 8) // (row.number("tp") * row.number("cp")), 1)
    several = re.fullmatch(r"fsdp ?(\d+)", word)
    within = int(several[1]) if several else inside if word in NODES else 0
    if not within:
        return None
    if within >= dp:
        return Split(dp, True)
    return Split(within, True) if dp % within == 0 else None


@dataclass(frozen=True, eq=False)
class Row:
    """One run."""

    facts: dict[str, str]

    def number(self, name: str, usual: int = 1) -> int:
        """Returns an integer of the run; a number that is not published has its usual value."""
        text = self.facts.get(name, "")
        return int(float(text)) if text else usual

    @property
    def name(self) -> str:
        """Its number."""
        return self.facts["run_id"]

    @property
    def source(self) -> str:
        """Name of the publication."""
        return self.name.rsplit("-", 1)[0]

    @property
    def seconds(self) -> float:
        """Seconds per step; 0 if not published."""
        return float(self.facts["sec_per_iter"] or 0)

    @property
    def gib(self) -> float:
        """Memory in GiB; 0 if not published."""
        return float(self.facts["mem_gib"] or 0)

    @property
    def oom(self) -> bool:
        """Whether it ran out of memory."""
        return self.facts["oom"] == "1"

    @property
    def narrow(self) -> bool:
        """Whether its matmuls are in 8 bits."""
        return "fp8" in self.facts["precision"].lower()

    @property
    def device(self) -> Device | None:
        """Its device, if it has a data sheet."""
        try:
            return cluster.find_device(self.facts["gpu"])
        except PlanError:
            return None

    @property
    def scored(self) -> bool:
        """Whether it is a dense run with known layout, precision and device."""
        wide = "fp4" not in self.facts["precision"].lower()
        layout = all(self.facts[name] for name in ("tp", "pp", "dp", "global_batch"))
        plain = self.facts["set"] == "core" and self.facts["arch"] != "moe"
        return plain and wide and layout and self.device is not None

    @property
    def unknown(self) -> list[str]:
        """Words of the run that are not modeled: it is reported, and not scored."""
        facts, found = self.facts, []
        if known_framework(facts["framework"]) is None:
            found.append(f"framework {facts['framework']!r}")
        if known_split(self) is None:
            found.append(f"sharding {facts['sharding']!r}")
        if (facts["recompute"].split(" ")[0] or "none") not in ("none", "selective", "full"):
            found.append(f"recompute {facts['recompute']!r}")
        if not re.search(r"fp8|bf16|fp16", facts["precision"].lower()):
            found.append(f"precision {facts['precision']!r}")
        if facts["arch"] not in ("gpt", "llama"):
            found.append(f"arch {facts['arch']!r}")
        return found


def rows(path: Path = DATA / "published_runs.csv") -> list[Row]:
    """Returns all runs of a file."""
    with path.open(encoding="utf-8") as file:
        return [Row(facts) for facts in csv.DictReader(file)]


@cache
def model(row: Row) -> ModelSpec:
    """Returns the model of a run."""
    heads, gated = row.number("heads"), row.facts["gated_mlp"] == "1"
    hidden = row.number("hidden")
    return dense_decoder(
        layers=row.number("layers"),
        embed=hidden,
        heads=heads,
        kv_heads=row.number("kv_heads", heads),
        head_dim=hidden // heads,
        mlp=row.number("ffn", 4 * hidden),
        gated=gated,
        vocab=row.number("vocab", 51200),
        tied=not gated,
        biases=not gated,
        norm="rms" if gated else "layer",
    )


@cache
def job(row: Row) -> Workload:
    """Returns the workload of a run."""
    return Workload(model(row), row.number("seq"), row.number("global_batch"))


@dataclass(frozen=True)
class Ways:
    """Unpublished numbers of a layout that a run may have had."""

    chunks: int
    micro_batch: int


@cache
def ways(row: Row) -> tuple[Ways, ...]:
    """Returns all plausible ones: chunks that divide a stage, micro-batches of powers of two."""
    pipe, dp, batch = row.number("pp"), row.number("dp"), row.number("global_batch")
    own, runs = max(batch // dp, 1), framework(row)
    micros = [min(row.number("micro_batch"), own)]
    if not row.facts["micro_batch"]:
        micros = [n for n in (1, 2, 4, 8) if own % n == 0 and own // n >= pipe] or [1]
        if pipe > 1 and runs.name == frameworks.TORCHTITAN.name:  # as many as stages, it says
            micros = [max(own // pipe, 1)]
    chunks = [row.number("vp")]
    each = row.number("layers") / pipe
    if not row.facts["vp"] and pipe > 1 and runs.interleaves and each % 1 == 0:
        chunks = [n for n in range(1, CHUNKS + 1) if each % n == 0]
    found = [
        Ways(n, m)
        for m in micros
        for n in chunks
        if n == 1 or row.facts["vp"] or own // m % pipe == 0
    ]
    return tuple(found or [Ways(1, micros[0])])


@cache
def layout(row: Row, recompute: str = "", way: Ways | None = None) -> Candidate:
    """Returns the layout of a run. recompute, way: used if the run does not report them."""
    split, dp = known_split(row) or Split(1, None), row.number("dp")
    pipe, batch = row.number("pp"), row.number("global_batch")
    word = row.facts["recompute"].split(" ")[0] or recompute or "none"
    way = way or ways(row)[0]
    plan = Plan(
        pipe=pipe,
        data=dp // split.depth,
        context=row.number("cp"),
        depth=split.depth,
        row=row.number("tp"),
        global_batch=batch,
        micro_batch=way.micro_batch,
        virtual_stages=way.chunks,
        recompute=word,  # type: ignore[arg-type]
        reshard_after="step" if split.keep or (split.depth > 1 and pipe > 1) else "micro_batch",
        compile="on" if _compiled(row) else "off",
    )
    scales = "row" if "rowwise" in row.facts["precision"] else "tensor"
    return Candidate(plan, fp8=scales if row.narrow else "")  # type: ignore[arg-type]


def _compiled(row: Row) -> bool:
    note = row.facts["notes"]
    return row.facts["framework"].startswith("torchtitan") and "no compile" not in note


@cache
def machine(row: Row) -> Cluster:
    """Returns the machine of a run: its device and network, and links of a machine with such
    devices.
    """
    device = row.device
    assert device is not None, row.name
    return _machine(
        OWN.get(row.source, ""),
        device.name,
        row.number("gpus_per_node", 8),
        float(row.facts["inter_node_gbs_per_node"] or 0) * 1e9,
        row.number("n_gpus"),
    )


@cache
def _machine(own: str, name: str, per_node: int, network: float, gpus: int) -> Cluster:
    device = cluster.find_device(name)
    known = [cluster.load_cluster(one) for one in cluster.cluster_names()]
    alike = [one for one in known if one.per_node == per_node]
    same = [one for one in alike if one.device.name == name] or [
        one for one in alike if one.device.name.split("-")[0] == name.split("-")[0]
    ]
    base = same[0] if same else cluster.load_cluster(BASE[device.generation])
    if own:
        base = cluster.load_cluster(own)
    link = base.link
    if per_node != base.per_node and device.generation == 70:  # DGX-2: all joined by a switch
        link = Link(bandwidth=link.bandwidth, latency=link.latency)
    joined = replace(base.network, bandwidth=network or base.network.bandwidth)
    per_node = min(per_node, gpus)
    return replace(
        base,
        name=f"{base.name}-{name}",
        device=device,
        per_node=per_node,
        nodes=-(-gpus // per_node),
        link=link,
        network=joined,
    )


@cache
def framework(row: Row) -> Framework:
    """Returns the framework of a run, with its own columns and notes; `COMMON` if it is unknown."""
    return stated(row, known_framework(row.facts["framework"]) or frameworks.COMMON)


def stated(row: Row, found: Framework) -> Framework:
    """Returns a framework with the settings that a run reports."""
    note, precision = row.facts["notes"].lower(), row.facts["precision"]
    found = replace(found, sequence_parallel=row.facts["seq_parallel"] == "1")
    split = known_split(row)
    if split is not None and split.states is not None:
        found = replace(found, shards_states=split.states)
        if not split.states:
            found = replace(found, reduce="all_reduce")
        elif found.reduce == "all_reduce":
            found = replace(found, reduce="scatter")
    if row.source == "BLOOM":  # its launch script sets CUDA_LAUNCH_BLOCKING=1 against hangs
        found = replace(found, launch_blocking=True)
    if "asynctp" in note or "async tp" in note:
        found = replace(found, row_overlap=frameworks.HIDDEN)
    if "fp32 grad" in precision:
        found = replace(found, grad_bytes=4, held_gradient=found.wide_gradient)
    if precision.endswith("PURE"):
        found = replace(found, grad_bytes=2)
    return found

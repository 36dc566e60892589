"""A published run as a job, a layout, a machine and a runtime.

The names of GPUs in the runs differ from those of data sheets: `cluster.device` knows both.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ranvier.errors import PlanError
from ranvier.plan import Plan
from ranvier.planner import cluster, runtime
from ranvier.planner.cluster import Cluster, Device, Link
from ranvier.planner.leaves import Model, dense
from ranvier.planner.predict import Job, Layout
from ranvier.planner.runtime import Runtime

DATA = Path(__file__).parent / "data"
BASE = {70: "summit", 80: "dgx-a100", 90: "dgx-h100", 100: "dgx-b200"}
"""The machine whose links a device has, where the run's own is not built in."""
OWN = {"BLOOM": "jean-zay"}
"""Machines that are built in."""
FRAMEWORKS = (
    ("Megatron-LM 2020", runtime.MEGATRON20),
    ("Megatron-LM 2021", runtime.MEGATRON21),
    ("Megatron-LM 2022", runtime.MEGATRON22),
    ("Megatron-DeepSpeed", runtime.MEGATRON_DEEPSPEED),
    ("DeepSpeed + Megatron", runtime.MEGATRON_DEEPSPEED),
    ("DeepSpeed ZeRO-3", runtime.DEEPSPEED3),
    ("torchtitan", runtime.TORCHTITAN),
    ("nanotron", runtime.NANOTRON),
    ("llm-foundry", runtime.FOUNDRY),
    ("AxoNN", runtime.AXONN),
    ("Megatron", runtime.MEGATRON_CORE),
    ("NeMo", runtime.MEGATRON_CORE),
)
"""By the beginning of the name; the first that matches. Others: the newest Megatron."""


@dataclass(frozen=True, eq=False)
class Row:
    """One run."""

    facts: dict[str, str]

    def number(self, name: str, usual: int = 1) -> int:
        """A whole number of the run; what is not published has its usual value."""
        text = self.facts.get(name, "")
        return int(float(text)) if text else usual

    @property
    def name(self) -> str:
        """Its number."""
        return self.facts["run_id"]

    @property
    def source(self) -> str:
        """Where it was published."""
        return self.name.rsplit("-", 1)[0]

    @property
    def seconds(self) -> float:
        """Of a step; 0: not published."""
        return float(self.facts["sec_per_iter"] or 0)

    @property
    def gib(self) -> float:
        """Memory; 0: not published."""
        return float(self.facts["mem_gib"] or 0)

    @property
    def oom(self) -> bool:
        """Whether it ran out of memory."""
        return self.facts["oom"] == "1"

    @property
    def narrow(self) -> bool:
        """Whether it multiplies in 8 bits."""
        return "fp8" in self.facts["precision"].lower()

    @property
    def device(self) -> Device | None:
        """Its device, if that has a data sheet."""
        try:
            return cluster.device(self.facts["gpu"])
        except PlanError:
            return None

    @property
    def scored(self) -> bool:
        """A dense run of the core set with layout and precision, on a device that is known."""
        wide = "fp4" not in self.facts["precision"].lower()
        layout = all(self.facts[name] for name in ("tp", "pp", "dp", "global_batch"))
        plain = self.facts["set"] == "core" and self.facts["arch"] != "moe"
        return plain and wide and layout and self.device is not None


def rows(path: Path = DATA / "published_runs.csv") -> list[Row]:
    """All runs of a file."""
    with path.open(encoding="utf-8") as file:
        return [Row(facts) for facts in csv.DictReader(file)]


@cache
def model(row: Row) -> Model:
    """The model of a run."""
    heads, gated = row.number("heads"), row.facts["gated_mlp"] == "1"
    hidden = row.number("hidden")
    return dense(
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
def job(row: Row) -> Job:
    """What is trained."""
    return Job(model(row), row.number("seq"), row.number("global_batch"))


@cache
def layout(row: Row, recompute: str = "") -> Layout:
    """How it is laid out; recompute: where the run does not say."""
    dp, sharding = row.number("dp"), row.facts["sharding"]
    depth = 1
    if "fsdp" in sharding or sharding == "zero3":
        digits = "".join(c for c in sharding.split()[0] if c.isdigit())
        within = int(digits) if len(digits) > 1 or digits == "8" else dp
        depth = min(within, dp)
    pipe, batch = row.number("pp"), row.number("global_batch")
    usual = 1  # torchtitan's pipelines: as many micro-batches as stages
    if row.facts["framework"].startswith("torchtitan") and pipe > 1:
        usual = max(batch // dp // pipe, 1)
    word = row.facts["recompute"].split(" ")[0] or recompute or "none"
    keep = sharding == "fsdp shard_grad_op" or (depth > 1 and pipe > 1)
    plan = Plan(
        pipe=pipe,
        data=dp // depth,
        context=row.number("cp"),
        depth=depth,
        row=row.number("tp"),
        batch=batch,
        micro_batch=min(row.number("micro_batch", usual), max(batch // dp, 1)),
        chunks=row.number("vp"),
        recompute=word,  # type: ignore[arg-type]
        gathered="keep" if keep else "again",
        compile="on" if _compiled(row) else "off",
    )
    scales = "row" if "rowwise" in row.facts["precision"] else "tensor"
    return Layout(plan, fp8=scales if row.narrow else "")  # type: ignore[arg-type]


def _compiled(row: Row) -> bool:
    note = row.facts["notes"]
    return row.facts["framework"].startswith("torchtitan") and "no compile" not in note


@cache
def machine(row: Row) -> Cluster:
    """The machine of a run: its device and network, links of a machine with such devices."""
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
    device = cluster.device(name)
    known = [cluster.cluster(one) for one in cluster.names()]
    same = [one for one in known if one.device.name == name]
    base = same[0] if same else cluster.cluster(BASE[device.generation])
    if own:
        base = cluster.cluster(own)
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
def framework(row: Row) -> Runtime:
    """The runtime of a run, with what its notes say."""
    name, note = row.facts["framework"], row.facts["notes"].lower()
    found = next((r for start, r in FRAMEWORKS if name.startswith(start)), runtime.MEGATRON_CORE)
    precision = row.facts["precision"]
    found = replace(found, sequence=row.facts["seq_parallel"] == "1")
    if row.source == "BLOOM":  # its launch script sets CUDA_LAUNCH_BLOCKING=1 against hangs
        found = replace(found, blocking=True)
    if found.name == "nanotron":
        found = replace(found, sharded=row.facts["sharding"] == "zero1")
    if "asynctp" in note or "async tp" in note:
        found = replace(found, hidden_row=0.7)
    if "fp32 grad" in precision:
        held = (
            found.held_gradient + 4.5 if found.name == "Megatron-DeepSpeed" else found.held_gradient
        )
        found = replace(found, gradient=4, held_gradient=held)
    if precision.endswith("PURE"):
        found = replace(found, gradient=2)
    return found

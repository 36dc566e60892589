"""Doctor: checks what this machine and this Python have for a run, what is missing and how to get
it.

Each section is a function that returns findings; a section that fails becomes a note and does not
stop the others. Works without torch, optional packages, GPUs or vendor tools. Only the creation of
communicators is timed; other nodes are not checked.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from ranvier import launch
from ranvier.errors import CommunicationError, PlanError
from ranvier.system.terminal import print
from ranvier.system.tested_versions import describe_untested, version_numbers

if TYPE_CHECKING:
    from ranvier.comm.algorithms.schedule import AxisShape
    from ranvier.config.run import RunConfig
    from ranvier.planner.cluster import Cluster
    from ranvier.tools.benchmark_communicators import CommunicatorCost

SYSFS_ROOT = Path("/sys")
"""Directory in which the kernel describes devices."""
TOOL_SECONDS = 5.0
"""Time limit of a vendor tool."""
LOW_SPACE_BYTES = 2**30
"""Less free space than this is reported as a note."""
TYPICAL_CPU_RANKS = 8
"""Ranks on a CPU that has not been measured."""
SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_SOCKET_IFNAME",
)
OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}

FindingMark = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    section: str
    name: str
    value: str
    mark: FindingMark = "ok"
    remedy: str = ""
    """What to do about it."""
    is_essential: bool = False
    """Whether nothing can run without it."""

    def __post_init__(self) -> None:
        assert self.mark != "missing" or self.remedy, f"{self.section} {self.name}: no remedy"


def examine_machine(run: RunConfig | None = None) -> list[Finding]:
    """Returns all findings by section. If `run` (resolved) is given, its communicators and the
    algorithms of its axes are listed."""
    sections: dict[str, Callable[[], list[Finding]]] = {
        "python": examine_python,
        "torch": examine_torch,
        "devices": examine_devices,
        "links": examine_links,
        "collectives": partial(examine_collectives, run),
        "communicators": partial(examine_communicators, run),
        "launcher": examine_launcher,
        "storage": examine_storage,
        "packages": examine_packages,
        "advice": give_advice,
    }
    found: list[Finding] = []
    for name, section in sections.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found += section()
        # The doctor is run on broken machines: a failing section must not stop the others.
        except Exception as error:
            what = f"check failed: {type(error).__name__}: {error}"
            found.append(Finding(name, "examination", what, "note"))
    return found


def print_findings(findings: Sequence[Finding]) -> int:
    """Prints findings as a table; returns 0 if nothing essential is missing, else 1."""
    width = max((len(finding.name) for finding in findings), default=0)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(section)
        first, *rest = finding.value.splitlines() or [""]
        print(f"  {finding.mark:<7}  {finding.name:<{width}}  {first}".rstrip())
        for line in [*rest, *[f"-> {line}" for line in finding.remedy.splitlines()]]:
            print(f"  {'':7}  {'':{width}}  {line}")
    lacking = dict.fromkeys(f.name for f in findings if f.mark == "missing" and f.is_essential)
    print(f"\nMissing and required: {', '.join(lacking)}." if lacking else "\nReady to run.")
    if lacking:
        return 1
    return 0


def examine_python() -> list[Finding]:
    """Checks the interpreter and its environment."""
    version = platform.python_version()
    wanted = ">=3.11"
    # The default above is used if the package is not installed.
    with suppress(metadata.PackageNotFoundError):
        wanted = str(metadata.metadata("ranvier").json.get("requires_python", wanted))
    if meets_version(version, wanted):
        first = Finding("python", "version", f"{version} ({wanted})")
    else:
        remedy = f"Install Python {wanted} and create a new virtual environment with it."
        first = Finding("python", "version", version, "missing", remedy, is_essential=True)
    found = [first, Finding("python", "executable", sys.executable)]
    if sys.prefix != sys.base_prefix:
        found.append(Finding("python", "environment", sys.prefix))
    elif launch.read_environment("CONDA_PREFIX").get("CONDA_PREFIX") == sys.prefix:
        found.append(Finding("python", "environment", f"conda {sys.prefix}"))
    else:
        remedy = "python3 -m venv .venv && source .venv/bin/activate"
        found.append(Finding("python", "environment", "no virtual environment", "note", remedy))
    return found


def examine_torch() -> list[Finding]:
    """Checks the installed torch, its build and its backends."""
    wanted = next((spec for name, spec, _ in list_requirements() if name == "torch"), "")
    remedy = f"pip install 'torch{wanted}'"
    try:
        module = _import_torch()
    except Exception as error:
        what = f"cannot be imported: {type(error).__name__}: {error}"
        return [Finding("torch", "torch", what, "missing", remedy, is_essential=True)]
    version = str(module.__version__)
    if not meets_version(version, wanted):
        first = Finding("torch", "torch", f"{version}, not {wanted}", "note", remedy)
    elif untested := describe_untested("torch", version):
        first = Finding("torch", "torch", f"{version} ({wanted or 'any'})", "note", untested)
    else:
        first = Finding("torch", "torch", f"{version} ({wanted or 'any'})")
    found = [first]
    cuda = module.version.cuda
    hip = module.version.hip
    if cuda:
        build = f"CUDA {cuda}"
    elif hip:
        build = f"ROCm {hip}"
    else:
        build = "CPU only"
    # The loaded driver shows that there is a GPU, even if torch cannot see it.
    driver = (SYSFS_ROOT / "module" / "nvidia").exists()
    if driver and not module.cuda.is_available():
        what = f"{build}: the NVIDIA driver is loaded, but torch does not see a device"
        remedy = "Install a torch build for the driver's CUDA version: https://pytorch.org"
        if launch.read_environment("CUDA_VISIBLE_DEVICES"):
            remedy = "Unset CUDA_VISIBLE_DEVICES, or set it to devices that exist."
        found.append(Finding("torch", "build", what, "note", remedy))
    else:
        found.append(Finding("torch", "build", build))
    backends = launch.available_backends()
    for name in ("gloo", *(["nccl"] if cuda or hip else [])):
        # Gloo is always required, NCCL only on GPU builds.
        if name in backends:
            if name == "nccl":
                number = ".".join(map(str, module.cuda.nccl.version()))
            else:
                number = "available"
            found.append(Finding("torch", name, number))
        else:
            remedy = "Install torch from https://pytorch.org; this build lacks the backend."
            essential = name == "gloo"
            found.append(Finding("torch", name, "not built in", "missing", remedy, essential))
    return found


def examine_devices() -> list[Finding]:
    """Checks CPU cores, memory and GPUs."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # In a container the cgroup limit counts, not the memory of the host.
    limit = _read_kernel_file(SYSFS_ROOT / "fs/cgroup/memory.max")
    if limit.isdecimal() and int(limit) < memory:
        memory = int(limit)
    found = [
        Finding("devices", "cores", f"{count_cores()} of {os.cpu_count() or 1} usable"),
        Finding("devices", "memory", _format_bytes(memory)),
    ]
    for name, value in launch.read_environment(*SHOWN_VARIABLES).items():
        found.append(Finding("devices", name, value or "empty", "note"))
    with suppress(Exception):
        module = _import_torch()
        found.append(Finding("devices", "threads", f"{module.get_num_threads()} by default"))
        for i in range(count_gpus()):
            found.append(Finding("devices", f"gpu {i}", _describe_gpu(module, i)))
    if not count_gpus():
        found.append(Finding("devices", "gpus", "none that torch can use", "note"))
    return found


def examine_links() -> list[Finding]:
    """Checks links between the devices of this node, and from this node to others."""
    found = []
    if count_gpus() > 1:
        pairs = list(combinations(range(count_gpus()), 2))
        lone = [pair for pair in pairs if not _import_torch().cuda.can_device_access_peer(*pair)]
        text = f"{len(pairs) - len(lone)} of {len(pairs)} GPU pairs"
        found.append(Finding("links", "peer access", text, "note" if lone else "ok"))
    if shutil.which("nvidia-smi") is not None:
        kinds = count_link_kinds(_tool_output(["nvidia-smi", "topo", "-m"]))
        text = ", ".join(f"{kind} between {n} GPU pairs" for kind, n in kinds.items())
        if kinds:
            # Every kind but NVLink (NV#) goes through PCIe or the CPU.
            slow = any(not kind.startswith("NV") for kind in kinds)
            found.append(Finding("links", "topology", text, "note" if slow else "ok"))
        elif count_gpus() > 1:
            what = "the output of nvidia-smi topo -m could not be parsed"
            found.append(Finding("links", "topology", what, "note"))
    for port in sorted((SYSFS_ROOT / "class/infiniband").glob("*/ports/*")):
        state = _read_kernel_file(port / "state").partition(": ")[2] or "unknown"
        name = f"{port.parent.parent.name}/{port.name}"
        text = f"{state}, {_read_kernel_file(port / 'rate') or 'unknown rate'}"
        found.append(Finding("links", name, text, "ok" if state == "ACTIVE" else "note"))
    # Virtual interfaces report the state "unknown" while they work, and no speed.
    for card in sorted((SYSFS_ROOT / "class/net").glob("*")):
        state = _read_kernel_file(card / "operstate")
        speed = _read_kernel_file(card / "speed")
        if card.name != "lo" and state in ("up", "unknown"):
            if speed.isdecimal():
                rate = f"{int(speed) / 1000:g} Gbit/s"
            else:
                rate = "speed unknown"
            found.append(Finding("links", card.name, rate))
    return found or [Finding("links", "network", "only the loopback interface", "note")]


def examine_collectives(run: RunConfig | None = None) -> list[Finding]:
    """Lists the algorithms of collectives that are available here, and those that `auto` takes, or
    that a run is set to."""
    found = list_algorithms()
    shares_memory = any(one.name == "shared memory" and one.mark == "ok" for one in found)
    cluster, state = examine_timings()
    return [*found, state, describe_choice(run, cluster, shares_memory=shares_memory)]


def list_algorithms() -> list[Finding]:
    """Lists the algorithms of collectives, and why some are not available here."""
    from ranvier.comm.algorithms.flat import FlatAlgorithm
    from ranvier.comm.algorithms.native import Engine
    from ranvier.comm.algorithms.registry import ALGORITHMS

    backends = launch.available_backends()
    engines = [text for name, text in (("gloo", "Gloo"), ("nccl", "NCCL")) if name in backends]
    rows = {
        "native": (f"those of {' and '.join(engines)}", "" if engines else "torch has no backend"),
        "shared memory": ("shared_memory: CPU ranks of one host", _shared_memory_limitation()),
        "symmetric memory": (
            "direct, one_shot: GPUs of one node read each other's memory",
            _symmetric_memory_limitation(),
        ),
    }
    found = []
    for name, (what, why) in rows.items():
        value = f"not available: {why}" if why else what
        found.append(Finding("collectives", name, value, "note" if why else "ok"))
    flat = [
        name
        for name, one in ALGORITHMS.items()
        if isinstance(one, FlatAlgorithm) and not isinstance(one, Engine)
    ]
    others = [name for name in ALGORITHMS if name not in (*flat, "native")]
    found.append(Finding("collectives", "messages", f"{', '.join(flat)}: all axes"))
    nodes = _count_nodes()
    if nodes > 1:
        level = Finding("collectives", "levels", f"{', '.join(others)}: ranks on {nodes} nodes")
    else:
        what = f"{', '.join(others)}: only for ranks on several nodes, and this is one"
        level = Finding("collectives", "levels", what, "note")
    return [*found, level]


def _count_nodes() -> int:
    """Returns the number of nodes of the launcher; 1 without one."""
    with suppress(PlanError):
        me = launch.read_process_info()
        if me is not None:
            return max(me.world_size // me.local_world_size, 1)
    return 1


def _shared_memory_limitation() -> str:
    """Returns why CPU ranks of this host cannot share memory; empty if they can."""
    try:
        from ranvier.comm.transports.shared_memory import find_host_limitation
    except ImportError as error:
        return str(error)
    return find_host_limitation()


def _symmetric_memory_limitation() -> str:
    """Returns why GPUs of this node cannot read each other's memory; empty if they can."""
    count = count_gpus()
    if not count:
        return "no GPU that torch can use"
    if count == 1:
        return "only one GPU"
    from ranvier.comm.transports.symmetric_memory import local_limitation

    module = _import_torch()
    for pair in combinations(range(count), 2):
        if not module.cuda.can_device_access_peer(*pair):
            return f"GPUs {pair[0]} and {pair[1]} have no peer access"
    return local_limitation(module.device("cuda", 0))


def examine_timings() -> tuple[Cluster | None, Finding]:
    """Returns the cluster file of this machine, if there is one, and the state of its timings."""
    from ranvier.planner import cluster

    if count_gpus():
        device = str(_import_torch().cuda.get_device_name(0))
    else:
        device = "cpu"
    remedy = "Run ranvier measure."
    path = cluster.measured_cluster_path(device)
    try:
        found = cluster.load_measured_cluster(device)
    except PlanError as error:
        return None, Finding("collectives", "timings", str(error), "note", remedy)
    if found is None:
        others = [file.name for file in sorted(path.parent.glob("cluster-*.toml"))]
        more = f"; {path.parent} has {', '.join(others)}" if others else ""
        what = f"{device} of {platform.node()} has not been measured{more}"
        return None, Finding("collectives", "timings", what, "note", remedy)
    if found.name != platform.node():
        what = f"{path} is of {found.name}, not of {platform.node()}"
        return found, Finding("collectives", "timings", what, "note", remedy)
    if not found.timings:
        what = f"{path} has none; it was measured by an older version or by one rank"
        return found, Finding("collectives", "timings", what, "note", remedy)
    names = dict.fromkeys(row.algorithm for row in found.timings)
    what = f"{path} has {len(found.timings)}, of {', '.join(names)}"
    return found, Finding("collectives", "timings", what)


def describe_choice(
    run: RunConfig | None, cluster: Cluster | None, *, shares_memory: bool
) -> Finding:
    """Describes the algorithms of the axes of a run, or of groups of all sizes on this machine."""
    from ranvier.comm.algorithm_table import AUTO, AlgorithmTable
    from ranvier.planner.algorithm_choice import add_measured_rules

    on_gpus = bool(count_gpus()) and (run is None or run.train.device != "cpu")
    try:
        table = AlgorithmTable.parse(run.comm.algorithm if run else AUTO)
        shapes = _axes_of_run(run) if run else _typical_groups(cluster)
        groups = [(shape.size, shape.num_nodes) for shape in shapes.values()]
        table = add_measured_rules(table, cluster, groups, host=platform.node())
        rules = {
            names: table.rules_for(
                names,
                shape,
                backend="nccl" if on_gpus else "gloo",
                on_host=shares_memory and not on_gpus,
            )
            for names, shape in shapes.items()
        }
    except PlanError as error:
        return Finding("collectives", "comm.algorithm", str(error), "note")
    if not rules:
        return Finding("collectives", "comm.algorithm", "one rank: no collectives")
    lines = [table.describe(rules).removeprefix("collectives: ")]
    notes = [*dict.fromkeys(note for one in rules.values() for note in one.notes)]
    text = f"{table.setting}: " + "\n".join([*lines, *notes])
    return Finding("collectives", "comm.algorithm", text, "note" if notes else "ok")


def _axes_of_run(run: RunConfig) -> dict[tuple[str, ...], AxisShape]:
    """Returns the axes of a run with several ranks."""
    from ranvier.grid import Grid

    per_node = max(run.plan.world_size // max(run.launch.nnodes, 1), 1)
    grid = Grid.from_plan(run.plan, ranks_per_node=per_node)
    return {(name,): grid.axis(name).shape for name, n in run.plan.degrees.items() if n > 1}


def _typical_groups(cluster: Cluster | None) -> dict[tuple[str, ...], AxisShape]:
    """Returns groups of all sizes that ranks on this machine may form, with their names."""
    from ranvier.comm.algorithms.schedule import AxisShape
    from ranvier.planner.algorithm_choice import list_groups

    world = local = count_gpus() or (cluster.per_node if cluster else TYPICAL_CPU_RANKS)
    with suppress(PlanError):
        me = launch.read_process_info()
        if me is not None:
            world, local = me.world_size, me.local_world_size
    found: dict[tuple[str, ...], AxisShape] = {}
    for size, nodes in list_groups(world, local):
        name = f"{size} ranks" if nodes == 1 else f"{size} ranks on {nodes} nodes"
        found[(name,)] = AxisShape.of_nodes([rank * nodes // size for rank in range(size)])
    return found


def examine_communicators(run: RunConfig | None = None) -> list[Finding]:
    """Measures the cost of NCCL communicators on this machine, and lists those of a run."""
    found, cost = measure_communicators()
    if run is None:
        return found
    return [*found, *list_communicators(run, cost)]


def measure_communicators() -> tuple[list[Finding], CommunicatorCost | None]:
    """Measures communicators of two ranks; the cost is None without a GPU or if they fail."""
    section = "communicators"
    if not count_gpus() or "nccl" not in launch.available_backends():
        if count_gpus():
            why = "NCCL is not built in"
        else:
            why = "no GPU that torch can use"
        return [Finding(section, "cost", f"not measured: {why}", "note")], None
    # Under a launcher every rank would start two more.
    if launch.read_process_info() is not None:
        remedy = "Run ranvier doctor without a launcher."
        return [Finding(section, "cost", "not measured under a launcher", "note", remedy)], None
    from ranvier.tools.benchmark_communicators import measure_communicator_cost

    try:
        cost = measure_communicator_cost(count_gpus())
    except CommunicationError as error:
        # Errors start with what is wrong; the following sentences are rule and remedy.
        what, _, rest = str(error).partition(". ")
        return [Finding(section, "cost", what, "note", rest)], None
    if count_gpus() == 1:
        where = "one GPU, through sockets"
    else:
        where = "two GPUs"
    first = (
        f"{cost.first_seconds:.2f} s, {_format_bytes(cost.first_bytes)} on each rank, NCCL's "
        "kernels"
    )
    further = f"{cost.further_seconds:.2f} s, {_format_bytes(cost.further_bytes)} on each rank"
    return [
        Finding(section, "measured", f"by two ranks on {where}"),
        Finding(section, "first", f"{first} included"),
        Finding(section, "each further", further),
        Finding(section, "over gloo", f"{cost.host_seconds:.2f} s, no device memory"),
    ], cost


def resolve_ranks(run: RunConfig) -> RunConfig:
    """Returns the run on as many ranks as its plan needs, without torch; raises all problems at
    once."""
    return run.check_and_resolve(math.prod(max(size, 1) for size in run.plan.degrees.values()))


def list_communicators(run: RunConfig, cost: CommunicatorCost | None) -> list[Finding]:
    """Lists the communicators that a rank of a run creates on GPUs, with memory and, if known,
    time."""
    from ranvier.cost.optimizer import OptimizerSpec
    from ranvier.planner.communicators import list_communicators as planned
    from ranvier.planner.communicators import total_bytes, worst_stage
    from ranvier.planner.model_spec import resolve_model_spec

    section = "communicators"
    plan = run.plan
    grid = " · ".join(f"{axis} {size}" for axis, size in plan.degrees.items() if size > 1)
    if plan.world_size == 1:
        return [Finding(section, "plan", "one rank: no communicators")]
    found = [Finding(section, "plan", f"{grid}: {plan.world_size} ranks, {run.model.size}")]
    if run.train.backend == "gloo" or run.train.device == "cpu":
        remedy = "Add --train.device cuda --train.backend nccl to list those on GPUs."
        what = "over gloo: no device memory"
        return [*found, Finding(section, "total", what, "note", remedy)]
    model = resolve_model_spec(run)
    # Stages create different communicators; the stage with the largest memory is shown.
    stage = worst_stage(model, plan)
    made = planned(model, plan, stage=stage, optimizer=OptimizerSpec.from_run(run))
    for one in made:
        kind = one.channel or "collectives"
        whole = math.prod(plan.degrees[axis] for axis in one.axis_names)
        # A communicator may span only part of its axes.
        if one.size == whole:
            ranks = f"{one.size} ranks"
        else:
            ranks = f"{one.size} of {whole} ranks"
        if one.peers:
            peers = f", {one.peers} of them point to point"
        else:
            peers = ""
        value = f"{kind}: {ranks} over {one.backend}{peers}"
        found.append(Finding(section, "·".join(one.axis_names), value))
    count = sum(one.backend == "nccl" for one in made)
    on_host = len(made) - count
    what = (
        f"{count} over nccl, {on_host} over gloo, {_format_bytes(total_bytes(made))} of device "
        "memory"
    )
    what += f", on each rank of stage {stage}" if plan.pipe > 1 else ", on each rank"
    if cost is not None:
        what += f"\n{cost.total_seconds(count, on_host):.1f} s to create them, as measured here"
    return [*found, Finding(section, "total", what)]


def examine_launcher() -> list[Finding]:
    """Checks the launcher that started this process."""
    try:
        me = launch.read_process_info()
    except PlanError as error:
        what = "the environment variables of a launcher contradict each other"
        return [Finding("launcher", "ranks", what, "missing", str(error), is_essential=True)]
    if me is None:
        return [Finding("launcher", "ranks", "no launcher: --nproc starts ranks on this machine")]
    text = (
        f"{me.launcher}: rank {me.rank} of {me.world_size}, {me.local_rank} of "
        f"{me.local_world_size} here"
    )
    return [Finding("launcher", "ranks", f"{text}, rendezvous at {me.address}:{me.port}")]


def examine_storage() -> list[Finding]:
    """Checks the directories of runs and caches."""
    shared = Path("/dev/shm")
    found = [
        _examine_dir(
            "cache", launch.cache_dir(), "Set RANVIER_CACHE to a directory on a larger disk."
        ),
        _examine_dir("directory", Path.cwd(), "Change to a directory on a disk with free space."),
    ]
    if shared.is_dir():
        found.append(
            _examine_dir(
                "shared memory", shared, "In a container: docker run --shm-size=8g or more."
            )
        )
    return found


def examine_packages() -> list[Finding]:
    """Checks the packages that this one requires, and the packages of its extras."""
    wanted = list_requirements()
    if not wanted:
        remedy = "pip install -e . in the source directory"
        return [Finding("packages", "ranvier", "not installed", "note", remedy)]
    found = [Finding("packages", "ranvier", metadata.version("ranvier"))]
    for name, spec, extra in wanted:
        remedy = install_command(extra)
        if extra:
            label = f"{name} [{extra}]"
        else:
            label = name
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if spec:
                what = f"not installed ({spec})"
            else:
                what = "not installed"
            essential = not extra
            found.append(Finding("packages", label, what, "missing", remedy, essential))
            continue
        if not meets_version(version, spec):
            found.append(Finding("packages", label, f"{version}, not {spec}", "note", remedy))
        elif untested := describe_untested(name, version):
            found.append(Finding("packages", label, version, "note", untested))
        else:
            found.append(Finding("packages", label, version))
    return found


def give_advice() -> list[Finding]:
    """Summarizes what the findings mean for a run."""
    num = count_gpus()
    count = count_cores()
    if not num:
        lines = [
            "no GPU: runs use fp32 on the CPU, with gloo",
            f"{count} core(s): `ranvier train` starts one rank that uses all cores; --nproc starts "
            "more",
        ]
    else:
        lines = [f"{num} GPU(s): `ranvier train` starts one rank per GPU"]
    return [Finding("advice", "train" if i else "device", line) for i, line in enumerate(lines)]


def list_requirements() -> list[tuple[str, str, str]]:
    """Returns name, version specifiers and extra of each package in the metadata of this one."""
    found = []
    try:
        lines = metadata.requires("ranvier") or []
    except metadata.PackageNotFoundError:
        return []
    for line in lines:
        text, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)", marker)
        match = re.match(r"\s*([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)", text)
        # An extra may refer to other extras of this package.
        if match and match[1] != "ranvier":
            found.append((match[1], match[2].strip(), extra[1] if extra else ""))
    return found


def install_command(extra: str) -> str:
    """Returns the command that installs this package with an extra, in the way it was installed."""
    target = f"[{extra}]" if extra else ""
    origin = {}
    with suppress(metadata.PackageNotFoundError, ValueError):
        origin = json.loads(metadata.distribution("ranvier").read_text("direct_url.json") or "{}")
    # direct_url.json has dir_info if pip installed from a local directory (PEP 610).
    if "dir_info" not in origin:
        return f"pip install 'ranvier{target}'"
    folder = unquote(origin["url"].removeprefix("file://"))
    if Path.cwd() == Path(folder):
        go = ""
    else:
        go = f"cd {shlex.quote(folder)} && "
    return f"{go}pip install {'-e ' * bool(origin['dir_info'].get('editable'))}'.{target}'"


def meets_version(version: str, specifiers: str) -> bool:
    """Returns whether a version satisfies specifiers such as `>=2.11,<3`; unparsable ones
    pass."""
    own = version_numbers(version)
    for operator, text in re.findall(r"(===?|~=|!=|>=|<=|>|<)\s*([\w.+*-]+)", specifiers):
        bound = version_numbers(text)
        # Prefix match: only the first numbers are compared.
        if operator == "~=" or text.endswith(".*"):
            if operator == "~=":
                head = bound[:-1]
            else:
                head = bound
            alike = own[: len(head)] == head and (operator != "~=" or own >= bound)
            if alike == (operator == "!="):
                return False
            continue
        # Pad with zeros, so that 2.11 equals 2.11.0.
        width = max(len(own), len(bound))
        padded = [part + (0,) * (width - len(part)) for part in (own, bound)]
        if not OPERATORS[operator.replace("===", "==")](*padded):
            return False
    return True


def count_link_kinds(text: str) -> dict[str, int]:
    """Returns the number of GPU pairs by kind of link, from the output of `nvidia-smi topo -m`."""
    kinds: Counter[str] = Counter()
    for line in text.splitlines():
        # Strip terminal colors.
        first, *cells = re.sub(r"\x1b\[[\d;]*m", "", line).split() or [""]
        match = re.fullmatch(r"GPU(\d{1,3})", first)
        own = int(match[1]) if match else len(cells)
        # Only the cells left of the diagonal, so that each pair counts once.
        if own < len(cells) and cells[own] == "X":
            kinds.update(c for c in cells[:own] if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", c))
    return dict(kinds)


def count_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    num = len(os.sched_getaffinity(0))
    # A container may have a CPU quota below its number of cores.
    quota, _, period = _read_kernel_file(SYSFS_ROOT / "fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        num = min(num, max(int(quota) // int(period), 1))
    return num


def count_gpus() -> int:
    """Returns the number of GPUs that torch can use."""
    with suppress(Exception):
        cuda = _import_torch().cuda
        if cuda.is_available():
            return int(cuda.device_count())
        return 0
    return 0


def _import_torch() -> Any:
    return importlib.import_module("torch")


def _describe_gpu(module: Any, index: int) -> str:
    """Describes a GPU: name, memory, compute capability, bf16 support and peak."""
    from ranvier.train.metrics import PEAK_TFLOPS

    card = module.cuda.get_device_properties(index)
    peak = [f"{top:g} TFLOP/s" for key, top in PEAK_TFLOPS.items() if key in card.name]
    if module.version.hip or card.major >= 8:
        bf16 = "bf16"
    else:
        bf16 = "no bf16: use --train.dtype fp32"
    what = [
        card.name,
        _format_bytes(card.total_memory),
        f"capability {card.major}.{card.minor}",
        bf16,
    ]
    return ", ".join(what + peak[:1])


def _examine_dir(name: str, folder: Path, remedy: str) -> Finding:
    """Checks whether a directory is writable and has space."""
    if not launch.is_writable(folder):
        return Finding("storage", name, f"{folder} is not writable", "missing", remedy)
    free = shutil.disk_usage(folder).free
    text = f"{folder}, {_format_bytes(free)} free"
    small = free < LOW_SPACE_BYTES
    return Finding("storage", name, text, "note" if small else "ok", remedy if small else "")


def _format_bytes(number: float) -> str:
    if number >= 2**30:
        return f"{number / 2**30:.1f} GiB"
    return f"{number / 2**20:.0f} MiB"


def _read_kernel_file(path: Path) -> str:
    """Returns the text of a kernel file; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""


def _tool_output(command: Sequence[str]) -> str:
    """Returns the output of a tool; empty if it fails or exceeds its time limit and is killed."""
    # A file instead of a pipe, because a tool stuck in the driver could block us while it holds
    # the pipe open.
    with tempfile.TemporaryFile() as file, suppress(OSError, subprocess.SubprocessError):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(TOOL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            # Even a killed process remains while the driver holds it; then it is abandoned.
            process.wait(1.0)
            return ""
        file.seek(0)
        if process.returncode == 0:
            return file.read(2**20).decode(errors="replace")
        return ""
    return ""

"""The doctor: findings on this machine, and on machines that lack or break things."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from machines import machine
from ranvier import launch
from ranvier.cli import doctor
from ranvier.cli.doctor import Finding
from ranvier.cli.main import main
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import CommConfig
from ranvier.errors import CommunicationError
from ranvier.planner import cluster
from ranvier.planner.cluster import Cluster, CollectiveTiming
from ranvier.tools.benchmark_communicators import CommunicatorCost
from test_import import BLOCK

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\n"
    "GPU1\tNV18\t X \tNV18\tSYS\t0-47\n"
    "GPU2\tSYS\tNV18\t X \tSYS\t48-95\n"
    "NIC0\tPIX\tSYS\tSYS\t X\n\nLegend:\n\n  X    = Self\n  SYS  = PCIe and NUMA\n"
)


def of(findings: list[Finding], section: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings if finding.section == section}


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    findings = doctor.examine_machine()
    assert not [f for f in findings if f.name == "examination"]
    sections = list(dict.fromkeys(finding.section for finding in findings))
    wanted = "python torch devices links collectives communicators launcher storage packages advice"
    assert sections == wanted.split()
    assert doctor.print_findings(findings) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "python" and lines[-1] == "Ready to run."
    rows = [line for line in lines if line.startswith(("  ok  ", "  note", "  missing"))]
    assert len(rows) == len(findings)
    width = max(len(finding.name) for finding in findings)
    assert all(line[10] == " " != line[11] and line[11 + width] == " " for line in rows)


@pytest.mark.full
def test_it_works_without_packages_and_says_how_to_get_them(tmp_path: Path) -> None:
    code = f"""import sys
sys.path[:0] = {sys.path}
{BLOCK.replace('"tyro",', '"torch", "tyro",')}
from importlib import metadata
version = metadata.version
def hidden(name):
    if name in ("torch", "tyro", "tokenizers", "transformers"):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = hidden
from ranvier.cli import doctor
sys.exit(doctor.print_findings(doctor.examine_machine()))
"""
    end = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert end.returncode == 1, end.stderr
    assert "Missing and required: torch, tokenizers, tyro." in end.stdout
    missing = [line for line in end.stdout.splitlines() if line.startswith("  missing")]
    assert any("transformers [hf]" in line for line in missing)
    assert "[hf]'" in end.stdout and "check failed" not in end.stdout


def test_a_missing_thing_has_a_remedy() -> None:
    with pytest.raises(AssertionError, match="no remedy"):
        Finding("python", "version", "2.7", "missing")


def test_a_broken_section_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("no such bus")

    monkeypatch.setattr(doctor, "examine_links", broken)
    findings = doctor.examine_machine()
    (note,) = [finding for finding in findings if finding.name == "examination"]
    assert note.mark == "note" and "no such bus" in note.value
    assert of(findings, "advice")


def test_old_versions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    found = of(doctor.examine_python(), "python")["version"]
    assert (found.mark, found.is_essential) == ("missing", True)
    monkeypatch.setattr(
        doctor, "list_requirements", lambda: [("torch", ">=99", ""), ("numpy", "", "")]
    )
    assert of(doctor.examine_torch(), "torch")["torch"].mark == "note"
    assert [finding.mark for finding in doctor.examine_packages()] == ["ok", "note", "ok"]
    monkeypatch.setattr(doctor, "list_requirements", list)
    assert doctor.examine_packages()[0].remedy.startswith("pip install")


@pytest.mark.parametrize(
    ("version", "specifiers", "fits"),
    [
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9.1", "<2.14,>=2.11", False),
        ("2.11", ">=2.11.0", True),
        ("1.0", "", True),
        ("0.17.4", "==0.17.4", True),
        ("0.17.5", "==0.17.4", False),
        ("1.4.2", "~=1.4", True),
        ("2.0", "~=1.4", False),
        ("1.4.2", "==1.4.*", True),
        ("1.4.2", "!=1.4.*", False),
        ("1.5", "!=1.4", True),
    ],
)
def test_versions_are_compared(version: str, specifiers: str, fits: bool) -> None:
    assert doctor.meets_version(version, specifiers) is fits


def test_requirements_come_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch<2.14,>=2.11",
        "a.b (>=1)",
        'c[x]==2; extra == "hf"',
        'ranvier[hf]; extra == "t"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    wanted = [("torch", "<2.14,>=2.11", ""), ("a.b", ">=1", ""), ("c", "==2", "hf")]
    assert doctor.list_requirements() == wanted


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"url": "file:///a%20b", "dir_info": {"editable": true}}', "pip install -e '.[hf]'"),
        ('{"url": "file:///a%20b", "dir_info": {}}', "cd '/a b' && pip install '.[hf]'"),
        ('{"url": "file:///x.whl", "archive_info": {}}', "pip install 'ranvier[hf]'"),
        (None, "pip install 'ranvier[hf]'"),
        ("nonsense", "pip install 'ranvier[hf]'"),
    ],
)
def test_the_way_it_was_installed_is_the_way_to_get_more(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, command: str
) -> None:
    package = SimpleNamespace(read_text=lambda _: origin)
    monkeypatch.setattr(metadata, "distribution", lambda _: package)
    if "cd" not in command:
        monkeypatch.setattr(Path, "cwd", lambda: Path("/a b"))
    assert doctor.install_command("hf") == command


def test_topology_is_counted() -> None:
    assert doctor.count_link_kinds(TOPOLOGY) == {"NV18": 2, "SYS": 1}
    assert doctor.count_link_kinds("GPU0 X\n") == {}
    for garbage in ("", "GPU", "GPU7 X X", "\x00\x1b[4mGPU1 NV", "GPU99999999999 X"):
        assert doctor.count_link_kinds(garbage) == {}


def test_a_tool_that_hangs_fails_or_lies_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "TOOL_SECONDS", 0.3)
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for script in ("/bin/sleep 60 & /bin/sleep 60", "exit 3", "/bin/head -c 9999 /dev/urandom"):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        start = time.monotonic()
        assert "topology" not in of(doctor.examine_links(), "links")
        assert time.monotonic() - start < 30
    assert doctor._tool_output([str(tmp_path / "none")]) == ""


def test_links_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    files = {
        port / "state": "4: ACTIVE\n",
        port / "rate": "400 Gb/sec (4X NDR)\n",
        tmp_path / "class/net/eth0/operstate": "up\n",
        tmp_path / "class/net/eth0/speed": "25000\n",
        tmp_path / "class/net/eth1/operstate": "down\n",
        tmp_path / "class/net/virt/operstate": "up\n",
        tmp_path / "class/net/virt/speed": "-1\n",
        tmp_path / "class/net/lo/operstate": "unknown\n",
        tmp_path / "fs/cgroup/cpu.max": "100000 100000\n",
        tmp_path / "fs/cgroup/memory.max": f"{2**31}\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(doctor, "SYSFS_ROOT", tmp_path)
    found = {name: finding.value for name, finding in of(doctor.examine_links(), "links").items()}
    found.pop("topology", None)
    found.pop("peer access", None)
    wanted = {"mlx5_0/1": "ACTIVE, 400 Gb/sec (4X NDR)", "eth0": "25 Gbit/s"}
    assert found == {**wanted, "virt": "speed unknown"}
    assert doctor.count_cores() == 1
    assert of(doctor.examine_devices(), "devices")["memory"].value == "2.0 GiB"


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [("NVIDIA H100 PCIe", 9), ("NVIDIA A10G", 8), ("Tesla V100-SXM2-32GB", 7)]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(cards),
        can_device_access_peer=lambda a, b: (a, b) != (0, 2),
        get_device_properties=lambda i: SimpleNamespace(
            name=cards[i][0], major=cards[i][1], minor=0, total_memory=80 * 2**30
        ),
    )
    fake = SimpleNamespace(
        cuda=cuda, version=SimpleNamespace(hip=None, cuda="13"), get_num_threads=lambda: 4
    )
    monkeypatch.setattr(doctor, "_import_torch", lambda: fake)
    found = of(doctor.examine_devices(), "devices")
    texts = [found[f"gpu {i}"].value for i in range(3)]
    assert texts[0] == "NVIDIA H100 PCIe, 80.0 GiB, capability 9.0, bf16, 756 TFLOP/s"
    assert texts[1].endswith("bf16") and "no bf16" in texts[2]
    peers = of(doctor.examine_links(), "links")["peer access"]
    assert (peers.value, peers.mark) == ("2 of 3 GPU pairs", "note")
    assert "3 GPU(s)" in doctor.give_advice()[0].value


# ---- algorithms of collectives ----------------------------------------------------------


@pytest.fixture
def cpu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cluster file of a host without GPUs and launcher, which does not exist yet."""
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    monkeypatch.setattr(launch, "read_process_info", lambda: None)
    monkeypatch.setattr(launch, "available_backends", lambda: ["gloo"])
    monkeypatch.setattr("platform.node", lambda: "here")
    return tmp_path / "cluster-here-cpu.toml"


def algorithm_line(run: RunConfig | None = None) -> Finding:
    return of(doctor.examine_collectives(run), "collectives")["comm.algorithm"]


def timed_machine(name: str, faster: float) -> Cluster:
    """A host on which shared memory is faster than Gloo for pairs of ranks."""
    rows = [
        CollectiveTiming("all_gather", algorithm, 2, 1, n, n * 1e-9 / factor, 4)
        for algorithm, factor in (("native", 1.0), ("shared_memory", faster))
        for n in (2**12, 2**16, 2**20)
    ]
    return replace(machine(), name=name, timings=tuple(rows))


def test_algorithms_are_listed_with_reasons(
    cpu_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of(doctor.examine_collectives(), "collectives")
    marks = {name: finding.mark for name, finding in found.items()}
    assert marks == {
        "native": "ok",
        "shared memory": "ok",
        "symmetric memory": "note",
        "messages": "ok",
        "levels": "note",
        "timings": "note",
        "comm.algorithm": "ok",
    }
    assert found["native"].value == "those of Gloo"
    assert found["symmetric memory"].value == "not available: no GPU that torch can use"
    assert "ring, doubling, bruck, folded, direct, one_shot" in found["messages"].value
    assert "hierarchical, nvrar: only for ranks on several nodes" in found["levels"].value
    reason = "rank 0 cannot create shared memory: no memfd"
    monkeypatch.setattr(
        "ranvier.comm.transports.shared_memory.find_host_limitation", lambda: reason
    )
    found = of(doctor.examine_collectives(), "collectives")
    assert found["shared memory"].value == f"not available: {reason}"
    assert found["comm.algorithm"].value.startswith("auto: 2 ranks, 4 ranks, 8 ranks native (")
    monkeypatch.setattr(
        launch, "read_process_info", lambda: launch.ProcessInfo(1, 8, 1, 4, launcher="srun")
    )
    found = of(doctor.examine_collectives(), "collectives")
    assert found["levels"].value == "hierarchical, nvrar: ranks on 2 nodes"
    assert "8 ranks on 2 nodes" in found["comm.algorithm"].value


def test_the_state_of_timings_is_reported(cpu_host: Path) -> None:
    def state() -> Finding:
        return of(doctor.examine_collectives(), "collectives")["timings"]

    assert (state().value, state().mark) == ("cpu of here has not been measured", "note")
    assert state().remedy == "Run ranvier measure."
    other = cpu_host.with_name("cluster-there-cpu.toml")
    cluster.write_cluster(timed_machine("there", 2.0), other)
    assert "cluster-there-cpu.toml" in state().value
    assert "2 ranks, 4 ranks, 8 ranks shared_memory (default" in algorithm_line().value
    cluster.write_cluster(replace(machine(), name="here"), cpu_host)
    assert "has none" in state().value and state().mark == "note"
    assert "here has no timings" in algorithm_line().value
    cluster.write_cluster(timed_machine("there", 2.0), cpu_host)
    assert "is of there, not of here" in state().value and state().mark == "note"
    assert "the timings are of there" in algorithm_line().value
    cluster.write_cluster(timed_machine("here", 2.0), cpu_host)
    assert state().mark == "ok" and "has 6, of native, shared_memory" in state().value
    assert "measured on here" in algorithm_line().value
    cpu_host.write_text("nonsense")
    assert "cannot be read" in state().value and state().mark == "note"


def test_what_auto_takes_follows_the_timings(cpu_host: Path) -> None:
    """Pairs of ranks gather natively if shared memory is 2 % faster, and through it if 50 %."""
    cluster.write_cluster(timed_machine("here", 1.5), cpu_host)
    all_sizes = "auto: 2 ranks, 4 ranks, 8 ranks"
    assert algorithm_line().value == f"{all_sizes} shared_memory (measured on here)"
    cluster.write_cluster(timed_machine("here", 1.02), cpu_host)
    assert algorithm_line().value.startswith(f"{all_sizes} reduce_scatter, all_reduce, all_to_all,")


def test_the_algorithms_of_a_run_are_described(cpu_host: Path) -> None:
    run = RunConfig(plan=Plan(row=2, data=4), comm=CommConfig(algorithm="row=ring,native"))
    assert algorithm_line(doctor.resolve_ranks(run)).value == (
        "row=ring,native: data native; row all_gather, reduce_scatter and all_reduce ring"
    )
    wrong = replace(run, comm=CommConfig(algorithm="data=doubling,native"))
    three = replace(wrong, plan=Plan(data=3, global_batch=3, micro_batch=1))
    line = algorithm_line(doctor.resolve_ranks(three))
    assert line.mark == "note" and "needs a power of two" in line.value
    assert "no collectives" in algorithm_line(doctor.resolve_ranks(RunConfig())).value


COST = CommunicatorCost(0.02, 0.8, 0.25, 350 * 2**20, 20 * 2**20)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose ranks have measured."""
    monkeypatch.setattr(doctor, "count_gpus", lambda: 2)
    monkeypatch.setattr(launch, "available_backends", lambda: ["gloo", "nccl"])
    monkeypatch.setattr(
        "ranvier.tools.benchmark_communicators.measure_communicator_cost", lambda gpus: COST
    )


@pytest.mark.usefixtures("two_gpus")
def test_communicators_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of(doctor.examine_communicators(), "communicators")
    assert "two GPUs" in found["measured"].value
    assert found["first"].value.startswith("0.80 s, 350 MiB on each rank")
    assert found["each further"].value == "0.25 s, 20 MiB on each rank"

    def lost(gpus: int) -> CommunicatorCost:
        raise CommunicationError("They could not: no memory. They need some. End others.")

    monkeypatch.setattr("ranvier.tools.benchmark_communicators.measure_communicator_cost", lost)
    (note,) = doctor.examine_communicators()
    assert note.mark == "note" and note.value == "They could not: no memory"
    assert note.remedy == "They need some. End others."
    monkeypatch.setattr(
        launch, "read_process_info", lambda: launch.ProcessInfo(1, 4, launcher="srun")
    )
    assert "under a launcher" in doctor.examine_communicators()[0].value
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    (note,) = doctor.examine_communicators()
    assert note.mark == "note" and "no GPU" in note.value


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the doctor says of the communicators of a plan."""
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    said = capsys.readouterr()
    assert end.value.code in (0, 1), said.err
    return said.out.partition("\ncommunicators\n")[2].partition("\nlauncher\n")[0]


PLAN = ("--model.size", "llama3-1b", "--plan.pipe", "4", "--plan.row", "2", "--plan.data", "2")


def test_communicators_of_a_plan_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    text = listed(capsys, *PLAN)
    lines = [line.split(maxsplit=2) for line in text.splitlines()]
    rows = [(name, value) for _, name, value in lines]
    assert ("pipe·data·row", "collectives: 16 ranks over nccl") in rows
    assert ("pipe", "collectives: 2 of 4 ranks over nccl") in rows, "the embedding is tied"
    assert ("pipe", "up: 4 ranks over nccl, 1 of them point to point") in rows
    assert ("row", "host: 2 ranks over gloo") in rows
    assert rows[-1][0] == "total" and "7 over nccl, 2 over gloo, 490 MiB" in rows[-1][1]
    assert " s to create them" not in text
    assert "no communicators" in listed(capsys, "--model.size", "gpt2")
    assert "over gloo: no device memory" in listed(capsys, *PLAN, "--train.device", "cpu")


@pytest.mark.usefixtures("two_gpus")
def test_the_time_to_make_them_is_predicted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("[plan]\ndata = 2\nrow = 2\n")
    text = listed(capsys, str(tmp_path / "run.toml"))
    assert "3 over nccl, 0 over gloo, 390 MiB of device memory, on each rank\n" in text
    assert "1.3 s to create them, as measured here" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--plan.row", "3"], "row=3 does not divide heads=8"),
        (["none.toml"], "none.toml cannot be read"),
    ],
)
def test_plans_that_cannot_run_are_told(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    assert end.value.code == 64 and says in capsys.readouterr().err


def test_launchers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        launch, "read_process_info", lambda: launch.ProcessInfo(1, 4, 1, 2, "a", 5, launcher="srun")
    )
    assert "srun: rank 1 of 4" in doctor.examine_launcher()[0].value
    monkeypatch.undo()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (broken,) = doctor.examine_launcher()
    assert broken.mark == "missing" and "WORLD_SIZE" in broken.remedy
    assert doctor.print_findings([broken]) == 1


def test_full_and_closed_folders_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._examine_dir("cache", tmp_path / "none", "Make it.").mark == "missing"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    found = doctor._examine_dir("cache", tmp_path, "Delete something.")
    assert (found.mark, found.remedy) == ("note", "Delete something.")
    assert "1 MiB free" in found.value

"""Launchers, folders and signals: what the environment says, and how ranks stop."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier import launch
from ranvier.errors import CommunicationError, PlanError
from ranvier.launch import GracefulStop, ProcessInfo, parse_host_list, read_process_info

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}


def known(environment: dict[str, str]) -> ProcessInfo:
    me = read_process_info(environment)
    assert me is not None, environment
    return me


def test_srun_is_understood() -> None:
    me = known(SLURM)
    assert (me.rank, me.world_size, me.local_rank, me.local_world_size) == (5, 8, 1, 4)
    assert (me.address, me.launcher) == ("node07", "srun")
    assert 20000 <= me.port < 40000
    assert known({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).port == me.port
    assert known({**SLURM, "SLURM_STEP_ID": "1"}).port != me.port
    me = known({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "77"})
    assert (me.address, me.port) == ("other", 77)


@pytest.mark.parametrize(
    ("changes", "local_world", "address"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, 2, "node07"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_NODEID": ""}, 5, "node07"),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "6,2"}, 2, "node07"),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "4"}, 4, "node07"),
        ({"SLURM_STEP_NODELIST": ""}, 4, "node01"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, 8, "127.0.0.1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_STEP_NODELIST": "one"}, 8, "127.0.0.1"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, 8, "node07"),
    ],
)
def test_nodes_of_srun(changes: dict[str, str], local_world: int, address: str) -> None:
    environment = {name: value for name, value in {**SLURM, **changes}.items() if value}
    me = known(environment)
    assert (me.local_world_size, me.address) == (local_world, address)


def test_mpirun_is_understood_before_srun() -> None:
    me = known({**MPI, **SLURM})
    assert (me.rank, me.world_size, me.launcher) == (1, 2, "mpirun")
    assert (me.address, me.port) == ("127.0.0.1", 29500)
    assert known({**MPI, "PMIX_NAMESPACE": "prterun-1"}).port in range(20000, 40000)
    several = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(PlanError, match="MASTER_ADDR is not set"):
        read_process_info(several)
    assert known({**several, "MASTER_ADDR": "first"}).address == "first"


def test_torchrun_wins_and_one_task_is_none() -> None:
    assert known({**SLURM, **MPI, **TORCH}) == ProcessInfo(
        3, 4, 3, 4, "host", 1234, launcher="torchrun"
    )
    assert known({**SLURM, "WORLD_SIZE": "8"}).launcher == "srun"
    assert known({**TORCH, "RANK": "0", "WORLD_SIZE": "1"}).world_size == 1
    assert read_process_info({}) is None
    assert read_process_info({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert (
        read_process_info({name: value for name, value in SLURM.items() if name != "SLURM_PROCID"})
        is None
    )
    assert (
        read_process_info({name: value for name, value in SLURM.items() if name != "SLURM_NTASKS"})
        is None
    )


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set, but RANK is set"),
        ({**TORCH, "RANK": "4"}, "RANK=4 is not less than WORLD_SIZE=4"),
        ({**TORCH, "RANK": "x"}, "RANK='x' is not a number"),
        ({**TORCH, "MASTER_PORT": "²"}, "MASTER_PORT='²' is not a number"),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not less than SLURM_NTASKS=8"),
        ({**SLURM, "SLURM_LOCALID": "-1"}, "SLURM_LOCALID='-1' is not a number"),
        ({**SLURM, "SLURM_NODEID": "a"}, "SLURM_NODEID='a' is not a number"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "SLURM_STEP_TASKS_PER_NODE='4(y2)' is"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[1-"}, "'a[1-' is not a valid host list"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[1-x]"}, "'a[1-x]' is not a valid host list"),
    ],
)
def test_mistakes_of_launchers_are_told(environment: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError) as error:
        read_process_info(environment)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("one", ["one"]),
        ("a,b-1.c", ["a", "b-1.c"]),
        ("node[01-03,07],gpu3", ["node01", "node02", "node03", "node07", "gpu3"]),
        ("a[1-2]b[3]", ["a1b3", "a2b3"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_lists_of_hosts(text: str, names: list[str]) -> None:
    assert parse_host_list(text) == names


SPANS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 9)), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r0c"]), SPANS), max_size=4))
def test_lists_of_hosts_hold_what_was_written(
    groups: list[tuple[str, list[tuple[int, int]]]],
) -> None:
    texts, names = [], []
    for prefix, spans in groups:
        inside = [f"{a:03}-{a + n:03}" if n else f"{a:03}" for a, n in spans]
        texts.append(f"{prefix}[{','.join(inside)}]")
        names += [f"{prefix}{i:03}" for a, n in spans for i in range(a, a + n + 1)]
    assert parse_host_list(",".join(texts)) == names


def test_time_out_under_slurm_names_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr("torch.distributed.init_process_group", late)
    for launcher, says in (("srun", True), ("torchrun", False)):
        me = ProcessInfo(1, 2, launcher=launcher)
        with pytest.raises(CommunicationError) as error:
            launch.init_process_group(me, backend="gloo")
        assert ("start the ranks with srun" in str(error.value)) is says


@pytest.mark.parametrize("variables", (SLURM, MPI, TORCH))
def test_a_process_without_the_variables_of_ranks_is_no_rank(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**variables, "KEPT": "yes"}.items():
        monkeypatch.setenv(name, value)
    assert read_process_info() is not None
    without = launch.environment_without_ranks()
    assert without["KEPT"] == "yes"
    assert read_process_info(without) is None


def test_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("RANVIER_CACHE", raising=False)
    assert launch.cache_dir() == tmp_path / "home/.cache/ranvier"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert launch.cache_dir() == tmp_path / "xdg/ranvier"
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path / "own"))
    assert launch.cache_dir() == tmp_path / "own" and (tmp_path / "own").is_dir()


def test_cache_falls_back_to_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = launch.cache_dir()
    assert folder == tmp_path / f"ranvier-{os.getuid()}" == launch.cache_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to("/")  # somebody else's trap
    assert launch.cache_dir().parent == tmp_path and launch.cache_dir() != folder


def test_environment_and_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANVIER_TEST", "1")
    assert launch.read_environment("RANVIER_TEST", "RANVIER_NONE") == {"RANVIER_TEST": "1"}
    assert "gloo" in launch.available_backends()


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.001)  # Python runs handlers between its instructions


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_noted(first: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = handlers()
    with GracefulStop() as stop:
        assert stop.signal == 0
        send(first, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2)  # one signal, echoed
        assert stop.signal == first
        time.sleep(0.11)
        with pytest.raises(KeyboardInterrupt) as end:
            send(first)
        assert end.value.args == (first,)
        send(signal.SIGUSR1, signal.SIGUSR2)
    assert handlers() == before and stop.signal == first
    assert capfd.readouterr().err.count("Stopping after this step") == 1


def test_other_ranks_are_quiet_and_other_threads_untouched(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with GracefulStop(quiet=True) as stop:
        send(signal.SIGINT)
    assert stop.signal == signal.SIGINT and capfd.readouterr().err == ""
    before, inside = handlers(), []

    def work() -> None:
        with GracefulStop():
            inside.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before] and handlers() == before


ORPHANS = """
import ctypes, os, time
from pathlib import Path
from ranvier import launch

def task(me):
    Path(f"pid{me.rank}").write_text(str(os.getpid()))
    if me.rank:
        ctypes.PyDLL(None).sleep(60)  # in C, and no thread of Python runs
    time.sleep(60)
    return 0

if __name__ == "__main__":
    launch.launch_ranks(2, task)
"""
IMPORTING = """
import os, time
from pathlib import Path

Path("server").write_text(str(os.getpid()))
time.sleep(60)
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def killed(folder: Path, *names: str) -> None:
    """Kill a launcher once files of some names tell processes, and wait for the end of these."""
    temporary = folder / "temporary"
    temporary.mkdir()
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path}
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=folder, env=env)
    files = [folder / name for name in names]
    limit = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < limit and parent.poll() is None
        time.sleep(0.05)
    processes = [int(file.read_text()) for file in files]
    assert all(map(alive, processes))
    parent.kill()
    parent.wait()
    limit = time.monotonic() + 5
    while any(map(alive, processes)):
        assert time.monotonic() < limit, "orphans"
        time.sleep(0.05)
    while os.listdir(temporary):
        assert time.monotonic() < limit, os.listdir(temporary)
        time.sleep(0.05)


@pytest.mark.full
def test_ranks_and_folders_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(ORPHANS)
    killed(tmp_path, "pid0", "pid1")


def test_the_server_of_ranks_ends_with_the_launcher_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(IMPORTING)
    started = 'launch.launch_ranks(2, task, preload=["slow_import"])'
    (tmp_path / "parent.py").write_text(ORPHANS.replace("launch.launch_ranks(2, task)", started))
    killed(tmp_path, "server")


def test_ranks_inherit_blocked_signals() -> None:
    """As those of `ranvier serve`. In a new process, which has no resource tracker yet."""
    program = (
        "import signal",
        "from ranvier.launch.process_group import start_forkserver",
        "blocked = {signal.SIGINT, signal.SIGTERM}",
        "signal.pthread_sigmask(signal.SIG_BLOCK, blocked)",
        "start_forkserver([])",
        "assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= blocked",
    )
    subprocess.run([sys.executable, "-c", "\n".join(program)], check=True)


def test_compilers_keep_their_results_in_our_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless the user has said where."""
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    launch.cache_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


def test_a_process_knows_its_age() -> None:
    first = launch.process_age_seconds()
    assert first > 0.0 or not Path("/proc/uptime").exists()
    assert launch.process_age_seconds() >= first


def test_triton_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc" if name == "cc" else None)
    assert launch.has_triton()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not launch.has_triton()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not launch.has_triton()


@pytest.mark.parametrize(
    ("environment", "calls"),
    [
        ({}, [(-3, 32 << 20), (-1, 1 << 30)]),
        ({"MALLOC_ARENA_MAX": "2"}, []),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, []),
    ],
)
def test_freed_memory_is_kept_unless_the_user_says_otherwise(
    environment: dict[str, str], calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, parameter: int, value: int) -> None:
            made.append((parameter, value))

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    monkeypatch.setattr(os, "environ", {**environment})
    launch.keep_freed_memory()
    assert made == calls
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"

"""Environment: rank and world size of this process, and the variables that libraries read.

Ranks come from the variables of torchrun, mpirun or srun. Heterogeneous Slurm jobs are not
supported.

Also finds cache directories, and whether Triton kernels can be built.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import ipaddress
import itertools
import os
import re
import shlex
import shutil
import socket
import struct
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ranvier.errors import PlanError
from ranvier.launch.shared_file import SharedFile

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of glibc's mallopt."""


@dataclass(frozen=True)
class Failure:
    """Why all ranks were restarted."""

    attempt: int
    step: int
    """Last step that was reached; -1 if none."""
    why: str
    grid: str
    """The grid of the attempt."""


@dataclass(frozen=True)
class ProcessInfo:
    """Rank of this process and how it reaches the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    error_file: str | SharedFile = ""
    """File for the error report that the agent reads; if empty, errors are printed."""
    launcher: str = ""
    """Program that started the ranks; empty for this package."""
    heartbeat_file: str | SharedFile = ""
    """File of the heartbeats; empty if the rank is not monitored from outside."""
    stack_file: str | SharedFile = ""
    """File for the stacks of this rank, on request or after a crash."""
    store_file: SharedFile | None = field(default=None, repr=False)
    """File of the store if all ranks are on one node; otherwise rank 0 hosts it at the address."""
    listener: socket.socket | None = field(default=None, repr=False)
    """Listening socket of rank 0, opened by its launcher; None if rank 0 opens its own."""
    store_prefix: str = field(default="", repr=False)
    """Secret prefix of all store keys of an attempt; if empty, it is derived from the user's
    key."""
    attempt: int = 0
    """Number of earlier attempts of this run."""
    grid_index: int = 0
    """Index of the grid that the launcher chose; 0 is the requested one."""
    failures: tuple[Failure, ...] = ()
    """Why earlier attempts failed."""
    start_time: float = 0.0
    """Start of the launcher (Unix time); 0 means the start of this process."""


@dataclass(frozen=True)
class Launcher:
    """Environment variables by which a launcher passes ranks and sizes."""

    name: str
    rank_variable: str
    world_size_variables: tuple[str, ...]
    """The first variable that is set is used."""
    local_rank_variable: str
    local_world_size_variables: tuple[str, ...]
    """The first variable that is set is used: a number, or one per node as in `4(x2),3`."""
    node_variable: str = ""
    """Index of this node."""
    host_list_variables: tuple[str, ...] = ()
    """The first variable that is set is used: the hosts of all ranks, as in
    `node[01-04,07],gpu3`."""
    job_variables: tuple[str, ...] = ()
    """Variables that identify the job; the port is derived from them."""

    def find_world_size_variable(self, env: Mapping[str, str]) -> str:
        """Return the variable that holds the number of ranks, empty if none is set."""
        return next((name for name in self.world_size_variables if name in env), "")


TORCHRUN = Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",))
LAUNCHERS = (
    # Before srun, because mpirun may start its processes with srun.
    Launcher(
        name="mpirun",
        rank_variable="OMPI_COMM_WORLD_RANK",
        world_size_variables=("OMPI_COMM_WORLD_SIZE",),
        local_rank_variable="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size_variables=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job_variables=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        name="srun",
        rank_variable="SLURM_PROCID",
        world_size_variables=("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS"),
        local_rank_variable="SLURM_LOCALID",
        local_world_size_variables=(
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_TASKS_PER_NODE",
            "SLURM_NTASKS_PER_NODE",
        ),
        node_variable="SLURM_NODEID",
        host_list_variables=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        job_variables=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def read_process_info(environment: Mapping[str, str] | None = None) -> ProcessInfo | None:
    """Return the ranks set by a launcher; None without a launcher, or if it started one rank."""
    env = os.environ if environment is None else environment
    names = (TORCHRUN.rank_variable, *TORCHRUN.world_size_variables, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in env]
    others = [
        it for it in LAUNCHERS if it.rank_variable in env and it.find_world_size_variable(env)
    ]
    # Complete torchrun variables take precedence, because torchrun may be started by srun.
    if others and missing:
        if env[others[0].find_world_size_variable(env)] != "1":
            return _parse_process_info(others[0], env)
        return None
    if TORCHRUN.rank_variable not in env and not TORCHRUN.find_world_size_variable(env):
        return None
    if missing:
        raise PlanError(
            f"{', '.join(missing)} not set, but {', '.join(n for n in names if n in env)} is set. "
            "A launcher sets all four. Use --nproc or torchrun, or set the missing variables."
        )
    return _parse_process_info(TORCHRUN, env)


def _parse_process_info(launcher: Launcher, env: Mapping[str, str]) -> ProcessInfo:
    """Parse and check the variables of a launcher."""
    rank = _parse_count(launcher.rank_variable, env[launcher.rank_variable])
    count = launcher.find_world_size_variable(env)
    world = _parse_count(count, env[count])
    if rank >= world:
        raise PlanError(
            f"{launcher.rank_variable}={rank} is not less than {count}={world}. Ranks are numbered "
            "from 0. Fix one of these variables."
        )
    local_world = world
    known = [name for name in launcher.local_world_size_variables if name in env]
    if known:
        node = _parse_count(launcher.node_variable, env.get(launcher.node_variable, "0"))
        local_world = _parse_count(known[0], _count_on_node(env[known[0]], node))
    alone = bool(known) and local_world == world
    job = ".".join(env[name] for name in launcher.job_variables if name in env)
    # All ranks derive the same port, and jobs that share a node very likely get different ports.
    if job:
        port = 20000 + zlib.crc32(job.encode()) % 20000
    else:
        port = 29500
    return ProcessInfo(
        rank=rank,
        world_size=world,
        local_rank=_parse_count(
            launcher.local_rank_variable, env.get(launcher.local_rank_variable, str(rank))
        ),
        local_world_size=local_world,
        address=env.get("MASTER_ADDR") or _rank_0_address(launcher, env, alone=alone),
        port=_parse_count("MASTER_PORT", env.get("MASTER_PORT", str(port))),
        error_file=env.get("RANVIER_ERROR_FILE", ""),
        launcher=launcher.name,
    )


def _parse_count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise PlanError(
            f"{name}={text!r} is not a number. A launcher sets it to 0, 1, 2, ... Unset or fix it."
        )
    return int(text)


def _count_on_node(text: str, node: int) -> str:
    """Returns the count of one node in a list such as `4(x2),3`, or the text if it is not a
    list."""
    counts: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return text
        counts += [match[1]] * int(match[2] or 1)
    if counts:
        return counts[node if node < len(counts) else 0]
    return text


def _rank_0_address(launcher: Launcher, env: Mapping[str, str], *, alone: bool) -> str:
    """Returns the address of rank 0: this node if it is the only one, else the first of the job."""
    names = [name for name in launcher.host_list_variables if env.get(name)]
    if names and not alone:
        every = parse_host_list(env[names[0]])
    else:
        every = []
    if alone or len(every) == 1 or (launcher.host_list_variables and not names):
        return "127.0.0.1"
    if every:
        return every[0]
    raise PlanError(
        f"{launcher.name} has started {env[launcher.find_world_size_variable(env)]} ranks on "
        "several nodes, but MASTER_ADDR is not set. All ranks connect to the host of rank 0. Set "
        "MASTER_ADDR to its name."
    )


def parse_host_list(text: str) -> list[str]:
    """Expand a Slurm host list: `node[01-02,07],gpu3` is node01, node02, node07 and gpu3."""
    names: list[str] = []
    if not re.fullmatch(r"[^\[\]]*(\[\d+(-\d+)?(,\d+(-\d+)?)*\][^\[\]]*)*", text):
        raise PlanError(
            f"{text!r} is not a valid host list. Slurm uses the form node[01-04,07],gpu3. Set "
            "MASTER_ADDR to the host of rank 0."
        )
    for term in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        # Alternates between text outside and inside of brackets.
        pieces = re.split(r"\[([^\]]*)\]", term)
        choices = [_expand_ranges(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names += ["".join(parts) for parts in itertools.product(*choices)]
    return names


def _expand_ranges(text: str) -> list[str]:
    """Expand `01-04,07` to numbers, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def is_follower() -> bool:
    """Whether a launcher has started this process as a rank other than 0, which prints nothing."""
    with contextlib.suppress(PlanError):
        me = read_process_info()
        return me is not None and me.rank > 0
    return False


def read_environment(*names: str) -> dict[str, str]:
    """Returns the given variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def read_compile_errors() -> Literal["fallback", "raise"]:
    """Returns what RANVIER_COMPILE_ERRORS says about failures of compilers; fallback by default."""
    match os.environ.get("RANVIER_COMPILE_ERRORS") or "fallback":
        case "fallback":
            return "fallback"
        case "raise":
            return "raise"
        case value:
            raise PlanError(
                f"RANVIER_COMPILE_ERRORS={value!r} is unknown. It says what happens if a block "
                "cannot be compiled. Use 'fallback' or 'raise'."
            )


def read_added_options() -> list[str]:
    """Returns the options in RANVIER_ADDOPTS, which override those of the command line.

    They are appended to the words of `ranvier train`, `verify` and `profile`, as pytest does with
    PYTEST_ADDOPTS. The tests of the documentation use it to run every command on small sizes.
    """
    text = os.environ.get("RANVIER_ADDOPTS", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise PlanError(
            f"RANVIER_ADDOPTS={text!r} cannot be split into words: {error}. It holds options as "
            "in a shell, with matching quotes. Correct or unset it."
        ) from None


def use_expandable_segments() -> None:
    """Enables expandable segments in torch's CUDA allocator, which reduces fragmentation.

    Must be called before the first use of CUDA.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def keep_freed_memory() -> None:
    """Makes the CPU allocator keep memory that a step frees for the next step, in huge pages.

    By default glibc returns large blocks to the system immediately, and each step has to map new
    pages. Settings in the user's environment take precedence.
    """
    # torch reads it at its first allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    # Fails with C libraries other than glibc.
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # 32 MiB is the maximum that glibc accepts.
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def prepare_sockets(me: ProcessInfo) -> None:
    """Restricts Gloo, and on one node NCCL, to the network interface that reaches rank 0."""
    if me.store_file is not None:
        name = "lo"
    else:
        name = interface_towards(me.address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if name == "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def interface_towards(address: str) -> str:
    """Return the network interface by which this node reaches an address; empty if unknown."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                # Connecting a UDP socket sends no packet, but chooses the local address.
                probe.connect(where)
                own = probe.getsockname()[0]
            if ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                return "lo"
            return _interface_of(own)
    return ""


def _interface_of(address: str) -> str:
    """Returns the interface with an IPv4 address; empty if there is none."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), get_address, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""


def prepare_nccl(me: ProcessInfo, *, share_gpu: bool) -> None:
    """Sets the variables that NCCL and torch read when the first communicator is created.

    share_gpu: whether several ranks may use the same GPU. NCCL rejects that for ranks of one host,
    so each rank gets its own host ID; they then communicate through sockets. Torch's symmetric
    memory needs permission.
    """
    wanted = {
        # Connect when a communicator is created, not at its first use.
        "NCCL_RUNTIME_CONNECT": "0",
        # Our own watchdog detects hangs; torch's complains if the store of rank 0 ends first.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # Point-to-point transfers have their own groups.
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    }
    if share_gpu:
        wanted |= {
            "NCCL_HOSTID": f"{socket.gethostname()}-{me.rank}",
            "NCCL_IB_DISABLE": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
        if me.local_world_size == me.world_size:
            wanted["NCCL_SOCKET_IFNAME"] = "lo"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def use_deterministic_cublas() -> None:
    """Make cuBLAS deterministic; must be called before its first use."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    good = (":4096:8", ":16:8")
    if os.environ.setdefault(name, good[0]) not in good:
        raise PlanError(
            f"{name}={os.environ[name]!r} with train.deterministic=True. Matrix products are "
            f"deterministic only with {' or '.join(good)}. Unset it or use one of these values."
        )


def environment_without_ranks() -> dict[str, str]:
    """Returns all variables except those by which launchers make a process a rank."""
    names: set[str] = set()
    for one in (TORCHRUN, *LAUNCHERS):
        names |= {one.rank_variable, one.local_rank_variable}
        names |= {*one.world_size_variables, *one.local_world_size_variables}
    return {name: value for name, value in os.environ.items() if name not in names}


def minimal_environment() -> dict[str, str]:
    """Returns the variables that a separate Python needs to start, and the time zone."""
    names = ("LD_LIBRARY_PATH", "TZ")
    return {name: os.environ[name] for name in names if name in os.environ}


def process_age_seconds() -> float:
    """Return the seconds since this process was started; 0 if unknown."""
    # Field 22 of /proc/self/stat is the start time in clock ticks since boot; fields are counted
    # after the name in parentheses, which may contain spaces.
    with contextlib.suppress(OSError, ValueError, IndexError):
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(up - started / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0


def cache_dir() -> Path:
    """Return a writable cache directory: the user's, else one in the temporary directory."""
    env = os.environ
    folder = Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "ranvier"
    # Without a home directory, expanduser raises a RuntimeError.
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path(env.get("RANVIER_CACHE") or folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if is_writable(folder):
            return folder
    folder = Path(tempfile.gettempdir()) / f"ranvier-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        # Compiled kernels are executed, so the directory must belong to this user.
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            folder.chmod(0o700)
            return folder
    # Another user owns that name.
    return Path(tempfile.mkdtemp(prefix="ranvier-"))


def is_writable(folder: Path) -> bool:
    """Whether a file can be written in a directory."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ranvier")
    except OSError:
        return False
    return True


def cache_compiled_kernels() -> None:
    """Makes Inductor and Triton use our cache directory, so that later runs reuse their kernels."""
    folder = cache_dir() / "compiled"
    for name, part in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(name, str(folder / part))


def has_triton() -> bool:
    """Whether Triton kernels can be built: the package and a C compiler are installed."""
    found = importlib.util.find_spec("triton") is not None
    names = (os.environ.get("CC", ""), "gcc", "cc", "clang")
    return found and any(name and shutil.which(name) for name in names)

"""Stores: the key-value stores through which ranks, or launchers, find each other.

Ranks that a launcher starts on its own node use a shared file, so no port is opened. Other ranks
use a TCP address. Its listening socket is opened here, bound only to the requested address, and
passed to torch's store.

torch's store has no authentication. All keys have a 256-bit prefix derived from a secret that only
the ranks know, so others cannot guess it. But anyone who can reach the port can flood it, and torch
lists all keys on request, so on an untrusted network use a private interface.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any

from ranvier.errors import CommunicationError, PlanError, UnsafeInputError
from ranvier.launch.environment import ProcessInfo, read_environment
from ranvier.launch.shared_file import SharedFile

SHORTEST_KEY = 32
"""Minimum number of characters of a key: 128 bits in hexadecimal digits."""
LONGEST_KEY = 4096
BACKLOG = 4096
HELLO_KEY = "hello"
"""Rank 0 sets this key as soon as it listens."""
HELLO_SECONDS = 30.0
"""Time after a connection within which HELLO_KEY must appear."""
KEY_RULE = "Ranks on several nodes use a shared secret key to connect."
KEY_REMEDY = "set RANVIER_KEY to the same text (openssl rand -hex 32) on all nodes"


def new_key() -> str:
    """Return a key of 256 random bits."""
    return secrets.token_hex(32)


def derive_prefix(key: str, *context: object) -> str:
    """Return a 256-bit prefix that differs between contexts and does not reveal the key.

    prefix = HMAC-SHA256(key, context)
    """
    text = "\0".join(map(str, context))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def user_key() -> str:
    """Return the key that all nodes of a user's run share.

    Read from RANVIER_KEY, else from the file RANVIER_KEY_FILE, else from a file in the user's home
    that is created when it is first needed.
    """
    given = read_environment("RANVIER_KEY", "RANVIER_KEY_FILE")
    if "RANVIER_KEY" in given:
        return _check_key(given["RANVIER_KEY"], "RANVIER_KEY")
    if "RANVIER_KEY_FILE" in given:
        path = Path(given["RANVIER_KEY_FILE"]).expanduser()
        return _check_key(_read_key_file(path), f"RANVIER_KEY_FILE={path}")
    path = _config_dir() / "key"
    with contextlib.suppress(FileExistsError):
        _create_key_file(path)
    return _check_key(_read_key_file(path), str(path))


def _config_dir() -> Path:
    """Return the user's configuration directory, which nodes usually share."""
    try:
        folder = read_environment("XDG_CONFIG_HOME").get("XDG_CONFIG_HOME") or "~/.config"
        return Path(folder).expanduser() / "ranvier"
    except RuntimeError:
        raise PlanError(
            f"This user has no home directory for the key file. {KEY_RULE} Set XDG_CONFIG_HOME to "
            f"a directory that all nodes share, or {KEY_REMEDY}."
        ) from None


def _create_key_file(path: Path) -> None:
    """Writes a new key file atomically; raises FileExistsError if another rank was first."""
    if path.exists():
        raise FileExistsError(path)
    draft = path.with_name(f".key-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{new_key()}\n")
        try:
            # Unlike a rename, a link fails if the target exists, also on a network file system.
            os.link(draft, path)
        finally:
            draft.unlink()
    except FileExistsError:
        raise
    except OSError as error:
        raise PlanError(
            f"The key file {path} cannot be written ({error.strerror}). {KEY_RULE} Make the file's "
            f"directory writable, or {KEY_REMEDY}."
        ) from None


def _read_key_file(path: Path) -> str:
    """Returns the text of a key file, which only its owner may read."""
    try:
        # O_NONBLOCK, because opening a FIFO must not hang. All checks use the open descriptor, so
        # that the file cannot be replaced in between.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise PlanError(
            f"The key file {path} cannot be read ({error.strerror}). {KEY_RULE} Make the file "
            f"readable, or {KEY_REMEDY}."
        ) from None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise UnsafeInputError(
                f"{path} is not a regular file. The key must be in a regular file. Use another "
                "path."
            )
        if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & 0o077:
            raise UnsafeInputError(
                f"{path} belongs to user {facts.st_uid} with mode {facts.st_mode & 0o777:o}. A key "
                "is a secret, so only its owner may have access to the file. Use chmod 600 "
                f"{path}."
            )
        return os.read(fd, LONGEST_KEY + 1).decode(errors="replace")
    finally:
        os.close(fd)


def _check_key(text: str, source: str) -> str:
    """Returns a key without surrounding whitespace; raises if its length is invalid."""
    key = text.strip()
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        raise PlanError(
            f"{source} has {len(key)} characters. A key must have {SHORTEST_KEY} to {LONGEST_KEY} "
            "random characters. Create one with openssl rand -hex 32."
        )
    return key


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens on one address of this node; port 0 means any free port.

    RANVIER_LISTEN overrides the address, for nodes that are reached through another address (NAT).
    """
    host = read_environment("RANVIER_LISTEN").get("RANVIER_LISTEN") or address
    problem = "the host is unknown"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        found = []
        problem = getattr(error, "strerror", None) or str(error)
    # A name may have several addresses: use the first that can be bound.
    for family, kind, protocol, _, where in found:
        listener = socket.socket(family, kind, protocol)
        try:
            # A restart must not wait for connections of the last attempt in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            problem = error.strerror or str(error)
        else:
            return listener
    raise CommunicationError(
        f"This node cannot listen on {host}:{port}: {problem}. Rank 0, or node 0, listens on the "
        "address by which the others reach it. Use an address of one of its interfaces and a free "
        "port. Behind NAT, set RANVIER_LISTEN to the node's own address."
    )


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def open_tcp_store(
    address: str, port: int, timeout_seconds: float, *, listener: socket.socket | None = None
) -> Any:
    """Connects to torch's store at an address; listener: the socket if this process hosts the
    store."""
    from torch import distributed as torch_distributed

    # Any, because the type stubs of torch do not export its stores.
    distributed: Any = torch_distributed
    limit = datetime.timedelta(seconds=timeout_seconds)
    if listener is None:
        if not port:
            raise ValueError("the port is unknown")
        return distributed.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=limit
        )
    # torch needs an address to connect to; 0.0.0.0 is not one.
    host, port = listener.getsockname()[:2]
    unspecified = ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    return distributed.TCPStore(
        "localhost" if unspecified else host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),
    )


def open_file_store(file: SharedFile, timeout_seconds: float) -> Any:
    """Open torch's store in a file shared by the ranks of one node."""
    from torch import distributed as torch_distributed

    distributed: Any = torch_distributed
    store = distributed.FileStore(os.fspath(file), -1)
    store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
    return store


def with_prefix(prefix: str, store: Any) -> Any:
    """Return a store that prepends a prefix to each key."""
    from torch import distributed as torch_distributed

    distributed: Any = torch_distributed
    return distributed.PrefixStore(prefix, store)


def open_store(me: ProcessInfo, timeout_seconds: float) -> Any:
    """Open the store of all ranks, under their prefix. Communicates: with rank 0."""
    if me.store_file is not None:
        return with_prefix(me.store_prefix, open_file_store(me.store_file, timeout_seconds))
    # Started by our own launchers on several nodes, which have exchanged the prefix.
    if me.store_prefix:
        store = open_tcp_store(me.address, me.port, timeout_seconds, listener=me.listener)
        return with_prefix(me.store_prefix, store)
    torchrun = read_environment("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
    context = (me.address, me.port, torchrun.get("TORCHELASTIC_RUN_ID", ""))
    if torchrun.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun hosts the store. It is unknown whether several nodes share a key file, so the
        # user's key is used only if it was set explicitly.
        shared = me.local_world_size == me.world_size or read_environment(
            "RANVIER_KEY", "RANVIER_KEY_FILE"
        )
        key = user_key() if shared else context[2]
        store = open_tcp_store(me.address, me.port, timeout_seconds)
        return with_prefix(derive_prefix(key, *context), store)
    prefix = derive_prefix(user_key(), *context)
    if me.rank == 0:
        listener = open_listener(me.address, me.port)
    else:
        listener = None
    store = open_tcp_store(me.address, me.port, timeout_seconds, listener=listener)
    store = with_prefix(prefix, store)
    check_same_key(store, me.rank == 0, f"{me.address}:{me.port}")
    return store


def check_same_key(store: Any, first: bool, where: str) -> None:
    """Checks early that rank 0 has the same key; otherwise all ranks would wait for nothing."""
    if first:
        store.set(HELLO_KEY, "1")
        return
    try:
        store.wait([HELLO_KEY], datetime.timedelta(seconds=HELLO_SECONDS))
    except RuntimeError:
        raise CommunicationError(
            f"The process that listens on {where} does not have the key of this process. "
            "All ranks of a run must have the same key. Set RANVIER_KEY to the same text on all "
            "nodes, and check that no other program listens there."
        ) from None

"""The store of ranks: who listens where, who finds which keys, and what a stranger can do."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ranvier import launch
from ranvier.errors import CommunicationError, PlanError, UnsafeInputError
from ranvier.launch import Heartbeat, NodeInfo, ProcessInfo, RestartPolicy, rendezvous, store
from ranvier.launch.environment import interface_towards

KEY = "0123456789abcdef" * 4


def listening() -> list[tuple[str, int]]:
    """Address and port of each TCP socket at which this process listens."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with_target = Path(f"/proc/self/fd/{name}")
        if with_target.is_symlink():
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(with_target)))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                host, _, port = words[1].partition(":")
                parts = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
                packed = struct.pack(f"={len(parts)}I", *parts)
                found.append((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


def is_local(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _meeting(folder: Path, me: ProcessInfo) -> int:
    """Join the others, look around; rank 1 of the first attempt is killed."""
    from torch import distributed

    Heartbeat(me.heartbeat_file).begin_section("step", me.attempt)
    with launch.join_process_group(me, "gloo", 60.0):
        group = distributed.new_group([0, 1], use_local_synchronization=True)
        distributed.barrier(group)
        assert me.store_file is not None and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        own = ("efcount/", "leanup/")  # of torch: how many have the file open
        keys = [
            key for key in store.open_file_store(me.store_file, 5.0).list_keys() if key not in own
        ]
        assert keys and all(key.startswith(f"{me.store_prefix}/") for key in keys), keys
        assert re.fullmatch("[0-9a-f]{64}", me.store_prefix) and me.store_prefix not in repr(me)
        places = listening()
        assert places and all(is_local(address) for address, _ in places), places
        (folder / f"{me.attempt}.{me.rank}").write_text(me.store_prefix)
        distributed.barrier(group)
    if me.attempt == 0 and me.rank == 1:
        os.kill(os.getpid(), 9)
    return 0


def test_local_ranks_listen_on_the_loopback_only_and_share_a_secret(tmp_path: Path) -> None:
    """Also after a restart, whose store knows nothing of the one before."""
    policy = RestartPolicy(max_restarts=2, grids=(("data=2", 2),))
    task = partial(_meeting, tmp_path)
    assert launch.launch_ranks(2, task, preload=["torch"], policy=policy) == 0
    keys = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert keys["0.0"] == keys["0.1"] != keys["1.0"] == keys["1.1"]
    assert not listening(), "the launcher has no port"


@pytest.fixture
def port() -> int:
    return launch.find_free_port()


def ranks(port: int) -> list[ProcessInfo]:
    return [ProcessInfo(rank, 2, rank, 2, port=port, launcher="srun") for rank in range(2)]


def met(port: int, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stores of two ranks that have these keys."""
    stores = []
    for me, key in zip(ranks(port), keys, strict=True):
        monkeypatch.setenv("RANVIER_KEY", key)
        stores.append(store.open_store(me, 10.0))
    return stores


def test_ranks_of_another_launcher_meet_under_a_prefix(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = met(port, [KEY, KEY], monkeypatch)
    first.set("name", "value")
    assert second.get("name") == b"value"
    assert listening() == [("127.0.0.1", port)]
    stranger = store.open_tcp_store("127.0.0.1", port, 5.0)
    for key in ("name", "default_pg/name", "attempt0/name"):
        stranger.set(key, "forged")
    assert second.get("name") == b"value"
    prefixes = {key.rpartition("/")[0] for key in stranger.list_keys() if "forged" not in key}
    assert KEY not in str(prefixes), "the key itself is never sent"


def test_ranks_with_different_keys_are_told_so(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "HELLO_SECONDS", 0.2)
    with pytest.raises(CommunicationError, match="does not have the key of this process"):
        met(port, [KEY, KEY[::-1]], monkeypatch)


def test_torchruns_own_store_is_used_under_a_prefix(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = store.open_tcp_store("", 0, 5.0, listener=store.open_listener("127.0.0.1", port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    first, second = met(port, [KEY, KEY], monkeypatch)
    first.set("name", "value")
    assert second.get("name") == b"value"
    assert [re.sub("[0-9a-f]{64}", "prefix", key) for key in agent.list_keys()] == ["prefix/name"]
    monkeypatch.delenv("RANVIER_KEY")
    apart = [ProcessInfo(rank, 2, 0, 1, port=port, launcher="torchrun") for rank in range(2)]
    first, second = (store.open_store(me, 5.0) for me in apart)
    first.set("name", "other")
    assert second.get("name") == b"other", "nodes agree without a key, by the id of the run"


def test_launchers_of_nodes_believe_only_what_is_signed(port: int) -> None:
    boards: list[rendezvous.RendezvousStore] = []

    def join(node: int) -> None:
        boards.append(rendezvous.RendezvousStore(NodeInfo(2, node, f"localhost:{port}"), KEY, 10.0))

    second = threading.Thread(target=join, args=(1,))
    second.start()
    join(0)
    second.join()
    boards[0].write_text("order/0", "words")
    assert boards[1].read_text("order/0") == "words" and boards[1].read_text("order/1") is None
    assert all(is_local(address) for address, _ in listening())
    stranger = store.open_tcp_store("127.0.0.1", port, 5.0)
    name = next(key for key in stranger.list_keys() if key.endswith("order/0"))
    signed = stranger.get(name).decode()
    for text in ("forged", signed + "forged", "f" * 64 + "words", "\udcff"):
        stranger.set(name, text.encode(errors="surrogateescape"))
        assert boards[1].read_text("order/0") is None
    stranger.set(name.replace("order/0", "order/1"), signed)
    assert boards[1].read_text("order/1") is None, "a text belongs to its name"


def test_a_listener_is_where_it_was_asked_for_and_keeps_its_port() -> None:
    with store.open_listener("127.0.0.1") as listener:
        address, port = listener.getsockname()
        assert listening() == [(address, port)]
        with pytest.raises(CommunicationError) as error:
            store.open_listener("127.0.0.1", port)
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in str(error.value)
        host = store.open_tcp_store("", 0, 5.0, listener=listener)
        assert host.port == port
    for address in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(CommunicationError, match=f"cannot listen on {address}"):
            store.open_listener(address, port)


def test_where_to_listen_may_differ_from_where_others_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANVIER_LISTEN", "127.0.0.1")
    with store.open_listener("203.0.113.7") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_interfaces_are_found_by_the_address_they_lead_to() -> None:
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"
    assert interface_towards("no.such.host.invalid") == ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no way out of this machine")
    assert interface_towards("192.0.2.1") in [name for _, name in socket.if_nameindex()]


def test_a_key_of_the_user_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANVIER_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(store.user_key())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = tmp_path / "ranvier/key"
    assert len(found) == 8 and {*found} == {path.read_text().strip()} and len(found[0]) == 64
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    with pytest.raises(UnsafeInputError, match="chmod 600"):
        store.user_key()
    monkeypatch.setenv("RANVIER_KEY_FILE", str(tmp_path))
    with pytest.raises(UnsafeInputError, match="not a regular file"):
        store.user_key()
    monkeypatch.setenv("RANVIER_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(PlanError, match="cannot be read"):
        store.user_key()
    monkeypatch.setenv("RANVIER_KEY", f" {KEY}\n")
    assert store.user_key() == KEY
    monkeypatch.setenv("RANVIER_KEY", "short")
    with pytest.raises(PlanError, match=r"RANVIER_KEY has 5 characters\..*openssl rand") as error:
        store.user_key()
    assert "short" not in str(error.value)


def test_a_name_of_this_node_alone_is_told(capfd: pytest.CaptureFixture[str], port: int) -> None:
    assert rendezvous.is_hidden_loopback("node01", "127.0.1.1")
    assert not rendezvous.is_hidden_loopback("localhost", "127.0.0.1")
    assert not rendezvous.is_hidden_loopback("node01", "192.0.2.5")

"""The filter of system calls decides as its table says, on every machine that it knows."""

from __future__ import annotations

import errno
import re
import struct
from functools import cache
from pathlib import Path

import pytest

from ranvier.eval.code.seccomp import (
    ALLOW,
    AND,
    AUDIT_ARCHITECTURES,
    EQUAL,
    ERRNO,
    GREATER,
    KILL_PROCESS,
    LOAD,
    NEWEST_CALL,
    REFUSED_CALLS,
    RETURN,
    build_filter,
)

SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199), "riscv64": (198, 199)}
"""Numbers of socket and socketpair, as other sources have them."""


@cache
def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter of a machine: what to do, two distances to jump, a constant."""
    program = build_filter(machine)
    assert program is not None and len(program) // 8 < 4096
    return list(struct.iter_unpack("=HBBI", program))


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would do with a call: the filter, interpreted."""
    program = instructions(machine)
    arguments += (0,) * (6 - len(arguments))
    architecture = AUDIT_ARCHITECTURES[machine] if architecture is None else architecture
    shown = struct.pack("=IIQ6Q", number, architecture, 0, *(a & (1 << 64) - 1 for a in arguments))
    place, value = 0, 0
    while True:
        kind, yes, no, constant = program[place]
        place += 1
        if kind == RETURN:
            return int(constant)
        if kind == LOAD:
            value = struct.unpack_from("=I", shown, constant)[0]
        elif kind == AND:
            value &= constant
        else:
            holds = value == constant if kind == EQUAL else value > constant
            assert kind in (EQUAL, GREATER)
            place += yes if holds else no


@pytest.mark.parametrize("machine", AUDIT_ARCHITECTURES)
def test_refused_calls_get_their_error(machine: str) -> None:
    for refusal in REFUSED_CALLS:
        number = refusal.x86_64 if machine == "x86_64" else refusal.generic
        if number is None:
            continue
        if not refusal.allowed_if and not refusal.refused_if:
            assert verdict(machine, number) == ERRNO | refusal.error, refusal
        for tests in refusal.allowed_if:
            good = [0] * 6
            for argument, _, value in tests:
                good[argument] = value
            assert verdict(machine, number, *good) == ALLOW, refusal
            for argument, mask, value in tests:
                bad = list(good)
                bad[argument] = value ^ (mask & -mask)
                others = [o for o in refusal.allowed_if if all(bad[a] & m == v for a, m, v in o)]
                if not others:
                    assert verdict(machine, number, *bad) == ERRNO | refusal.error, refusal
        for tests in refusal.refused_if:
            bad = [0] * 6
            for argument, _, value in tests:
                bad[argument] = value
            assert verdict(machine, number, *bad) == ERRNO | refusal.error, refusal
            assert verdict(machine, number) == ALLOW, refusal


@pytest.mark.parametrize("machine", AUDIT_ARCHITECTURES)
def test_sockets_are_pairs_of_streams(machine: str) -> None:
    one, two = SOCKETS[machine]
    refused = ERRNO | errno.EACCES
    assert all(
        verdict(machine, one, domain, kind) == refused for domain in range(99) for kind in (1, 2)
    )
    flags = 0o2000000 | 0o4000  # close on exec, do not block
    for domain in (0, 1, 2, 10, 16, 17, 38, 40, 1 << 31):
        for kind in range(16):
            allowed = domain == 1 and kind in (1, 5)
            for word in (kind, kind | flags):
                assert (verdict(machine, two, domain, word) == ALLOW) == allowed, (domain, kind)


@pytest.mark.parametrize("machine", AUDIT_ARCHITECTURES)
def test_other_numberings_are_refused(machine: str) -> None:
    for number in (NEWEST_CALL + 1, 512, 1 << 30, (1 << 30) + 41, (1 << 32) - 1):
        assert verdict(machine, number) == ERRNO | errno.ENOSYS
    for other in {0x40000003, 0x40000028, *AUDIT_ARCHITECTURES.values()} - {
        AUDIT_ARCHITECTURES[machine]
    }:
        assert verdict(machine, 1, architecture=other) == KILL_PROCESS  # 32 bits; other machines
    known = {r.x86_64 if machine == "x86_64" else r.generic for r in REFUSED_CALLS}
    for number in sorted(set(range(NEWEST_CALL + 1)) - known)[::7]:
        assert verdict(machine, number) == ALLOW


def test_other_machines_have_no_filter() -> None:
    assert build_filter("ppc64le") is None


@pytest.mark.parametrize(
    ("path", "column"),
    [
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "x86_64"),
        ("/usr/include/asm-generic/unistd.h", "generic"),
    ],
)
def test_numbers_are_those_of_the_kernel(path: str, column: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"{path} is not installed")
    lines = re.findall(r"#define __NR_(\w+)\s+(\d+)", Path(path).read_text())
    numbers = {name: int(value) for name, value in lines}
    assert len(numbers) > 250
    for refusal in REFUSED_CALLS:
        if refusal.name in numbers:
            assert getattr(refusal, column) == numbers[refusal.name], refusal
    assert len({r.name for r in REFUSED_CALLS}) == len(REFUSED_CALLS)

"""Every transport goes through the one suite of `moshpit.transport.conformance`."""

from __future__ import annotations

import asyncio
import socket

import pytest

from moshpit.transport.conformance import CHECKS
from tests.transport.benches import MemoryBench, TcpBench, run


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


BENCHES = {
    "tcp-sealed": (TcpBench, {}),
    "tcp-plain": (TcpBench, {"sealed": False}),
    "tcp-ipv6": (TcpBench, {"host": "::1"}),
    "stripes-sealed": (TcpBench, {"stripes": 4}),
    "stripes-plain": (TcpBench, {"sealed": False, "stripes": 4}),
    "uvloop-sealed": (TcpBench, {}),
    "uvloop-plain": (TcpBench, {"sealed": False}),
    "uvloop-stripes": (TcpBench, {"stripes": 4}),
    "memory": (MemoryBench, {}),
}


@pytest.mark.parametrize("kind", BENCHES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(kind: str, check) -> None:
    if kind == "tcp-ipv6" and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    make, options = BENCHES[kind]

    async def work() -> None:
        bench = make(**options)
        try:
            await check(bench)
        finally:
            await bench.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work, uvloop=kind.startswith("uvloop"))

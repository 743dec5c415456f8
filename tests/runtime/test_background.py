"""The network's thread takes no processor from training but its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from moshpit.runtime.background import NetworkThread


async def threads() -> int:
    torch.ones(1 << 18).add_(1.0)
    return torch.get_num_threads()


def test_the_network_computes_in_one_thread_and_leaves_the_trainers_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    network = NetworkThread("test")
    try:
        assert network.call(threads()) == 1
        assert torch.get_num_threads() == 3
        torch.ones(1 << 18).add_(1.0)
        assert network.call(threads()) == 1
    finally:
        network.stop()
        torch.set_num_threads(before)


DAEMON = """
import os, sys
{closing}
import moshpit
from moshpit.identity.tickets import RunKey
ticket = RunKey.generate().invite().ticket(()).encode()
with (
    moshpit.join(ticket, listen="127.0.0.1:0", identity="new") as first,
    moshpit.join(ticket, listen="127.0.0.1:0", identity="new") as second,
):
    for swarm in (first, second):
        null = os.path.samestat(os.stat(os.devnull), os.fstat({number}))
        os.write({out}, b"null " if null else b"something else ")
os.write({out}, b"done")
"""


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_a_daemon_without_standard_streams_is_a_peer(closed: tuple[int, ...]) -> None:
    """Sockets would take the numbers of what is closed, and libuv abort as it closes them."""
    reading, writing = os.pipe()
    try:
        out = 20  # far from those that are closed
        closing = f"os.dup2({writing}, {out}); os.closerange({min(closed)}, {max(closed) + 1})"
        script = DAEMON.format(closing=closing, out=out, number=closed[-1])
        done = subprocess.run(
            [sys.executable, "-c", script],
            pass_fds=(writing,),
            check=False,
            timeout=100,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == b"null null done", done.stderr
    assert done.returncode == 0

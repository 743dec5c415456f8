"""What `moshpit doctor` finds out about a peer: does it answer, let this machine in, how far is it.

Nothing here sends more than a few small messages. Bandwidth between two machines is not
measured: that would cost the other's owner what it measures.
"""

from __future__ import annotations

import socket
import time

from moshpit.cli.checks import Check, Status
from moshpit.cli.netchecks import DIAL_S
from moshpit.cli.parse import human_s
from moshpit.cli.visit import visit
from moshpit.config import preset
from moshpit.errors import RemoteError
from moshpit.identity.tickets import Ticket
from moshpit.types import Address, short

DIALS = 3
FAR_S = 0.3  # guess: beyond it, the `internet` preset's time-outs begin to be short

_ADVICE = {
    "other-run": "somebody else's run listens there: check the address, or ask for a new ticket",
    "other-version": "install the same version of moshpit on both machines",
    "not-admitted": "ask whoever runs the training for a ticket",
    "expired": "ask for a new ticket; if it should be valid, compare the two machines' clocks",
    "not-moshpit": "something else listens there: check the address",
    "full": "it has as many connections as it may; try another peer",
    "silent": "its process hangs or is stopped; look at that machine",
}


def check_dial(address: Address) -> Check:
    """Whether somebody accepts TCP connections at an address, and how long that takes."""
    subject = f"dial {address}"
    times: list[float] = []
    for _ in range(DIALS):
        start = time.perf_counter()
        try:
            socket.create_connection((address.host, address.port), timeout=DIAL_S).close()
        except TimeoutError:
            return Check(
                subject, Status.FAIL, f"no answer within {DIAL_S:g} s",
                "a firewall or router drops it: open the port there; "
                "docs/howto/behind-a-router.md",
            )  # fmt: skip
        except ConnectionRefusedError:
            return Check(
                subject, Status.FAIL, "refused: the machine is up, but nobody listens there",
                "start that peer with --listen at this port, or check the port",
            )  # fmt: skip
        except OSError as error:
            return Check(subject, Status.FAIL, str(error), "check the name and the network")
        times.append(time.perf_counter() - start)
    best = min(times)
    if best > FAR_S:
        return Check(subject, Status.WARN, f"connects in {human_s(best)}", "use --preset internet")
    return Check(subject, Status.OK, f"connects in {human_s(best)}")


def check_visit(ticket: Ticket, address: Address) -> Check:
    """Whether the peer at an address lets a holder of the ticket in, and how fast it answers."""
    subject = f"visit {address}"
    try:
        found = visit(ticket, [address], preset("internet"))
    except RemoteError as error:
        advice = _ADVICE.get(error.reason, "see that machine's log for its side of it")
        return Check(subject, Status.FAIL, str(error), advice)
    times = sorted(found.round_trips_s)
    return Check(
        subject,
        Status.OK,
        f"peer {short(found.host)} lets you in ({human_s(found.dial_s)}) and answers in "
        f"{human_s(times[0])} to {human_s(times[-1])}; it knows {len(found.records)} peers",
    )

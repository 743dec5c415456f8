"""What `moshpit doctor` finds out about a peer: does it answer, let this machine in, how far is it,
what does its clock show, how fast is the way to it, and can it dial this machine.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec

from moshpit.cli.checks import Check, Status
from moshpit.cli.consult import Consultation, consult
from moshpit.cli.netchecks import DIAL_S
from moshpit.cli.parse import human_bytes, human_s
from moshpit.cli.visit import visit
from moshpit.config import RoundConfig, preset
from moshpit.errors import RemoteError
from moshpit.identity.tickets import EXPIRY_LEEWAY_S, Ticket
from moshpit.runtime.helpdesk import is_loopback
from moshpit.types import Address, short

DIALS = 3
FAR_S = 0.3  # guess: beyond it, the `internet` preset's time-outs begin to be short
CLOCK_S_MAX = 2.0  # guess: beyond it, no time service is at work


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
    found, figures = f"connects in {human_s(best)}", {"connect_s": best}
    if best > FAR_S:
        return Check(subject, Status.WARN, found, "use --preset internet", figures)
    return Check(subject, Status.OK, found, figures=figures)


def check_visit(ticket: Ticket, address: Address) -> Check:
    """Whether the peer at an address lets a holder of the ticket in, and how fast it answers."""
    subject = f"visit {address}"
    try:
        found = visit(ticket, [address], preset("internet"))
    except RemoteError as error:
        advice = error.remedy or "see that machine's log for its side of it"
        return Check(subject, Status.FAIL, str(error), advice)
    times = sorted(found.round_trips_s)
    return Check(
        subject,
        Status.OK,
        f"peer {short(found.host)} lets you in ({human_s(found.dial_s)}) and answers in "
        f"{human_s(times[0])} to {human_s(times[-1])}; it knows {len(found.records)} peers",
        figures={
            "peer": found.host.hex(),
            "dial_s": found.dial_s,
            "round_trips_s": found.round_trips_s,
            "peers": len(found.records),
        },
    )


def check_consultation(
    ticket: Ticket, address: Address, listen: Address, advertise: Address | None
) -> Iterator[Check]:
    """Ask the peer at an address for its clock, measure the way to it, have it dial back."""
    config = preset("internet").transport
    try:
        found = consult(ticket, address, config, listen=listen, advertise=advertise)
    except RemoteError as error:
        advice = error.remedy or "see that machine's log for its side of it"
        yield Check("consultation", Status.FAIL, str(error), advice)
        return
    yield judge_clock(found)
    yield judge_bandwidth(found)
    yield judge_reachability(found)


def judge_clock(found: Consultation) -> Check:
    """Whether the two machines' clocks agree well enough for tickets that expire."""
    subject, offset = "peer's clock", found.clock_offset_s
    figures = {"clock_offset_s": offset, "round_trip_s": found.round_trip_s}
    way = "ahead of" if offset > 0 else "behind"
    said = f"{human_s(abs(offset))} {way} this machine's (round trip {human_s(found.round_trip_s)})"
    if abs(offset) <= CLOCK_S_MAX:
        return Check(subject, Status.OK, said, figures=figures)
    advice = (
        "training works with any clock; tickets expire by it, with a leeway of "
        f"{human_s(EXPIRY_LEEWAY_S)}"
    )
    if abs(offset) > EXPIRY_LEEWAY_S:
        advice += ", which this exceeds: start a time service on the machine that is wrong"
    return Check(subject, Status.WARN, said, advice, figures)


def judge_bandwidth(found: Consultation) -> Check:
    """Whether the way to the peer is fast enough to train over."""
    figures = {"up_bytes_per_s": found.up, "down_bytes_per_s": found.down}
    said = (
        f"{human_bytes(found.up)}/s to the peer, {human_bytes(found.down)}/s from it: "
        "a lower bound, measured over the control connection"
    )
    slow = min(found.up, found.down)
    if slow < RoundConfig().bandwidth_floor:
        advice = (
            "average less often (a larger samples_per_epoch), and say how slow it is: "
            f"moshpit.join(bandwidth_mbit={slow * 8 / 1e6:.2g})"
        )
        return Check("bandwidth", Status.WARN, said, advice, figures)
    return Check("bandwidth", Status.OK, said, figures=figures)


def judge_reachability(found: Consultation) -> Check:
    """Whether the peer can dial this machine, and where."""
    subject, who = "reachability", short(found.host)
    figures: dict[str, object] = {
        "seen_at": found.seen,
        "advertised": [str(a) for a in found.advertised],
        "dials": [msgspec.structs.asdict(dial) for dial in found.dials],
    }
    if found.not_listening:
        advice = "choose another --listen, or another port"
        return Check(subject, Status.WARN, f"not tested: {found.not_listening}", advice, figures)
    if not found.dials:
        said = f"not tested: {who} has been asked too often"
        return Check(subject, Status.WARN, said, "try again in a minute", figures)
    reached = [Address(d.host, d.port) for d in found.dials if d.outcome == "reached"]
    if not reached:
        said, advice = _unreached(found)
        return Check(subject, Status.WARN, said, advice, figures)
    said = f"{who} can dial this machine at {', '.join(map(str, reached))}"
    if is_loopback(found.seen):
        said += "; both are on one machine: ask a peer on another one, too"
    elif not any(address in found.leads_to for address in reached):
        advice = (
            f"run with --advertise {reached[0]}: otherwise others are told "
            f"{', '.join(map(str, found.advertised)) or 'nothing'}, which does not lead here"
        )
        return Check(subject, Status.WARN, said, advice, figures)
    return Check(subject, Status.OK, said, figures=figures)


def _unreached(found: Consultation) -> tuple[str, str]:
    """Return what was tried in vain, and what to do."""
    tried = [d for d in found.dials if d.outcome != "foreign"]
    who = short(found.host)
    if not tried:
        said = f"{who} sees this machine at {found.seen or 'no address'}, and dials nothing else"
        return said, "give the address that leads here with --advertise"
    said = f"{who} cannot dial this machine: " + "; ".join(
        f"{Address(d.host, d.port)} {d.outcome}" + (f" ({d.detail})" if d.detail else "")
        for d in tried
    )
    port = tried[0].port
    client = "or join with --role client, which needs no way in; docs/howto/behind-a-router.md"
    if all(d.outcome == "no-handshake" for d in tried):
        return (
            said,
            f"somebody else answers there: forward TCP port {port} to this machine, {client}",
        )
    return said, (
        f"open TCP port {port} in this machine's firewall and forward it in its router (a fixed "
        "port, --listen 0.0.0.0:7000; --advertise if it is another one outside), " + client
    )

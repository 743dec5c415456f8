"""`moshpit doctor`: is this machine fit to be a peer, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from moshpit.cli import output
from moshpit.cli.checks import LOCAL_CHECKS, Check, Status
from moshpit.cli.netchecks import (
    check_congestion_control,
    check_ipv6,
    check_listening,
    check_loopback,
    check_sealing,
)
from moshpit.cli.peerchecks import check_consultation, check_dial, check_visit
from moshpit.identity.tickets import Ticket
from moshpit.types import Address

_STYLE = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="The address that this peer is going to listen at."),
    ] = "0.0.0.0:0",
    ticket: Annotated[
        str | None,
        typer.Option(
            metavar="TICKET",
            help="Also visit this run: does it let me in, do the clocks agree, how fast is the way "
            "to it, and can its peer dial this machine?",
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The peer to dial, instead of the ticket's addresses. Without a ticket, only to "
            "see that somebody listens there.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address at which others are to dial this machine, if it differs.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print a list of findings as JSON instead.")
    ] = False,
) -> None:
    """Check this machine, and a run if you like, and say what to do.

    Looks at versions, cores, memory, limits, the clock, the port to listen at, IPv6,
    congestion control and the speed of encryption. With a ticket it also asks the first peer
    that lets it in: for its clock, for about a second of echoes, and to dial this machine back.
    It does not join the run. Each line is **ok**, **warn** (it works,
    but worse than it could) or **fail** (mend this first). The exit code is 1 if anything failed.

    **Examples**

        moshpit doctor
        # can that port be used?
        moshpit doctor --listen 0.0.0.0:7000
        # can this run be reached, and does it let me in?
        moshpit doctor --ticket $T
        # can a peer outside dial this machine through its router?
        moshpit doctor --ticket $T --listen 0.0.0.0:7000 --advertise my.home.example:7000
    """  # fmt: skip
    results: list[Check] = []
    console = output.stdout()
    admitted = None if ticket is None else Ticket.decode(ticket)
    remote = None if peer is None else Address.parse(peer)
    outside = None if advertise is None else Address.parse(advertise)
    for check in all_checks(Address.parse(listen), admitted, remote, outside):
        results.append(check)
        if not json:
            show(console, check)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(results)).decode())
    failed = sum(check.status is Status.FAIL for check in results)
    warned = sum(check.status is Status.WARN for check in results)
    if not json:
        console.print(verdict(failed, warned), markup=False)
    raise typer.Exit(1 if failed else 0)


def all_checks(
    listen: Address, ticket: Ticket | None, peer: Address | None, advertise: Address | None
) -> Iterator[Check]:
    """Yield one finding after the other, as they come."""
    for look in LOCAL_CHECKS:
        yield look()
    yield check_listening(listen)
    yield check_ipv6()
    yield check_congestion_control()
    yield check_loopback()
    yield check_sealing()
    addresses = (peer,) if peer is not None else ticket.addresses if ticket is not None else ()
    consulted = False
    for address in addresses:
        dialled = check_dial(address)
        yield dialled
        if ticket is None or dialled.status is Status.FAIL:
            continue
        visited = check_visit(ticket, address)
        yield visited
        if visited.status is not Status.FAIL and not consulted:
            consulted = True
            yield from check_consultation(ticket, address, listen, advertise)


def show(console: Console, check: Check) -> None:
    """Print one finding, and below it what to do."""
    console.print(f"{check.status:<4}", style=_STYLE[check.status], end="  ")
    console.print(f"{check.subject:<12} {check.found}", markup=False, soft_wrap=True)
    if check.advice:
        console.print(f"      → {check.advice}", style="dim", markup=False, soft_wrap=True)


def verdict(failed: int, warned: int) -> str:
    """Return the last line.

    >>> verdict(0, 0)
    'This machine is fit to be a peer.'
    """
    if failed:
        return f"Not yet: {failed} thing(s) to mend first."
    if warned:
        return f"This machine is fit to be a peer; {warned} thing(s) could be better."
    return "This machine is fit to be a peer."

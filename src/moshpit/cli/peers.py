"""`moshpit peers`: who is in a run, as one of its peers sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from moshpit.cli import output
from moshpit.cli.parse import human_bytes
from moshpit.cli.visit import Visit, visit
from moshpit.config import SwarmConfig, preset
from moshpit.errors import ConfigError, HandshakeError, UnreachableError, printable
from moshpit.identity.tickets import Ticket
from moshpit.types import Address, short
from moshpit.wire.messages import PeerRecord

PATIENCE_S = 3.0  # guess: ten round trips to the other side of the world


def peers(
    ticket: Annotated[
        str, typer.Option(metavar="TICKET", help="Admits to a run: from `moshpit ticket new`.")
    ],
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Whom to ask, instead of the ticket's addresses; may be "
            "repeated: the first that answers counts.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON instead.")] = False,
) -> None:
    """Show who is in a run.

    Dials one peer, asks what it knows, and leaves; the run does not count on the visitor.
    The answer is that peer's view, which may lag behind another's by a second or two.

    **Examples**

        moshpit peers --ticket $T
        # ask another peer than those in the ticket
        moshpit peers --ticket $T --at 10.0.0.7:7000
        # addresses of all that are up
        moshpit peers --ticket $T --json \\
            | jq -r '.peers[] | select(.state == "up") | .addresses[0] // empty'
    """  # fmt: skip
    admitted = Ticket.decode(ticket)
    addresses = [Address.parse(a) for a in at] if at else admitted.addresses
    if not addresses:
        raise ConfigError("the ticket names nobody to ask; say an address with --at")
    try:
        found = visit(admitted, addresses, hasty(preset("internet")))
    except HandshakeError as error:
        if error.reason != "handshake-timeout":
            raise
        detail = (
            f"it takes calls, but has not answered within {PATIENCE_S:g} s "
            "(--at HOST:PORT asks another peer)"
        )
        raise UnreachableError(error.peer, "silent", detail) from error
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(as_data(found))).decode())
    else:
        show(found)


def hasty(config: SwarmConfig) -> SwarmConfig:
    """Return settings for somebody who looks at the screen: a peer that hangs is soon named."""
    transport = replace(config.transport, dial_timeout_s=PATIENCE_S, handshake_timeout_s=PATIENCE_S)
    return replace(config, transport=transport)


def state_of(record: PeerRecord, found: Visit) -> str:
    """Return what the host thinks of a peer: up, suspected, dead or left."""
    if record.left:
        return "left"
    for suspicion in found.suspicions:
        if suspicion.peer == record.peer and suspicion.incarnation >= record.incarnation:
            return "dead" if suspicion.dead else "suspected"
    return "up"


def as_data(found: Visit) -> dict[str, object]:
    """Return what was found, for programs."""
    return {
        "asked": found.host.hex(),
        "peers": [
            {
                "peer": r.peer.hex(),
                "short": short(r.peer),
                "state": state_of(r, found),
                "role": r.role,
                "epoch": r.epoch,
                "samples": r.samples,
                "samples_per_s": r.rate,
                "addresses": [str(Address(*a)) for a in r.addresses],
                "up_bytes_per_s": r.up or None,
                "down_bytes_per_s": r.down or None,
            }
            for r in found.records
        ],
    }


def show(found: Visit) -> None:
    """Print the table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("peer", "state", "role"):
        table.add_column(name, no_wrap=True)
    for name in ("epoch", "samples/s", "bandwidth"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("address", overflow="fold")
    for r in found.records:
        bandwidth = min(r.up, r.down)
        table.add_row(
            short(r.peer) + ("*" if r.peer == found.host else ""),
            state_of(r, found),
            printable(r.role),
            str(r.epoch),
            f"{r.rate:.1f}",
            f"{human_bytes(bandwidth)}/s" if bandwidth else "?",
            printable(str(Address(*r.addresses[0]))) if r.addresses else "none",
        )
    output.stdout().print(table)
    up = sum(state_of(r, found) == "up" for r in found.records)
    output.explain(f"{up} up, as {short(found.host)} (*) at {found.address} sees it.")

"""`moshpit ticket`: make a run, and the invitations to it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from moshpit.cli import output
from moshpit.cli.parse import duration_s, human_s
from moshpit.errors import ConfigError, printable
from moshpit.identity.keys import state_dir
from moshpit.identity.tickets import RunKey, Ticket
from moshpit.runtime.record import advertised
from moshpit.types import Address, Role, short

DEFAULT_ADDRESS = "127.0.0.1:7000"

ticket_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Make runs, and tickets that admit peers to them.

A *ticket* is one word. Whoever has it may join the run, so treat it as a password: send it by
a private channel. It carries an invite that your run key has signed, and whom to dial first.
The run key itself stays in its file and is needed only to make more tickets.
""",
)


@ticket_app.command()
def new(
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Whom to dial first; may be repeated. Any peers that stay up will do: none is "
            f"special later. Without it: {DEFAULT_ADDRESS}, for processes on this machine.",
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The run key. An existing one makes another invite to its run. Without it: a new "
            "run, its key kept under your state directory.",
        ),
    ] = None,
    roles: Annotated[
        str, typer.Option(metavar="ROLES", help="What its holders may be, separated by commas.")
    ] = "worker,client,aux",
    expires: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long it admits new peers (12h, 7d, 2w, never). Peers that are in stay in.",
        ),
    ] = "never",
) -> None:
    """Make a run, or another invite to one, and print the ticket.

    The ticket alone goes to stdout, what it means to stderr.

    **Examples**

        # for processes on this machine
        T=$(moshpit ticket new)
        # for other machines; keep the key to make more tickets
        moshpit ticket new --address my.host:7000 --keys run.key
        # for a friend, who cannot be dialled
        moshpit ticket new --keys run.key --roles client --expires 7d
    """
    allowed = parse_roles(roles)
    expires_at = parse_expiry(expires)
    addresses = tuple(dialable(a) for a in address or [DEFAULT_ADDRESS])
    key, path, made = run_key(keys)
    ticket = key.invite(allowed, expires_at).ticket(addresses)
    kept = f"its key is in {path}, for you only" if made else f"by the key in {path}"
    output.explain(f"{'New run' if made else 'Another ticket to run'} {short(key.run)}; {kept}.")
    output.explain(describe(ticket))
    if not address:
        output.explain(
            f"It works on this machine only, where the first peer runs with --listen "
            f"{DEFAULT_ADDRESS}. For others: --address HOST:PORT of a peer that they can dial."
        )
    typer.echo(ticket.encode())


@ticket_app.command()
def show(
    ticket: Annotated[str, typer.Argument(metavar="TICKET")],
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON instead.")] = False,
) -> None:
    """Say what a ticket admits to, for whom and until when. Its secret stays hidden.

    **Example**

        moshpit ticket show $T
    """
    read = Ticket.decode(ticket)
    if not json:
        typer.echo(f"run        {short(read.run)}\n{describe(read)}")
        return
    fields = {
        "run": read.run.hex(),
        "roles": [str(role) for role in read.roles],
        "expires_at": read.expires_at or None,
        "addresses": [str(a) for a in read.addresses],
    }
    typer.echo(msgspec.json.encode(fields).decode())


def dialable(text: str) -> Address:
    """Read an address that others are to dial; raises `ConfigError`."""
    address = Address.parse(text)
    if address.port == 0:
        raise ConfigError(f"address {address}: others cannot dial port 0")
    if address.wildcard:
        here = ", ".join(map(str, advertised((address,))))
        raise ConfigError(
            f"address {address}: a peer can listen there, but nobody can dial it. Name the address "
            f"by which the others reach that peer; if it is this machine, one of {here}"
        )
    return address


def parse_roles(text: str) -> tuple[Role, ...]:
    """Read roles separated by commas; raises `ConfigError`.

    >>> [str(role) for role in parse_roles("client, aux")]
    ['client', 'aux']
    """
    try:
        found = tuple(Role(word.strip().lower()) for word in text.split(","))
    except ValueError as error:
        choices = ", ".join(Role)
        raise ConfigError(f"roles {text!r}: choose from {choices}, separated by commas") from error
    return tuple(dict.fromkeys(found))


def parse_expiry(text: str) -> int:
    """Return Unix seconds for a length of time from now; 0 for ``never``."""
    if text.strip().lower() == "never":
        return 0
    seconds = duration_s(text)
    if seconds == 0:
        raise ConfigError("--expires 0: a ticket that is over at once; write never if you mean it")
    return int(time.time()) + seconds


def run_key(path: Path | None) -> tuple[RunKey, Path, bool]:
    """Return the run key of a file, made if there is none, the file, and whether it was made."""
    if path is not None and path.exists():
        return RunKey.load(path), path, False
    key = RunKey.generate()
    if path is None:
        path = state_dir(key.run) / "run.key"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key.save(path)
    return key, path, True


def describe(ticket: Ticket) -> str:
    """Return what a ticket says, in lines."""
    if ticket.expires_at:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ticket.expires_at))
        left = ticket.expires_at - time.time()
        expiry = f"{when} ({'in ' + human_s(left) if left > 0 else 'over'})"
    else:
        expiry = "never"
    dials = ", ".join(printable(str(address)) for address in ticket.addresses)
    return (
        f"roles      {', '.join(ticket.roles)}\n"
        f"expires    {expiry}\n"
        f"dials      {dials or 'nobody: say an address'}"
    )

"""`moshpit.join`: from a ticket to a running peer."""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import cast, get_args

from moshpit.config import Schedule, SwarmConfig
from moshpit.config import preset as settings_of
from moshpit.errors import ConfigError, TicketError
from moshpit.identity.keys import KeySigner, PeerKey, peer_key, state_dir
from moshpit.identity.tickets import Ticket
from moshpit.runtime.ambient import JoinSettings, resolve
from moshpit.runtime.reach import Reach
from moshpit.runtime.swarm import Swarm
from moshpit.runtime.upnp import PortMapper
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address, Role, RunId, short

log = logging.getLogger("moshpit")

ANYWHERE = Address("0.0.0.0", 0)
NEW_IDENTITY = "new"
MBIT = 125_000.0
"""Bytes per second in one Mbit/s."""


def join(
    ticket: str | Ticket | None = None,
    *,
    role: Role | str | None = None,
    listen: str | None = None,
    advertise: str | None = None,
    preset: str | None = None,
    config: SwarmConfig | None = None,
    group_size: int | None = None,
    schedule: str | None = None,
    plaintext: bool | None = None,
    identity: str | Path | None = None,
    bandwidth_mbit: float | None = None,
    upnp: bool | None = None,
) -> Swarm:
    """Join a run and return this process's peer in it.

    What is not given is taken from `moshpit run`, if the script was started by it.

    Args:
        ticket: the run's ticket, as `moshpit ticket new` prints it.
        role: ``"worker"`` (the default) trains and can be dialled; ``"client"`` trains behind
            a router; ``"aux"`` only reduces.
        listen: ``host:port`` to listen at; by default a free port of all interfaces.
        advertise: ``host:port`` at which others can dial this peer, if it differs.
        preset: ``"local"``, ``"lan"`` (the default) or ``"internet"``.
        config: settings in full, instead of a preset.
        group_size: how many peers average in one group.
        schedule: ``"auto"`` (the default), ``"torus"`` or ``"grid"``: how a swarm larger than a
            group averages; the same for all peers of a run.
        plaintext: do not encrypt bulk data. Keys and admission are proved all the same.
        identity: the file that keeps this peer's key; made if it does not exist. By default
            a file for this run in the user's state directory; ``"new"`` keeps none.
        bandwidth_mbit: this machine's link, the slower of up and down, in Mbit/s.
        upnp: ask the router to let others in (needs ``pip install 'moshpit[upnp]'``). A worker
            that nobody can dial becomes a client by itself.

    Raises:
        ConfigError: no ticket, or an argument that makes no sense; ``upnp`` without its package.
        TicketError: the ticket is cut, altered, expired or does not allow the role.
        LocalError: the address to listen at cannot be had.

    Example:
        >>> import torch
        >>> from moshpit.identity.tickets import RunKey
        >>> ticket = RunKey.generate().invite().ticket(()).encode()
        >>> with join(ticket, listen="127.0.0.1:0", identity="new") as swarm:
        ...     [mean], report = swarm.average([torch.tensor([1.0, 3.0])])
        >>> mean, report.outcome.value  # alone in its run
        (tensor([1., 3.]), 'complete')
    """
    said = JoinSettings(
        ticket=ticket.encode() if isinstance(ticket, Ticket) else ticket,
        role=None if role is None else _role(role),
        listen=listen,
        advertise=advertise,
        preset=preset,
        plaintext=plaintext,
        identity=None if identity is None else Path(identity),
        upnp=upnp,
    )
    settings = resolve(said)
    if settings.ticket is None:
        raise ConfigError(
            "no ticket: pass one to moshpit.join(), or start the script with "
            "`moshpit run --ticket T script.py`; `moshpit ticket new` makes one"
        )
    admitted = Ticket.decode(settings.ticket)
    config = _config(config, settings, group_size, schedule)
    role = settings.role or Role.WORKER
    if role not in admitted.roles:
        allowed = ", ".join(r.value for r in admitted.roles)
        raise TicketError(
            f"this ticket does not allow the role {role.value}, only {allowed}; "
            "ask whoever holds the run's key for another one"
        )
    given = _advertise(settings.advertise, role)
    mapper = _mapper(settings, role)
    key = _key(settings.identity, admitted.run)
    admission = admitted.admit(key.peer)
    joined: list[Swarm] = []
    transport = TcpTransport(
        key,
        admitted.run,
        admission,
        config.transport,
        listen=_listen(settings.listen, role),
        known=lambda peer: any(swarm.knows(peer) for swarm in joined),
    )
    if not config.transport.sealed:
        log.warning(
            "PLAINTEXT: tensors travel unencrypted and unprotected from change on the way; "
            "only for networks in which you trust every machine"
        )
    swarm = Swarm(
        KeySigner(key, admitted.run),
        role,
        admission,
        transport,
        config,
        contacts=admitted.addresses,
        reach=Reach(transport, config, given=given, mapper=mapper),
        bandwidth=(bandwidth_mbit or 0.0) * MBIT,
    )
    joined.append(swarm)
    log.info(
        "this is peer %s of run %s, role %s, %s",
        *(short(swarm.peer_id), short(swarm.run_id), role.value),
        "at " + ", ".join(map(str, swarm.addresses)) if swarm.addresses else "not to be dialled",
    )
    _leave_on_sigterm()
    return swarm


def _role(role: Role | str) -> Role:
    try:
        return Role(role)
    except ValueError:
        raise ConfigError(f"role {role!r}: choose worker, client or aux") from None


def _listen(text: str | None, role: Role) -> Address | None:
    if role is Role.CLIENT:
        if text is not None:
            raise ConfigError("a client cannot be dialled, so it does not listen; drop `listen`")
        return None
    return ANYWHERE if text is None else Address.parse(text)


def _mapper(settings: JoinSettings, role: Role) -> PortMapper | None:
    if not settings.upnp:
        return None
    if role is Role.CLIENT:
        raise ConfigError("a client cannot be dialled, so no port leads to it; drop `upnp`")
    return PortMapper()


def _advertise(text: str | None, role: Role) -> tuple[Address, ...]:
    if text is None:
        return ()
    if role is Role.CLIENT:
        raise ConfigError("a client cannot be dialled, so it has no address; drop `advertise`")
    address = Address.parse(text)
    if address.port == 0 or address.wildcard:
        raise ConfigError(f"advertise {text!r}: others cannot dial that; give host:port")
    return (address,)


def _config(
    config: SwarmConfig | None,
    settings: JoinSettings,
    group_size: int | None,
    schedule: str | None,
) -> SwarmConfig:
    if config is not None and settings.preset is not None:
        raise ConfigError("give either a preset or a config, not both")
    config = config or settings_of(settings.preset or "lan")
    if settings.plaintext:
        config = replace(config, transport=replace(config.transport, sealed=False))
    if group_size is not None:
        limit = config.matchmaking.group_size_limit
        if not 2 <= group_size < limit:
            raise ConfigError(f"group_size {group_size}: choose 2 to {limit - 1}")
        config = replace(config, matchmaking=replace(config.matchmaking, group_size=group_size))
    if schedule is not None:
        if schedule not in get_args(Schedule):
            raise ConfigError(f"schedule {schedule!r}: choose {', '.join(get_args(Schedule))}")
        wanted = replace(config.matchmaking, schedule=cast(Schedule, schedule))
        config = replace(config, matchmaking=wanted)
    return config


def _key(identity: Path | None, run: RunId) -> PeerKey:
    if identity is None:
        return peer_key(state_dir(run))
    if str(identity) == NEW_IDENTITY:
        return PeerKey.generate()
    if identity.exists():
        return PeerKey.load(identity)
    key = PeerKey.generate()
    key.save(identity)
    return key


def _leave_on_sigterm() -> None:
    """Make SIGTERM end the interpreter in the ordinary way, so that `Swarm.close` runs.

    Only where nobody has asked for another treatment of the signal.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

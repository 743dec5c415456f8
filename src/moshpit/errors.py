"""Every error that Moshpit raises, in one tree.

The first question about a failure is whose it is. `RemoteError` names the peer that broke
a rule and says which; `LocalError` is about this process, its arguments or its machine.
The messages say what happened, to which peer, and what to do about it.
"""

from __future__ import annotations

from typing import Final

_REMEDIES: Final = {
    "closing": "it is leaving the run: dial another peer",
    "expired": "ask for a new ticket; if it should be valid, compare the two machines' clocks",
    "full": "it has as many connections as it may: dial another peer",
    "handshake-timeout": "its process hangs or is stopped, or the network is slow: look at that "
    "machine, or use --preset internet",
    "not-admitted": "ask whoever runs the training for a ticket",
    "not-moshpit": "something else listens there: check the address",
    "other-run": "somebody else's run listens there: check the address, or ask for a new ticket",
    "other-version": "install the same version of moshpit on both machines",
    "plaintext-mismatch": "start all peers of a run with --plaintext, or none",
    "refused": "start a peer with --listen at this address, or check the port",
    "self-dial": "give the address of another peer",
    "silent": "its process hangs, is stopped or very busy: look at that machine",
    "unreachable": "check the name, the network and the firewalls: `moshpit doctor`",
}


def printable(text: str) -> str:
    r"""Return a text from elsewhere as one line that does nothing to a log or a terminal.

    >>> print(printable("all good\n12:00:00 peer-dead \x1b[2J"))
    all good\n12:00:00 peer-dead \x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class MoshpitError(Exception):
    """The root of all errors that Moshpit raises.

    Example:
        >>> issubclass(RemoteError, MoshpitError), issubclass(LocalError, MoshpitError)
        (True, True)
    """


class LocalError(MoshpitError):
    """Something about this process: its arguments, its files, its machine, its state."""


class RemoteError(MoshpitError):
    """Another peer broke a rule of the protocol.

    Attributes:
        peer: who did it, in the short form that logs use, or the address if nothing
            better is known yet.
        reason: a short, stable code such as ``"non-finite"``; tests and metrics use it.
        detail: the rest of the message. What the peer itself said is in it in printable form.
    """

    def __init__(self, peer: str, reason: str, detail: str = "") -> None:
        self.peer = printable(peer)
        self.reason = reason
        self.detail = printable(detail)
        super().__init__(f"peer {self.peer}: {reason}" + (f": {self.detail}" if detail else ""))

    @property
    def told(self) -> str:
        """The message without its reason, for a notice that has it as its code."""
        return f"{self.peer}: {self.detail}" if self.detail else self.peer

    @property
    def remedy(self) -> str:
        """What somebody who wanted to talk to this peer can do; empty if nothing is known."""
        return _REMEDIES.get(self.reason, "")


class TicketError(LocalError):
    """A ticket that cannot be used: cut, altered, expired, or of another version."""


class ConfigError(LocalError):
    """An argument or setting that makes no sense, with the values that would."""


class KeyInUseError(LocalError):
    """Another process uses this peer's key; two of one name would harm each other's averages."""

    def __init__(self) -> None:
        super().__init__(
            "another process uses this peer's key, so this one is refused: end that process, or "
            "give this one a key of its own: `moshpit run --identity new`, or "
            'moshpit.join(identity="new"); another file for each process does as well'
        )


class ClosedError(LocalError):
    """The swarm was closed; nothing can be asked of it any more."""


class WaitTimeoutError(LocalError, TimeoutError):
    """What was waited for did not come in time; says how far it came, and what to look at."""


class LayoutError(LocalError):
    """Tensors that do not match what this swarm averages (shapes, dtypes, count)."""


class DriftError(LocalError):
    """This peer's parameters are not the swarm's any more, and the strategy needs them to be."""


class StateError(LocalError):
    """A saved or received training state that cannot be used: cut, altered, or of another model."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))  # it may have names that somebody else chose


class AdmissionError(RemoteError):
    """A peer without a valid admission to this run, or one that could not prove its key."""


class HandshakeError(RemoteError):
    """The handshake broke a rule: swapped certificate, replay, wrong version, time-out."""


class WireError(RemoteError):
    """Bytes that are not a message of this protocol: too long, cut, wrong type."""


class SealError(RemoteError):
    """A bulk chunk failed its tag: altered, reordered, replayed or cut on the way."""


class UnreachableError(RemoteError):
    """A peer could not be dialled, or its connection was lost and did not come back."""


class PeerLostError(RemoteError):
    """A peer whose parcel was waited for is dead, or has left."""

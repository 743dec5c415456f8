"""The run's first addresses: dialled at the start, and again while nobody else is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, final

from moshpit.errors import KeyInUseError, MoshpitError, RemoteError
from moshpit.events import Notice
from moshpit.transport.base import Transport
from moshpit.types import Address

RETRY_S: Final = 3.0  # guess: how often the ticket's addresses are tried while alone
RETRY_FIRST_S: Final = 0.2  # guess: the first pause; the others often start at the same time
DUPLICATE: Final = "duplicate-key"
REFUSED_FOR_GOOD: Final = frozenset(
    {"other-version", "other-run", "not-admitted", "expired", "plaintext-mismatch"}
)


@final
class Contacts:
    """Dials the ticket's addresses. Used in the network's loop only.

    Args:
        transport: dials.
        tell: whom to tell what went wrong.
        addresses: from the ticket.
    """

    def __init__(
        self, transport: Transport, tell: Callable[[Notice], None], addresses: Sequence[Address]
    ) -> None:
        self._transport = transport
        self._tell = tell
        self._addresses = addresses
        self._failed: dict[Address, None] = {}
        self._task: asyncio.Task[None] | None = None

    async def begin(self, alone: Callable[[], bool], doubled: Callable[[], None]) -> None:
        """Dial all, and go on trying while nobody else is known.

        Args:
            alone: whether that is so.
            doubled: called when one of them says later that another process uses the key.

        Raises:
            RemoteError: all of them refused this peer, for a reason that will not go away.
            KeyInUseError: one of them says that another process uses this peer's key.
        """
        errors = await self._dial()
        if _doubled(errors):
            raise KeyInUseError
        if len(errors) == len(self._addresses):
            for error in errors:
                if isinstance(error, RemoteError) and error.reason in REFUSED_FOR_GOOD:
                    error.add_note(error.remedy)
                    raise error
        self._task = asyncio.get_running_loop().create_task(self._keep(alone, doubled))

    async def close(self) -> None:
        """Stop trying."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _dial(self) -> list[MoshpitError]:
        """Dial the addresses; return what went wrong."""
        dials = [self._transport.dial(address) for address in self._addresses]
        results = await asyncio.gather(*dials, return_exceptions=True)
        errors: list[MoshpitError] = []
        for address, result in zip(self._addresses, results, strict=True):
            if isinstance(result, MoshpitError):
                errors.append(result)
                if address not in self._failed and not _doubled([result]):
                    self._failed[address] = None
                    detail = f"{result}; trying again until somebody is found"
                    self._tell(Notice("contact-failed", None, detail))
            elif isinstance(result, BaseException):
                raise result
        return errors

    async def _keep(self, alone: Callable[[], bool], doubled: Callable[[], None]) -> None:
        """While nobody else is known, go on trying: the first peer may just not be up yet."""
        pause_s = RETRY_FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S)
            if alone() and _doubled(await self._dial()):
                doubled()


def _doubled(errors: Sequence[MoshpitError]) -> bool:
    return any(isinstance(e, RemoteError) and e.reason == DUPLICATE for e in errors)

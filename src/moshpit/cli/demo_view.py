"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from moshpit.cli.demo_messages import Epoch
from moshpit.cli.parse import human_bytes, human_s

_REFRESHES_PER_S = 4


@dataclass
class Row:
    """What is known of one peer."""

    name: str
    peer: str = ""
    state: str = "starting"
    last: Epoch | None = None


class View(Protocol):
    """Shows how it goes. A context manager, since a live table takes over the terminal."""

    def __enter__(self) -> View: ...

    def __exit__(self, *error: object) -> None: ...

    def say(self, text: str) -> None:
        """Show one line that stays."""
        ...

    def changed(self, row: Row) -> None:
        """Show a peer's new state."""
        ...


class PlainView:
    """One line for each epoch of each peer."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs
        self._shown: dict[str, int] = {}

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Print it."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(self, row: Row) -> None:
        """Print a line if the peer has ended another epoch."""
        last = row.last
        if last is None or self._shown.get(row.name) == last.epoch:
            return
        self._shown[row.name] = last.epoch
        self.say(
            f"{row.name} ({row.peer})  epoch {last.epoch}/{self._epochs}  loss {last.loss:.3f}  "
            f"{last.rate:.0f} samples/s  group of {len(last.group)}  "
            f"sent {human_bytes(last.bytes_sent)}  averaging {human_s(last.averaging_s)}"
        )


class LiveView:
    """A table with a row for each peer, redrawn a few times a second."""

    def __init__(self, console: Console, epochs: int, rows: list[Row]) -> None:
        self._rows = rows
        self._epochs = epochs
        self._live = Live(
            console=console, refresh_per_second=_REFRESHES_PER_S, get_renderable=self._table
        )

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print it above the table."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(self, row: Row) -> None:
        """The table reads the rows by itself."""

    def _table(self) -> Table:
        table = Table(title="moshpit demo", title_justify="left")
        for name in ("peer", "id", "state"):
            table.add_column(name)
        for name in ("epoch", "loss", "samples/s", "group", "sent", "averaging"):
            table.add_column(name, justify="right")
        for row in self._rows:
            last = row.last
            cells = [""] * 6
            if last is not None:
                cells = [
                    f"{last.epoch}/{self._epochs}",
                    f"{last.loss:.3f}",
                    f"{last.rate:.0f}",
                    f"{len(last.group)}",
                    human_bytes(last.bytes_sent),
                    human_s(last.averaging_s),
                ]
            style = {"killed": "red", "done": "green"}.get(row.state)
            table.add_row(row.name, row.peer, row.state, *cells, style=style)
        return table


def view_for(console: Console, epochs: int, rows: list[Row], *, plain: bool) -> View:
    """Return the live table where there is a terminal for it."""
    if plain or not console.is_terminal:
        return PlainView(console, epochs)
    return LiveView(console, epochs, rows)

"""The benchmark itself: peers and rivals are started, and average in turn, round by round."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moshpit.cli.bench_links import Links
from moshpit.cli.bench_processes import Event, Processes
from moshpit.cli.bench_rivals import MOSHPIT, command_of, environment
from moshpit.identity.tickets import RunKey
from moshpit.protocol import partition
from moshpit.types import Address

MB = 1 << 20
NUMBER_BYTES = 4
MBIT = 125_000.0
"""Bytes per second in one Mbit/s."""

_START_S = 300.0  # sixteen imports of PyTorch on a busy machine
_ROUND_S = 300.0
_ROUND_FACTOR = 30.0  # × the physical limit, on slow links
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured; see the options of the command."""

    peers: int
    group_size: int
    mb: float
    codec: str
    schedule: str
    in_place: bool
    plaintext: bool
    preset: str
    link_mbit: tuple[float, ...]
    told: bool
    loss_percent: float
    rounds: int
    warmup: int
    compare: tuple[str, ...]
    hivemind_python: Path | None

    @property
    def numel(self) -> int:
        """How many numbers the vector has."""
        return max(1, round(self.mb * MB / NUMBER_BYTES))

    @property
    def vector_bytes(self) -> int:
        """How many bytes it has, as float32."""
        return self.numel * NUMBER_BYTES

    @property
    def rival_rows(self) -> int:
        """The rows of the grid on which gloo averages; 1 where there is no full grid."""
        rows = math.ceil(self.peers / self.group_size)
        return rows if self.peers % rows == 0 and rows <= self.group_size else 1

    @property
    def limit_s(self) -> float | None:
        """The least time that the links allow (paper.md §3); None without shaped links.

        For equal links 2(N-1)/N · bytes / bandwidth. It counts float32, whatever the codec, and
        one group of all, since no schedule moves less.
        """
        if not self.link_mbit:
            return None
        speeds = [mbit * MBIT for mbit in self.link_mbit]
        parts = partition.fractions(speeds, [True] * self.peers)
        assert parts is not None
        return partition.seconds(speeds, parts, self.vector_bytes, min(speeds))


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One averaging by all processes of one engine.

    Attributes:
        seconds: of the slowest process, from the word to its mean.
        meeting_s, moving_s: of the same process, by its report; Moshpit only.
        cpu_s: user and system, of all processes.
        extra_bytes: the most memory that a process held above what it had with the tensor
            alone, before the first averaging; the worst process.
        bytes_sent: payload, of the process that sent most; Moshpit only.
        error: the largest difference from the true mean, relative to its largest number.
        problems: what the reports say beside "complete".
    """

    seconds: float
    meeting_s: float | None
    moving_s: float | None
    cpu_s: float
    extra_bytes: int | None
    bytes_sent: int | None
    error: float
    problems: list[str] = []


Say = Callable[[str], None]


def measure(plan: Plan, say: Say) -> dict[str, list[Round]]:
    """Run the whole benchmark.

    Args:
        plan: what to measure.
        say: is told what goes on.

    Returns:
        The measured rounds of each engine, Moshpit first.

    Raises:
        LocalError: a process ended or hung, or the links could not be made.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moshpit-bench-")))
        links = None
        if plan.link_mbit:
            say(f"making {plan.peers} links")
            links = stack.enter_context(Links(plan.link_mbit, loss_percent=plan.loss_percent))
        processes = stack.enter_context(Processes())
        crews: list[_Crew] = []
        for engine in (MOSHPIT, *plan.compare):
            say(f"starting {plan.peers} processes of {engine}")
            crew = _Crew(engine, plan, processes, links)
            crew.gather(folder)
            crews.append(crew)
        for number in range(plan.warmup):
            for crew in crews:
                say(f"warm-up {number + 1} of {plan.warmup}: {crew.engine}")
                crew.average(number)
        measured: dict[str, list[Round]] = {crew.engine: [] for crew in crews}
        for number in range(plan.rounds):
            for crew in crews:
                say(f"round {number + 1} of {plan.rounds}: {crew.engine}")
                measured[crew.engine].append(crew.average(plan.warmup + number))
        say("ending")
        processes.leave()
        return measured


class _Crew:
    """The processes of one engine."""

    def __init__(self, engine: str, plan: Plan, processes: Processes, links: Links | None) -> None:
        self.engine = engine
        self._plan = plan
        self._hosts = links.hosts if links is not None else [_LOOPBACK] * plan.peers
        command = command_of(engine, plan.hivemind_python)
        variables = environment(shaped=links is not None)
        self._members = [
            processes.start(
                f"{engine} {index}",
                [*(links.prefix(index) if links is not None else ()), *command],
                variables,
            )
            for index in range(plan.peers)
        ]

    def gather(self, folder: Path) -> None:
        """Bring them together: the first says where it listens, the others dial it."""
        deadline = time.monotonic() + _START_S
        first, others = self._members[0], self._members[1:]
        invite = RunKey.generate().invite()

        def assign(index: int, addresses: list[str]) -> None:
            known = tuple(Address.parse(a) for a in addresses) if self.engine == MOSHPIT else ()
            self._assign(index, folder, addresses, invite.ticket(known).encode())

        if self.engine == "gloo":
            for index in range(len(self._members)):
                assign(index, [])
        else:
            assign(0, [])
            addresses = first.expect("listening", deadline)["addresses"]
            for index in range(1, len(self._members)):
                assign(index, addresses)
            for member in others:
                member.expect("listening", deadline)
        self._all("joined", deadline)

    def _assign(self, index: int, folder: Path, contacts: list[str], ticket: str) -> None:
        plan = self._plan
        self._members[index].tell(
            engine=self.engine,
            index=index,
            peers=plan.peers,
            numel=plan.numel,
            host=self._hosts[index],
            contacts=contacts,
            rows=plan.rival_rows,
            meeting_file=str(folder / self.engine),
            ticket=ticket,
            preset=plan.preset,
            in_place=plan.in_place,
            plaintext=plan.plaintext,
            group_size=plan.group_size,
            codec=plan.codec,
            schedule=plan.schedule,
            bandwidth_mbit=plan.link_mbit[index] if plan.link_mbit and plan.told else None,
        )

    def _all(self, kind: str, deadline: float) -> list[Event]:
        return [member.expect(kind, deadline) for member in self._members]

    def _tell_all(self, **fields: object) -> None:
        for member in self._members:
            member.tell(**fields)

    def average(self, number: int) -> Round:
        """Let all average once, from a common start, and see what came of it."""
        deadline = time.monotonic() + max(_ROUND_S, _ROUND_FACTOR * (self._plan.limit_s or 0.0))
        self._tell_all(do="fill", round=number)
        self._all("filled", deadline)
        self._tell_all(do="go")
        done = self._all("done", deadline)
        self._tell_all(do="check")  # now, since a peer may still serve others after its own end
        checked = self._all("checked", deadline)
        slowest = max(done, key=lambda event: event["seconds"])
        extra = [event["extra_bytes"] for event in checked]
        sent = [event["bytes_sent"] for event in done if "bytes_sent" in event]
        return Round(
            seconds=slowest["seconds"],
            meeting_s=slowest.get("meeting_s"),
            moving_s=slowest.get("moving_s"),
            cpu_s=sum(event["cpu_s"] for event in checked),
            extra_bytes=None if self.engine == "hivemind" or None in extra else max(extra),
            bytes_sent=max(sent, default=None),
            error=max(event["error"] for event in checked),
            problems=self._problems(done),
        )

    def _problems(self, done: list[Event]) -> list[str]:
        return [
            f"{member.name}: {event['outcome']}, groups of {event['groups']}"
            + (f", refused {', '.join(event['blames'])}" if event["blames"] else "")
            for member, event in zip(self._members, done, strict=True)
            if event.get("outcome", "complete") != "complete"
        ]

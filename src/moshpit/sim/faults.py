"""What goes wrong: the scenario's faults at their times, and random churn.

Faults act on the world through its few levers (`Levers`): start, kill, pause, resume, and the
attributes of hosts. Every random choice is made when the fault strikes, from its own generator.
"""

from __future__ import annotations

import math
import random
from typing import Protocol

from moshpit.sim.process import Host, Process
from moshpit.sim.scenario import Churn, Fault, Range
from moshpit.sim.schedule import Schedule
from moshpit.wire.messages import GroupKey


class Levers(Protocol):
    """What faults can do to the world."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def top_epoch(self) -> int: ...
    def living(self) -> list[Process]: ...
    def new_host(self) -> Host: ...
    def start(self, host: Host, *, same_key: bool) -> None: ...
    def kill(self, process: Process, *, dark: bool) -> None: ...
    def leave(self, process: Process) -> None: ...
    def pause(self, process: Process) -> None: ...
    def resume(self, process: Process, seconds: float) -> None: ...
    def corrupt(self, process: Process, how: str) -> None: ...
    def separate(self, hosts: list[Host], number: int) -> None: ...
    def unite(self, number: int) -> None: ...
    def note(self, text: str) -> None: ...


class Faults:
    """Strikes when it is time.

    Attributes:
        pending: how many faults have not struck or not ended yet.
        healed_epoch: the swarm's epoch when the last one so far ended.
        healed_s: and the time.
    """

    def __init__(
        self, faults: tuple[Fault, ...], churn: Churn | None, rng: random.Random, world: Levers
    ) -> None:
        self._world = world
        self._rng = rng
        self._churn = churn
        self._waiting = list(faults)
        self._numbers = 0
        self.pending = len(faults)
        self.healed_epoch = 0
        self.healed_s = 0.0
        for fault in faults:
            if fault.at_s is not None:
                self._waiting.remove(fault)
                world.schedule.at(fault.at_s, self._strike, fault)

    def epoch_reached(self, epoch: int) -> None:
        """The first peer works on this epoch."""
        self._trigger("work", epoch)

    def group_formed(self, key: GroupKey) -> None:
        """A group of this key has formed."""
        if self._waiting:
            self._trigger("column" if key.span else "round", key.epoch)

    def _trigger(self, moment: str, epoch: int) -> None:
        for fault in tuple(self._waiting):
            if fault.moment == moment and fault.at_epoch is not None and fault.at_epoch <= epoch:
                self._waiting.remove(fault)
                self._strike(fault, None)

    # --- scripted faults ------------------------------------------------------------------

    def _strike(self, fault: Fault, _: None) -> None:
        world, now = self._world, self._world.schedule.now
        if fault.kind == "join":
            count = fault.count or 1
            self.pending += count - 1
            for _number in range(count):
                world.schedule.at(now + self._draw(fault.after_s), self._join, fault)
            return
        victims = self._victims(fault)
        if fault.kind == "partition":
            world.schedule.at(now + self._draw(fault.after_s), self._part, fault, victims)
            return
        self.pending += len(victims) - 1
        for victim in victims:
            world.schedule.at(now + self._draw(fault.after_s), self._hit, fault, victim)

    def _draw(self, span: Range) -> float:
        return self._rng.uniform(*span)

    def _victims(self, fault: Fault) -> list[Process]:
        living = self._world.living()
        if fault.hosts is not None:
            return [process for process in living if process.host.index in fault.hosts]
        if fault.kind == "corrupt":  # somebody who has something to send
            living = [process for process in living if process.role.trains]
        count = fault.count or max(1, round(len(living) * (fault.share or 0.0)))
        return self._rng.sample(living, min(count, len(living)))

    def _ended(self) -> None:
        self.pending -= 1
        self.healed_epoch = self._world.top_epoch
        self.healed_s = self._world.schedule.now

    def _join(self, fault: Fault, _: None) -> None:
        self._world.start(self._world.new_host(), same_key=False)
        self._ended()

    def _hit(self, fault: Fault, victim: Process) -> None:
        world = self._world
        lasts = self._draw(fault.for_s) if fault.for_s is not None else None
        if not victim.alive or (fault.kind == "pause" and victim.paused):
            self._ended()
            return
        world.note(f"{fault.kind} {victim.name}" + (f" for {lasts:.3f} s" if lasts else ""))
        host = victim.host
        match fault.kind:
            case "crash" | "restart":
                world.kill(victim, dark=fault.dark)
            case "leave":
                world.leave(victim)
            case "pause":
                world.pause(victim)
            case "slow":
                host.slow *= fault.factor
            case "bandwidth":
                host.up *= fault.factor
                host.down *= fault.factor
            case "loss":
                host.loss = fault.loss
            case "corrupt":
                world.corrupt(victim, fault.how)
            case "partition" | "join":
                raise AssertionError("handled by _strike")
        if lasts is None:
            self._ended()
        else:
            undo = (fault, victim, lasts)
            world.schedule.at(world.schedule.now + lasts, self._undo, undo)

    def _undo(self, what: tuple[Fault, Process, float], _: None) -> None:
        fault, victim, lasts = what
        world, host = self._world, victim.host
        world.note(f"{fault.kind} {victim.name} is over")
        match fault.kind:
            case "restart":
                host.dark = False
                world.start(host, same_key=not fault.new_key)
            case "crash":
                host.dark = False
            case "pause":
                world.resume(victim, lasts)
            case "slow":
                host.slow /= fault.factor
            case "bandwidth":
                host.up /= fault.factor
                host.down /= fault.factor
            case "loss":
                host.loss = 0.0
            case "corrupt":
                world.corrupt(victim, "")
            case "leave" | "partition" | "join":
                pass
        self._ended()

    def _part(self, fault: Fault, victims: list[Process]) -> None:
        assert fault.for_s is not None, "checked by the scenario"
        self._numbers += 1
        number, lasts = self._numbers, self._draw(fault.for_s)
        names = " ".join(victim.name for victim in victims)
        self._world.note(f"partition {number}: {names} cut off for {lasts:.3f} s")
        self._world.separate([victim.host for victim in victims], number)
        self._world.schedule.at(self._world.schedule.now + lasts, self._heal, number)

    def _heal(self, number: int, _: None) -> None:
        self._world.note(f"partition {number} heals")
        self._world.unite(number)
        self._ended()

    # --- churn ----------------------------------------------------------------------------

    def born(self, process: Process) -> None:
        """A process has started; draw how long it lives."""
        churn = self._churn
        if churn is None:
            return
        life = -math.log(1.0 - self._rng.random()) * churn.half_life_s / math.log(2.0)
        schedule = self._world.schedule
        schedule.at(schedule.now + life, self._expire, process)

    def _expire(self, process: Process, _: None) -> None:
        churn, world = self._churn, self._world
        assert churn is not None, "only churn schedules deaths"
        if not process.alive or process.leaving or self._churn_is_over(churn):
            return
        if len(world.living()) <= 2:
            return
        self.pending += 1
        if self._rng.random() < churn.leave_share:
            world.note(f"churn: {process.name} leaves")
            world.leave(process)
        else:
            dark = self._rng.random() < churn.dark_share
            world.note(f"churn: {process.name} dies" + (" with its machine" if dark else ""))
            world.kill(process, dark=dark)
        back = world.schedule.now + self._draw(churn.rejoin_s)
        world.schedule.at(back, self._replace, process.host)

    def _churn_is_over(self, churn: Churn) -> bool:
        late = churn.until_s is not None and self._world.schedule.now >= churn.until_s
        epoch = churn.until_epoch
        return late or (epoch is not None and self._world.top_epoch >= epoch)

    def _replace(self, host: Host, _: None) -> None:
        churn = self._churn
        assert churn is not None, "only churn replaces"
        host.dark = False
        if host.process is None:
            same_key = self._rng.random() >= churn.new_key_share
            self._world.note(f"churn: host {host.index} is back")
            self._world.start(host, same_key=same_key)
        self._ended()

"""Taking part without a say, while the swarm's state is on its way.

A state takes its time to arrive, and the swarm does not wait. `Listener` takes part in the
averagings meanwhile, with weight 0 (as a reducer it is of use to the others already), and
keeps their means. When the state is there, they are taken one after the other, as its donor
has done: so a peer can join a swarm whose epochs are shorter than a transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

import torch

from moshpit.events import EpochReport, Outcome
from moshpit.tensors.reduce import is_finite
from moshpit.training.averager import Averager, Averaging
from moshpit.training.strategies import Strategy

log = logging.getLogger("moshpit.training")

MEANS_MAX: Final = 32  # guess: vectors that are kept; who needs more is too slow for this swarm
LOOK_S: Final = 0.02  # guess: how late this peer may come to an averaging


@final
class Listener:
    """Keeps the means of averagings that this peer gives nothing to.

    Args:
        swarm: the swarm, to which this peer is attached.
        strategy: whose vectors are averaged; `Strategy.replays`.
    """

    def __init__(self, swarm: Averager, strategy: Strategy) -> None:
        self._swarm = swarm
        self._strategy = strategy
        self._under_way: Averaging | None = None
        self._means: dict[int, tuple[torch.Tensor, EpochReport]] = {}

    def look(self) -> None:
        """Begin an averaging if it is due, keep the mean of one that has ended; no wait."""
        if self._under_way is not None:
            if self._under_way.done():
                self._keep(self._under_way)
                self._under_way = None
        elif self._swarm.averaging_due:
            snapshot = self._strategy.snapshot()
            self._under_way = self._swarm.begin_averaging(
                snapshot.vector,
                0.0,
                codec=snapshot.codec,
                differences=snapshot.differences,
                in_place=snapshot.fill_s is None,
                exact_head=snapshot.exact_head,
                fill_s=snapshot.fill_s,
            )
            if snapshot.fill_s is not None:
                self._under_way.ready(0, snapshot.vector.numel())

    def settle(self, leave_if_asked: Callable[[], None]) -> None:
        """Wait for the averaging under way."""
        while self._under_way is not None:
            leave_if_asked()
            try:
                self._under_way.wait(LOOK_S)
            except TimeoutError:
                continue
            self.look()

    def replay(self, epoch: int) -> bool:
        """Take the means of an epoch and all later ones. False if one was missed: then the
        parameters are those of an epoch in between, and another state is needed."""
        strategy = self._strategy
        for at in range(epoch, self._swarm.epoch):
            mean, report = self._means.pop(at, (None, None))
            if mean is None or report is None:
                return False
            snapshot = strategy.snapshot()
            if not is_finite(mean):
                strategy.overflowed(snapshot)
            elif strategy.accepts(mean, report):
                strategy.adopt(snapshot, mean)
            else:
                strategy.keep_local(snapshot)
        strategy.taken_over()
        log.info("epoch %d came, and %d means since", epoch, self._swarm.epoch - epoch)
        return True

    def _keep(self, averaging: Averaging) -> None:
        report = averaging.report
        met = [r for r in report.rounds if len(r.peers) > 1]
        whole = met and not report.stale and not any(r.missing for r in met)
        if not whole or report.outcome is Outcome.FAILED:
            return
        self._means[report.epoch] = (averaging.mean, report)
        while len(self._means) > MEANS_MAX:
            del self._means[min(self._means)]

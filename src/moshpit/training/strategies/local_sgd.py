"""Average parameters: Moshpit SGD as the paper has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from moshpit.errors import ConfigError
from moshpit.tensors.codecs import codec_named
from moshpit.training.averager import Averager
from moshpit.training.strategies.adaptive_period import AdaComm, Period
from moshpit.training.strategies.base import (
    AUTO,
    Closure,
    Handle,
    Snapshot,
    Strategy,
    keep_positive,
)
from moshpit.training.tensors import Named, forget_nonfinite_statistics, statistics_of


@final
class LocalSGD(Strategy):
    r"""Every peer trains by itself, and every epoch the parameters are averaged (the paper's
    Moshpit SGD).

    The mean over peers is weighted by their samples, :math:`\bar\theta = \sum_i n_i \theta_i
    / \sum_i n_i`. It arrives while training goes on, and is applied as a difference,
    :math:`\theta \leftarrow \theta + \bar\theta - \theta_{\text{snapshot}}`, so that the steps
    made in between survive; where none was made, the mean itself is assigned.

    Args:
        samples_per_epoch: samples of all peers together between two averagings.
        average_statistics: also average what the optimizer keeps per parameter (momenta,
            second moments), in the same way. Step counts stay each peer's own.
        overlap: go on training while an averaging is under way; otherwise ``step()`` waits.
        codec: how this peer's parameters are written on the wire: ``"float32"``, ``"float16"``, or
            ``"auto"``, which takes one of these as the links ask for. Buffers and statistics
            are exact.
        adaptive_period: average rarely at first and often later (`AdaComm`), beginning with
            ``samples_per_epoch``. The loss comes from the closure given to ``step()``, or is said
            before it by `note_loss`.

    Raises:
        ConfigError: there is no such codec, or it suits differences only.

    Example:
        >>> LocalSGD(samples_per_epoch=4096).overlap
        True
    """

    name = "LocalSGD"

    def __init__(
        self,
        samples_per_epoch: float,
        *,
        average_statistics: bool = False,
        overlap: bool = True,
        codec: str = "float32",
        adaptive_period: AdaComm | None = None,
    ) -> None:
        super().__init__(samples_per_epoch, overlap=overlap, codec=codec)
        if codec != AUTO and codec_named(codec).differences_only:
            raise ConfigError(
                f"codec {codec!r} is too coarse for parameters: what a few steps change would be "
                "rounded away. DiLoCo exchanges differences, so it can use it; with "
                'LocalSGD, use "float16" or "auto"'
            )
        self.average_statistics = average_statistics
        self._steps_since_snapshot = 0
        self._stepped = False
        self._swarm: Averager | None = None
        self._noted: float | None = None
        self._period: Period | None = None
        if adaptive_period is not None:
            self._period = Period(adaptive_period, self.samples_per_epoch)
            self.name = "LocalSGD with AdaComm"

    def connect(self, handle: Handle) -> None:
        self._swarm = handle.swarm

    def note_loss(self, loss: float) -> None:
        """Say the mean loss of the batch that the next ``step()`` is about; only
        ``adaptive_period`` makes use of it."""
        self._noted = float(loss)

    @property
    def layout_known(self) -> bool:
        return self._stepped or not self.average_statistics

    @property
    def merges(self) -> bool:
        return True

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        before = self.samples
        loss = self._inner_step(closure, samples)
        if self._period is not None:
            noted = self._noted if self._noted is not None else loss
            if noted is None:
                raise ConfigError(
                    "adaptive_period needs the loss: give step() a closure that returns it, or "
                    "call strategy.note_loss(loss) before step()"
                )
            self._period.note(float(noted), self.samples - before)
            self._noted = None
        self._steps_since_snapshot += 1
        self._stepped = True
        return loss

    def snapshot(self) -> Snapshot:
        if self._period is not None:
            self._period.close()
        taken = self._collect(self.parameters())
        self._steps_since_snapshot = 0
        return taken

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        if self._period is not None:
            self._adapt(self._period, mean[0].item())
        extras = self._extras()
        layout = self._layouts.of(self._in_order(self.parameters()))
        same = self._steps_since_snapshot == 0 or snapshot.was_replaced_by(mean)
        if same or snapshot.nonfinite is not None:
            layout.write_back(mean)
        else:
            layout.add_delta(mean, snapshot.vector)
            keep_positive(extras, len(self._head()), snapshot.vector)
        if snapshot.nonfinite is not None:
            forget_nonfinite_statistics(self.inner, self.parameters())

    def keep_local(self, snapshot: Snapshot) -> None:
        """The local parameters simply stay."""

    def _head(self) -> list[Named]:
        return [] if self._period is None else [self._period.named()]

    def _adapt(self, period: Period, loss: float) -> None:
        """Tell the swarm how many samples the next epoch has."""
        self.samples_per_epoch = period.next(loss, float(self.inner.param_groups[0]["lr"]))
        if self._swarm is not None:
            self._swarm.attach(*self.layout(), self.samples_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {"stepped": self._stepped}
        if self._period is not None:
            own |= {
                "period": self._period.state_dict(),
                "samples_per_epoch": self.samples_per_epoch,
            }
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._stepped = bool(state["stepped"])
        if self._period is not None:
            self._period.load_state_dict(state["period"])
            self.samples_per_epoch = float(state["samples_per_epoch"])

    def _extras(self) -> list[Named]:
        extras = super()._extras()
        if self.average_statistics:
            if not self._stepped:
                raise ConfigError(
                    "average_statistics: the optimizer has no statistics before its first step"
                )
            extras += statistics_of(self.inner, self.parameters())
        return extras

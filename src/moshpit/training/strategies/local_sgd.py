"""Average parameters: Moshpit SGD as the paper has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from moshpit.errors import ConfigError
from moshpit.tensors.codecs import codec_named
from moshpit.training.strategies.base import AUTO, Closure, Snapshot, Strategy, keep_positive
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

    @property
    def layout_known(self) -> bool:
        return self._stepped or not self.average_statistics

    @property
    def merges(self) -> bool:
        return True

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        loss = self._inner_step(closure, samples)
        self._steps_since_snapshot += 1
        self._stepped = True
        return loss

    def snapshot(self) -> Snapshot:
        taken = self._collect(self.parameters())
        self._steps_since_snapshot = 0
        return taken

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        extras = self._extras()
        layout = self._layouts.of([*extras, *self.parameters()])
        same = self._steps_since_snapshot == 0 or snapshot.was_replaced_by(mean)
        if same or snapshot.nonfinite is not None:
            layout.write_back(mean)
        else:
            layout.add_delta(mean, snapshot.vector)
            keep_positive(extras, 0, snapshot.vector)
        if snapshot.nonfinite is not None:
            forget_nonfinite_statistics(self.inner, self.parameters())

    def keep_local(self, snapshot: Snapshot) -> None:
        """The local parameters simply stay."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "stepped": self._stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._stepped = bool(state["stepped"])

    def _extras(self) -> list[Named]:
        extras = super()._extras()
        if self.average_statistics:
            if not self._stepped:
                raise ConfigError(
                    "average_statistics: the optimizer has no statistics before its first step"
                )
            extras += statistics_of(self.inner, self.parameters())
        return extras

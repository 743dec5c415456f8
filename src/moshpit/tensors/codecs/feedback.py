r"""Error feedback: what a codec lost of a contribution is added to the next one.

In round t a peer sends :math:`C(x_t + e_t)` and keeps
:math:`e_{t+1} = x_t + e_t - C(x_t + e_t)`. The sum of what was sent then differs from the sum of
what was meant by one residual, however many rounds there are, and not by one error a round.

Who reduces a chunk encodes its mean, and knows what that loses. Divided by its own share of the
mass it is as if its own contribution had lost it, and becomes part of its residual (`reduced`).

The residual moves only when a round is over: within it, a chunk can be encoded again (for the next
reducer, when one dies) and gives the same bytes.

Source: Karimireddy et al. 2019, *Error Feedback Fixes SignSGD*; paper.md §8.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moshpit.errors import LayoutError
from moshpit.tensors.codecs.base import FLOAT_MAX, Codec, Payload
from moshpit.tensors.codecs.scratch import scratch
from moshpit.tensors.reduce import is_finite


class ErrorFeedback:
    """The residual of one peer's contributions to one vector.

    A round is: `encode` or `exact` for some chunks, each as often as needed, then `commit` or
    `rollback`. The values of a chunk must not change within the round. Whether what came of a
    round that was committed is used may be decided later: `undo` takes it back, `settle` does not.

    It needs as much memory as the vector, and from the first round as much again: results may
    overwrite the values while the round lasts, so that what was lost is computed at once.

    Args:
        numel: numbers in the vector.

    Example:
        >>> from moshpit.tensors.codecs.integer import Int8
        >>> feedback, codec = ErrorFeedback(2), Int8(3)
        >>> sent = []
        >>> for _ in range(5):
        ...     payload = feedback.encode(codec, slice(0, 2), torch.tensor([127.0, 0.4]))
        ...     sent.append(codec.decode(payload)[1].item())
        ...     feedback.commit()
        >>> sent
        [0.0, 1.0, 0.0, 1.0, 0.0]
    """

    def __init__(self, numel: int) -> None:
        self._residual = torch.zeros(numel)
        self._next: torch.Tensor | None = None
        self._mass = 0.0
        self._pending: dict[int, int] = {}
        self._committed: dict[int, int] = {}

    @property
    def residual(self) -> torch.Tensor:
        """What the rounds so far have lost, shape (numel,); to be read only."""
        return self._residual

    def encode(self, codec: Codec, place: slice, values: torch.Tensor) -> memoryview:
        """Return the payload of a chunk's values and residual.

        Args:
            codec: any; what it loses is kept.
            place: the chunk's place in the vector.
            values: the chunk's numbers, shape (stop - start,).

        Raises:
            ValueError: the values are not finite.
        """
        meant = self._meant(place, values, scratch("meant", values.numel()))
        payload = codec.encode(meant)
        after = self._after(place)
        codec.decode_into(payload, after)
        torch.sub(meant, after, out=after)
        # The payload may be a view of scratch memory.
        return memoryview(bytes(payload)) if codec.in_place else payload

    def exact(self, place: slice, values: torch.Tensor) -> torch.Tensor:
        """Return a chunk's values and residual, for a contribution that is not encoded (one's
        own, to the part that one reduces); nothing is lost of it. New memory, shape of values."""
        meant = self._meant(place, values, torch.empty(values.numel()))
        self._after(place).zero_()
        return meant

    def reduced(
        self, place: slice, mean: torch.Tensor, codec: Codec, payload: Payload, share: float
    ) -> None:
        """This peer has reduced a chunk: what its codec loses of the mean, which nobody else
        knows, goes into this peer's next contribution. After `exact`.

        Args:
            place: the chunk's place in the vector.
            mean: shape (stop - start,).
            codec: of the result.
            payload: the mean in it.
            share: of this peer's mass in that of the mean.
        """
        after = self._after(place)
        codec.decode_into(payload, after)
        torch.sub(mean, after, out=after)
        after.div_(share).clamp_(-FLOAT_MAX, FLOAT_MAX)

    def weigh(self, mass: float) -> None:
        """Say the mass of the next contributions: what earlier ones have lost was of another."""
        if self._mass not in (0.0, mass):
            self._residual.mul_(self._mass / mass).clamp_(-FLOAT_MAX, FLOAT_MAX)
        self._mass = mass

    def commit(self, left_out: Iterable[slice] = ()) -> None:
        """The round is over: keep what was lost.

        Args:
            left_out: the chunks for which this peer's contribution is not in the mean: their
                residuals stay what they were.
        """
        for place in left_out:
            self._pending.pop(place.start, None)
        self._swap(self._pending)
        self._committed, self._pending = self._pending, {}

    def undo(self) -> None:
        """Nobody uses what came of the round that was committed: the residual is again what it
        was before. Nothing to do if there was none since `settle`."""
        self._swap(self._committed)
        self._committed = {}

    def settle(self) -> None:
        """What was committed stands."""
        self._committed = {}

    def rollback(self) -> None:
        """The round came to nothing: everything stays as it was before."""
        self._pending.clear()

    def reset(self) -> None:
        """Forget all that was lost, and the round that is under way."""
        self._residual.zero_()
        self._mass = 0.0
        self._pending.clear()
        self._committed = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what the next rounds depend on; a copy. A round under way is not in it."""
        return {
            "residual": self._residual.clone(),
            "mass": torch.tensor(self._mass, dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state; a round under way is forgotten.

        Raises:
            LayoutError: it is of another vector.
        """
        residual = state.get("residual")
        if residual is None or residual.shape != self._residual.shape:
            raise LayoutError(f"no residual of {self._residual.numel()} numbers in this state")
        self._residual.copy_(residual)
        self._mass = float(state.get("mass", 0.0))
        self._pending.clear()
        self._committed = {}

    def _swap(self, places: dict[int, int]) -> None:
        """Exchange the residual and the next one, where it was made."""
        for start, stop in places.items():
            assert self._next is not None
            old, new = self._residual[start:stop], self._next[start:stop]
            kept = scratch("meant", stop - start).copy_(old)
            old.copy_(new)
            new.copy_(kept)

    def _meant(self, place: slice, values: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        if not is_finite(values):
            raise ValueError("values that are not finite have no residual")
        torch.add(values.detach(), self._residual[place], out=into)
        # The residual of numbers that saturate grows with each round.
        return into.clamp_(-FLOAT_MAX, FLOAT_MAX)

    def _after(self, place: slice) -> torch.Tensor:
        stop = self._pending.setdefault(place.start, place.stop)
        assert stop == place.stop, f"a chunk that begins at {place.start} ends twice"
        if self._next is None:
            self._next = torch.empty_like(self._residual)
        return self._next[place]

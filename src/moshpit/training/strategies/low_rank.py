r"""PowerSGD for `GradientAveraging`: two averagings make one step.

In the first, peers average :math:`P = M Q`, in the second :math:`Q = M^\top \hat P`
(`moshpit.tensors.powersgd`). Both use the same vector, as long as the longer of the two, so that
the swarm's schema stays one; they are two epochs of the swarm. The second follows at once and has
the same masses.

Theory of operation. A step is made of two means, and it is the same everywhere only if all who
give to the second have the whole mean of the first. So:

- Who has not got all of the mean of P makes nothing of it and gives no Q. As with every mean that
  did not arrive, its parameters are not the others' any more. The others go on without it: a mean
  of Q from fewer peers is the same for all who get it.
- Contributions that are missing in the mean of P do no harm: all use the same mean, and
  the projection on it of those gradients that reach the second averaging is a projection all the
  same.
- *Which of the two* travels in the exact head of the vector, with a fingerprint of
  :math:`\hat P`. If their mean is not one's own, vectors were mixed that do not belong together
  (somebody was one epoch off; or columns of a grid have rounded differently, and a column of P
  that depends on others came out as another one). All who see that make no step: the gradient goes
  back to where it came from, with its samples, and all begin with P again. Who does not see it
  makes a step that others do not make; the fingerprint of the parameters shows that next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moshpit.tensors.powersgd import PowerSGD
from moshpit.training.tensors import Named, fingerprint

FACTOR_TOLERANCE = 1e-3  # guess: a column that is another one differs by about 1
_P, _Q = 0.0, 1.0


class LowRank:
    """One peer's factors on their way.

    Args:
        rank: columns of the factors.
        parameters: whose gradients they are.
        schema: what all peers have in common.

    Attributes:
        head: which averaging this is, and a fingerprint of the mean of P: (3,).
        factors: what is averaged, P or Q, with zeros at the end.
        received: the mean of that.
        gradient: this peer's own, flat.
        weight: its mass.
    """

    def __init__(self, rank: int, parameters: Sequence[Named], schema: bytes) -> None:
        self._power = PowerSGD([p.tensor.shape for p in parameters], rank, schema)
        numel = max(self._power.p_numel, self._power.q_numel)
        self.head = torch.zeros(3)
        self.factors, self.received = torch.zeros(numel), torch.zeros(numel)
        self.gradient = torch.zeros(self._power.numel)
        self.weight = 0.0
        self._mean_p: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None

    @property
    def halfway(self) -> bool:
        """Whether the mean of P is there, and Q is to be averaged next."""
        return self._mean_p is not None

    def begin(self, weight: float) -> None:
        """Make P of ``gradient``."""
        self.weight = weight
        # Nothing of what earlier steps have lost is given with a mass of 0.
        self._kept = self._power.state_dict()["residual"] if weight == 0 else None
        self._fill(self._power.compress_p(self.gradient))
        self.head.copy_(torch.tensor([_P, 0.0, 0.0]))

    def agrees(self, mean: torch.Tensor) -> bool:
        """Return whether the mean of all ``head`` is this one's."""
        return bool(((mean - self.head).abs() < FACTOR_TOLERANCE).all())

    def take_p(self) -> None:
        """The mean of P has come: make Q."""
        self._mean_p = self.received[: self._power.p_numel].clone()
        self._fill(self._power.compress_q(self._mean_p))
        self.head[0] = _Q
        self.head[1:] = fingerprint([Named("P", self._power.p)])

    def take_q(self) -> torch.Tensor:
        """The mean of Q has come: return the mean gradient, flat."""
        mean = self._power.decompress(self.received[: self._power.q_numel])
        self._mean_p = None
        if self._kept is not None:
            state = self._power.state_dict()
            self._power.load_state_dict({**state, "residual": self._kept})
        return mean

    def give_up(self) -> None:
        """Make no step of what was begun."""
        self._mean_p = None
        self._power.abort()

    def taken_over(self) -> None:
        """The state is another peer's: nothing of what it has given is this one's."""
        state = self._power.state_dict()
        self._power.load_state_dict({**state, "residual": torch.zeros_like(state["residual"])})
        self.gradient.zero_()
        self._resume(0.0, self._mean_p)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next averagings depend on."""
        return {
            "power": self._power.state_dict(),
            "gradient": self.gradient.clone(),
            "weight": self.weight,
            "mean_p": None if self._mean_p is None else self._mean_p.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, also between the two averagings."""
        self._power.load_state_dict(state["power"])
        self.gradient.copy_(state["gradient"])
        self._resume(float(state["weight"]), state["mean_p"])

    def _resume(self, weight: float, mean_p: torch.Tensor | None) -> None:
        self._mean_p = None
        if mean_p is not None:
            self.begin(weight)
            self.received[: mean_p.numel()] = mean_p
            self.take_p()

    def _fill(self, factors: torch.Tensor) -> None:
        self.factors.zero_()
        self.factors[: factors.numel()] = factors

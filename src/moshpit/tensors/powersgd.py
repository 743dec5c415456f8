r"""PowerSGD: gradients as products of thin matrices, averaged factor by factor.

For a matrix M of each peer, and a Q that all peers share:

1. :math:`P = M Q`; the peers average P and orthogonalise the columns of the mean,
2. :math:`Q = M^\top \hat P`; the peers average Q,
3. the mean of all M is taken to be :math:`\hat P \bar Q^\top`, which is the projection of the true
   mean on the columns of :math:`\hat P`: exact where its rank is not above that of Q,
4. each peer keeps :math:`M - \hat P (M^\top \hat P)^\top`, what its own matrix lost, and adds it
   to its next one; :math:`\bar Q`, with columns of length 1, is the next Q, so that the
   factors follow the largest directions as a power iteration does.

Both factors depend linearly on M, so they can be averaged like any vector: in groups, with masses
and in any codec. It works on whole matrices and not on chunks, hence it is no `Codec`: the two
vectors that it makes are what is cut into chunks.

Tensors of one dimension, and those for which the factors would be no smaller, travel as they are,
with P. The arithmetic that peers must agree on is done from the means alone. Equal means give equal
bytes where the processors and the build of torch are the same; elsewhere the last bits of a matrix
product can differ.

Source: Vogels, Karimireddy and Jaggi 2019, *PowerSGD*, algorithms 1 and 2; paper.md §8.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from moshpit.errors import LayoutError

_DEPENDENT = 1e-6  # guess: float32 noise. A column that loses more than this is taken for none.
_SEED_LEVELS = 1 << 15


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A tensor as a matrix: its place in the vector, and those of its factors."""

    index: int
    rows: int
    columns: int
    at: slice
    p: slice
    q: slice


class _Phase(Enum):
    IDLE = auto()
    P_SENT = auto()
    Q_SENT = auto()


class PowerSGD:
    """The factors of one peer's vector, and what they have lost so far.

    A round is `compress_p`, the mean of what it gives, `compress_q`, the mean of that,
    `decompress`. Until then nothing is lost by `abort`. The means must be the same at all peers:
    a mean that did not reach all of them is no ground for the next step.

    It holds two vectors of memory (the residual, and the one that is made), and P and Q.

    Args:
        shapes: of the tensors in the vector, in their order.
        rank: columns of the factors.
        schema: what peers that share the vector have in common; the first Q comes from it.

    Attributes:
        numel: numbers of the vector.
        p_numel, q_numel: numbers of what is sent first and second.

    Example:
        >>> power = PowerSGD([(20, 30), (30,)], rank=2)
        >>> power.numel, power.p_numel, power.q_numel
        (630, 70, 60)
        >>> gradient = torch.outer(torch.arange(20.0), torch.arange(30.0)).flatten()
        >>> gradient = torch.cat([gradient, torch.ones(30)])
        >>> mean = power.decompress(power.compress_q(power.compress_p(gradient)))
        >>> torch.allclose(mean, gradient, rtol=1e-4)
        True
    """

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int = 4, schema: bytes = b"") -> None:
        if rank < 1:
            raise LayoutError(f"rank {rank}: factors have at least one column")
        self._rank = rank
        self._schema = schema
        self._matrices: list[_Matrix] = []
        plain: list[slice] = []
        at = p_at = q_at = 0
        for index, shape in enumerate(shapes):
            numel = math.prod(shape)
            place = slice(at, at + numel)
            at += numel
            rows = shape[0] if len(shape) > 1 else 0
            columns = numel // rows if rows else 0
            if rank * (rows + columns) < numel and rows:
                p = slice(p_at, p_at + rows * rank)
                q = slice(q_at, q_at + columns * rank)
                self._matrices.append(_Matrix(index, rows, columns, place, p, q))
                p_at, q_at = p.stop, q.stop
            elif numel:
                plain.append(place)
        self._plain = _joined(plain)
        self.numel = at
        self.p_numel = p_at + sum(place.stop - place.start for place in self._plain)
        self.q_numel = q_at
        self._phase = _Phase.IDLE
        self._residual = torch.zeros(at)
        self._meant = torch.empty(at)
        self._p = torch.empty(self.p_numel)
        self._q = torch.empty(self.q_numel)
        self.reseed()

    @property
    def p(self) -> torch.Tensor:
        """The orthonormal P of the round under way, flat, and the small tensors; from
        `compress_q` on, to be read only."""
        return self._p

    @torch.no_grad()
    def compress_p(self, vector: torch.Tensor) -> torch.Tensor:
        """Begin a round (and forget one that was not ended): return P and the small tensors.

        Args:
            vector: this peer's, shape (numel,), float32; only read.

        Returns:
            What is to be averaged first, shape (p_numel,); new memory.

        Raises:
            LayoutError: the vector is of another layout.
        """
        _check(vector, self.numel, "vector")
        torch.add(vector, self._residual, out=self._meant)
        flat = torch.empty(self.p_numel)
        for matrix in self._matrices:
            torch.mm(
                self._meant[matrix.at].view(matrix.rows, matrix.columns),
                self._q[matrix.q].view(matrix.columns, self._rank),
                out=flat[matrix.p].view(matrix.rows, self._rank),
            )
        for place, part in self._plain_parts(flat):
            part.copy_(self._meant[place])
        self._phase = _Phase.P_SENT
        return flat

    @torch.no_grad()
    def compress_q(self, mean_p: torch.Tensor) -> torch.Tensor:
        """Return Q for the mean of all P.

        Args:
            mean_p: shape (p_numel,), finite; only read.

        Returns:
            What is to be averaged next, shape (q_numel,); new memory. It may be empty.

        Raises:
            LayoutError: the mean is of another layout.
        """
        assert self._phase is _Phase.P_SENT, "compress_p comes first"
        _check(mean_p, self.p_numel, "mean of P")
        self._p.copy_(mean_p)
        flat = torch.empty(self.q_numel)
        for matrix in self._matrices:
            p = self._p[matrix.p].view(matrix.rows, self._rank)
            p.copy_(orthonormal(p))
            meant = self._meant[matrix.at].view(matrix.rows, matrix.columns)
            own_q = flat[matrix.q].view(matrix.columns, self._rank)
            torch.mm(meant.t(), p, out=own_q)
            meant.addmm_(p, own_q.t(), alpha=-1.0)
        self._phase = _Phase.Q_SENT
        return flat

    @torch.no_grad()
    def decompress(self, mean_q: torch.Tensor) -> torch.Tensor:
        """End the round: return what is taken for the mean of all vectors.

        Args:
            mean_q: shape (q_numel,), finite; only read.

        Returns:
            Shape (numel,); new memory.

        Raises:
            LayoutError: the mean is of another layout.
        """
        assert self._phase is _Phase.Q_SENT, "compress_q comes first"
        _check(mean_q, self.q_numel, "mean of Q")
        vector = torch.empty(self.numel)
        for matrix in self._matrices:
            p = self._p[matrix.p].view(matrix.rows, self._rank)
            q = mean_q[matrix.q].view(matrix.columns, self._rank)
            torch.mm(p, q.t(), out=vector[matrix.at].view(matrix.rows, matrix.columns))
            self._q[matrix.q].view(matrix.columns, self._rank).copy_(self._next_q(matrix, q))
        for place, part in self._plain_parts(self._p):
            vector[place] = part
            self._meant[place] = 0.0
        self._residual, self._meant = self._meant, self._residual
        self._phase = _Phase.IDLE
        return vector

    def abort(self) -> None:
        """Forget the round that is under way; the residual stays what it was."""
        self._phase = _Phase.IDLE

    def reseed(self, number: int = 0) -> None:
        """Begin with another Q, the same at all peers that give the same number, for instance
        the epoch: when they may hold different ones, because a mean did not reach all."""
        for matrix in self._matrices:
            self._q[matrix.q].view(matrix.columns, self._rank).copy_(self._seeded(matrix, number))
        self._phase = _Phase.IDLE

    def reset(self) -> None:
        """Forget everything: the residual, Q, and the round that is under way."""
        self._residual.zero_()
        self.reseed()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what the next rounds depend on; a copy. A round under way is not in it."""
        return {"residual": self._residual.clone(), "q": self._q.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state; a round under way is forgotten. A peer that joins takes Q from
        others and no residual: that is each peer's own.

        Raises:
            LayoutError: it is of another vector or rank.
        """
        for key, numel in (("residual", self.numel), ("q", self.q_numel)):
            if key not in state:
                raise LayoutError(f"no {key} in this state")
            _check(state[key], numel, key)
        self._residual.copy_(state["residual"])
        self._q.copy_(state["q"])
        self._phase = _Phase.IDLE

    def _plain_parts(self, flat: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the small tensors' places in the vector, and their parts of P."""
        at = self._matrices[-1].p.stop if self._matrices else 0
        for place in self._plain:
            stop = at + place.stop - place.start
            yield place, flat[at:stop]
            at = stop

    def _next_q(self, matrix: _Matrix, mean_q: torch.Tensor) -> torch.Tensor:
        """Return Q for the next round: columns of length 1, those that vanished anew."""
        lengths = mean_q.double().square().sum(0).sqrt()
        gone = lengths == 0.0
        scaled = (mean_q.double() / lengths.masked_fill(gone, 1.0)).float()
        return torch.where(gone, self._seeded(matrix, 0), scaled)

    def _seeded(self, matrix: _Matrix, number: int) -> torch.Tensor:
        """Return a random Q, shape (columns, rank). Made of integers, so that all processors make
        the same one."""
        text = f"{matrix.index}:{matrix.rows}:{matrix.columns}:{self._rank}:{number}:".encode()
        digest = hashlib.blake2b(text + self._schema, digest_size=8).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        shape = (matrix.columns, self._rank)
        levels = torch.randint(1 - _SEED_LEVELS, _SEED_LEVELS, shape, generator=random)
        return levels.to(torch.float32) / _SEED_LEVELS


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span those of a matrix, by Gram and Schmidt, twice.

    A column that depends on those before it becomes 0.

    Args:
        matrix: shape (m, r), finite.

    Returns:
        Shape (m, r), float64.
    """
    columns = matrix.double().t().contiguous()
    for index in range(len(columns)):
        before, column = columns[:index], columns[index]
        length = math.sqrt(column.square().sum().item())
        for _ in range(2):
            column.sub_(before.t() @ (before @ column))
        left = math.sqrt(column.square().sum().item())
        if left <= _DEPENDENT * length:
            column.zero_()
        else:
            column.div_(left)
    return columns.t()


def _joined(places: list[slice]) -> list[slice]:
    """Return the same places with neighbours as one."""
    joined: list[slice] = []
    for place in places:
        if joined and joined[-1].stop == place.start:
            joined[-1] = slice(joined[-1].start, place.stop)
        else:
            joined.append(place)
    return joined


def _check(tensor: torch.Tensor, numel: int, name: str) -> None:
    if tensor.shape != (numel,):
        raise LayoutError(f"{name}: {tuple(tensor.shape)} instead of ({numel},)")

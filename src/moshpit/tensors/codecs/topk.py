"""The k largest numbers of a chunk, and where they are; the others become 0.

*The threshold* is searched, nothing is sorted. Without their signs, the bits of float32 numbers
are integers in the order of the sizes. A bisection between zero and the largest (MSTopK begins it
at the mean, we at that of a sample) ends at the size t with count(> t) < k ≤ count(≥ t); of those
that equal t the first ones are taken. So the choice is exact and the same everywhere. The first
few passes look at all numbers, the others only at those above the lower end.

*The places* cost a little more than a byte each: blocks of 256 numbers, how many were chosen in
each block (two bytes a block), and for each chosen one its place in its block. For one number
in 16 that is nine bits, where a bit mask has 16, indices of a chunk 17, and the theoretical least
is 5.4. The values are bfloat16: 18 bits would be lost on float32's last digits, while the error
of rounding is fed back together with what was not chosen.

Layout: count of numbers, 4 bytes; values, 2k; counts of blocks, 2 each; places, k.

Source: paper.md §8 (top-k with error feedback, MSTopK).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moshpit.tensors.codecs import blocks
from moshpit.tensors.codecs.base import Codec, Payload, as_tensor, check_fit, new_payload
from moshpit.tensors.codecs.half import check_finite, round_into
from moshpit.tensors.codecs.integer import read_count
from moshpit.tensors.codecs.scratch import scratch

_BLOCK = 256
_HEAD_BYTES = 4
_INFINITY_BITS = 0x7F800000
_SAMPLE = 1024  # guess: numbers that say well enough where the search begins

Indices = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.int32]


class TopK:
    """Top-k with a fixed share of the numbers (implements `base.Codec`).

    Args:
        number: for chunk headers.
        name: for people.
        one_in: of so many numbers one is sent, rounded up.
        result_codec: for means. A mean of several sparse contributions is dense: cut to k again
            it would lose what no sender's feedback keeps.

    Example:
        >>> from moshpit.tensors.codecs.integer import Int8
        >>> codec = TopK(16, "topk", 4, Int8(3))
        >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0])))
        tensor([ 0., -3.,  0.,  0.])
    """

    in_place = False
    biased = True
    differences_only = True
    refuses_nonfinite = True

    def __init__(self, number: int, name: str, one_in: int, result_codec: Codec) -> None:
        self.number = number
        self.name = name
        self.result_codec = result_codec
        self._one_in = one_in

    def encoded_bytes(self, numel: int) -> int:
        """Three for each number that is sent, two for each block, four for the count."""
        return _HEAD_BYTES + 3 * self._chosen(numel) + 2 * blocks.count(numel, _BLOCK)

    def encode(self, source: torch.Tensor) -> memoryview:
        """Return the values and places of the largest numbers."""
        numel = source.numel()
        payload, memory = new_payload(self.encoded_bytes(numel))
        memory[:_HEAD_BYTES].view(torch.int32).fill_(numel)
        if numel == 0:
            return payload
        sizes = scratch("sizes", numel, torch.int32)
        torch.bitwise_and(source.detach().view(torch.int32), 0x7FFFFFFF, out=sizes)
        values, counts, places = self._split(memory, numel)
        if int(sizes.amax().item()) >= _INFINITY_BITS:
            memory[_HEAD_BYTES:].fill_(0xFF)  # values that are not finite: refused
            return payload
        chosen = largest(sizes.numpy(), self._chosen(numel))
        round_into(torch.as_tensor(source.detach().numpy()[chosen]), values)
        in_block = np.bincount(chosen // _BLOCK, minlength=counts.size)
        counts[:] = in_block
        places[:] = chosen & (_BLOCK - 1)
        return payload

    def decode(self, payload: Payload) -> torch.Tensor:
        """Return the numbers, shape (n,)."""
        numel, values, indices = self._read(payload)
        numbers = torch.zeros(numel)
        numbers[indices] = values
        return numbers

    def decode_into(self, payload: Payload, destination: torch.Tensor) -> None:
        """Decode into a tensor of shape (n,)."""
        numel, values, indices = self._read(payload)
        check_fit(numel, destination)
        destination.zero_()
        destination[indices] = values

    def _chosen(self, numel: int) -> int:
        return -(-numel // self._one_in)

    def _read(self, payload: Payload) -> tuple[int, torch.Tensor, torch.Tensor]:
        memory = as_tensor(payload)
        numel = read_count(memory)
        if self.encoded_bytes(numel) != memory.numel():
            raise ValueError(f"{memory.numel()} bytes are not {numel} numbers of {self.name}")
        values, counts, places = self._split(memory, numel)
        check_finite(values)
        in_block = counts.astype(np.int64)
        if int(in_block.sum()) != places.size:
            raise ValueError("the blocks do not hold as many numbers as were sent")
        indices = np.repeat(np.arange(counts.size, dtype=np.int64) * _BLOCK, in_block)
        indices += places
        if indices.size and (int(indices[-1]) >= numel or bool((np.diff(indices) <= 0).any())):
            raise ValueError("places beyond the end, out of order, or given twice")
        return numel, values.to(torch.float32), torch.as_tensor(indices)

    def _split(
        self, memory: torch.Tensor, numel: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
        chosen = self._chosen(numel)
        at_counts = _HEAD_BYTES + 2 * chosen
        at_places = at_counts + 2 * blocks.count(numel, _BLOCK)
        values = memory[_HEAD_BYTES:at_counts].view(torch.bfloat16)
        raw = memory.numpy()
        return values, raw[at_counts:at_places].view(np.uint16), raw[at_places:]


def largest(sizes: Sizes, k: int) -> Indices:
    """Return the places of the k largest, ascending; of equal ones the first.

    Args:
        sizes: shape (n,), not negative.
        k: from 1 to n.
    """
    known: Indices | None = None  # the places of the candidates, if they are not all
    candidates = sizes
    low, high = 0, int(sizes.max()) + 1
    above_low = sizes.size  # count(≥ low) ≥ k > count(≥ high)
    probe = int(sizes[:: max(1, sizes.size // _SAMPLE)].mean())
    while above_low > k and high - low > 1:
        if not low < probe < high:
            probe = (low + high) // 2
        above = int(np.count_nonzero(candidates >= probe))
        if above >= k:
            low, above_low = probe, above
        else:
            high = probe
        probe = (low + high) // 2
        if above_low < candidates.size // 4:
            places = np.flatnonzero(candidates >= low)
            candidates = candidates[places]
            known = places if known is None else known[places]
    chosen = np.flatnonzero(candidates >= low)
    if chosen.size > k:  # then high is low + 1: the rest equals low
        beyond = candidates[chosen] > low
        spare = k - int(np.count_nonzero(beyond))
        equal = np.flatnonzero(~beyond)[spare:]
        chosen = np.delete(chosen, equal)
    return chosen if known is None else known[chosen]

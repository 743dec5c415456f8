"""Named tensors as one stream of bytes in chunks, each with its hash.

The stream is a safetensors file, byte for byte the same for the same tensors whoever makes it:
tensors are ordered by the size of their elements (the largest first, so that all are aligned)
and then by name, and nothing else is in the header. What is no tensor travels in the
`Manifest`, beside the hashes of the chunks; its own hash, `Manifest.digest`, so stands for the
whole content. Peers with the same names and shapes cut at the same places, so where their
values agree, their chunks do.

A checkpoint on disk is these bytes and a manifest; a joiner fetches the same chunks by index,
from several donors. Nothing here knows where chunks come from: `StateImage` hands them out,
`StateAssembler` takes them in any order and judges each.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, final

import msgspec
import torch

from moshpit.errors import StateError

CHUNK_BYTES = 1 << 20  # guess: a round trip's worth on good links; hashing it takes a millisecond
CHUNK_BYTES_MIN = 1 << 12
CHUNK_BYTES_MAX = 1 << 26
MANIFEST_BYTES_MAX = 1 << 28  # guess: hashes of eight million chunks
STATE_BYTES_MAX = 1 << 42  # guess: four terabytes
HASH_BYTES = 32
FORMAT = 1
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_METADATA = "__metadata__"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Kinds of numbers by their names in the safetensors format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def content_hash(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32 bytes by which a chunk or a manifest is known."""
    return blake2b(data, digest_size=HASH_BYTES).digest()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a state consists of beside its tensors, and how to recognise its bytes.

    Attributes:
        epoch: the swarm's epoch that the state is of.
        size: length of the stream in bytes.
        chunk_bytes: length of every chunk but the last.
        hashes: of the chunks, in order.
        contents: everything that is no tensor, with the names of tensors in their places
            (`moshpit.training.state`).
        format: the version of all this.
    """

    epoch: int
    size: int
    chunk_bytes: int
    hashes: tuple[bytes, ...]
    contents: dict[str, Any]
    format: int = FORMAT

    def encode(self) -> bytes:
        """Return the manifest as JSON, with its digest; equal for equal manifests."""
        body = _encode(self)
        return _encode(_Sealed(content_hash(body), msgspec.Raw(body)))

    @classmethod
    def decode(cls, data: bytes, size_max: int = STATE_BYTES_MAX) -> Manifest:
        """Read what `encode` wrote; the data may be anybody's.

        Args:
            data: what came.
            size_max: how long the stream may be at most; a `StateAssembler` takes so much memory.

        Raises:
            StateError: says what is wrong with it.
        """
        if len(data) > MANIFEST_BYTES_MAX:
            raise StateError(f"a manifest of {len(data)} bytes; at most {MANIFEST_BYTES_MAX}")
        try:
            sealed = msgspec.json.decode(data, type=_Sealed)
            if content_hash(memoryview(sealed.manifest)) != sealed.digest:
                raise StateError("the manifest was altered: its digest is another")
            manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise StateError(f"not a manifest: {error}") from error
        manifest._check(size_max)
        return manifest

    @property
    def digest(self) -> bytes:
        """The hash of the whole content: equal digests mean equal states."""
        return content_hash(_encode(self))

    def length(self, chunk: int) -> int:
        """Return the length of a chunk in bytes."""
        return min(self.chunk_bytes, self.size - chunk * self.chunk_bytes)

    def _check(self, size_max: int) -> None:
        if self.format != FORMAT:
            raise StateError(f"a state of format {self.format}; this version reads {FORMAT}")
        if not 0 <= self.epoch < 1 << 63 or not 0 < self.size <= size_max:
            raise StateError(f"epoch {self.epoch} and {self.size} bytes make no sense")
        if not CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise StateError(f"chunks of {self.chunk_bytes} bytes make no sense")
        expected = -(-self.size // self.chunk_bytes)
        if len(self.hashes) != expected or any(len(h) != HASH_BYTES for h in self.hashes):
            raise StateError(f"{len(self.hashes)} hashes for {expected} chunks, or of odd lengths")


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest on its way, exactly as it was hashed."""

    digest: bytes
    manifest: msgspec.Raw


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


@final
class StateImage:
    """A state's chunks, by index.

    Args:
        manifest: what the chunks are.
        read: returns the bytes from one place in the stream to another.
    """

    def __init__(self, manifest: Manifest, read: Callable[[int, int], bytes]) -> None:
        self.manifest = manifest
        self._read = read

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        contents: dict[str, Any],
        epoch: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> StateImage:
        """Return the image of tensors, which must not change as long as it is used.

        Args:
            tensors: by name; dense, on the CPU.
            contents: what JSON can hold.
            epoch: the swarm's epoch that the state is of.
            chunk_bytes: how long a chunk is.

        Raises:
            StateError: a tensor that the format cannot hold.
        """
        stream = _Stream(tensors)
        starts = range(0, stream.size, chunk_bytes)
        hashes = tuple(
            content_hash(stream.read(start, min(start + chunk_bytes, stream.size)))
            for start in starts
        )
        return cls(Manifest(epoch, stream.size, chunk_bytes, hashes, contents), stream.read)

    def __len__(self) -> int:
        return len(self.manifest.hashes)

    def chunk(self, index: int) -> bytes:
        """Return a chunk's bytes."""
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        start = index * self.manifest.chunk_bytes
        return self._read(start, start + self.manifest.length(index))


@final
class StateAssembler:
    """Puts a state together from chunks in any order, and believes none of them.

    Args:
        manifest: what is expected.

    Example:
        >>> image = StateImage.of({"w": torch.ones(3000)}, {}, epoch=7, chunk_bytes=4096)
        >>> assembler = StateAssembler(Manifest.decode(image.manifest.encode()))
        >>> assembler.add(0, b"something else")
        False
        >>> [assembler.add(i, image.chunk(i)) for i in reversed(assembler.missing)]
        [True, True, True]
        >>> assembler.tensors()["w"].sum()
        tensor(3000.)
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._data = bytearray(manifest.size)
        self._missing = dict.fromkeys(range(len(manifest.hashes)))

    @property
    def missing(self) -> tuple[int, ...]:
        """The chunks that have not come yet."""
        return tuple(self._missing)

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return not self._missing

    def add(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Take a chunk; False if it is not the one that the manifest says. One that is there
        already is not looked at again."""
        if not 0 <= index < len(self.manifest.hashes):
            return False
        if index not in self._missing:
            return True
        if len(data) != self.manifest.length(index):
            return False
        if content_hash(data) != self.manifest.hashes[index]:
            return False
        start = index * self.manifest.chunk_bytes
        self._data[start : start + len(data)] = data
        del self._missing[index]
        return True

    def chunk(self, index: int) -> bytes:
        """Return the bytes of a chunk that is there."""
        assert index not in self._missing, "it is not there"
        start = index * self.manifest.chunk_bytes
        return bytes(self._data[start : start + self.manifest.length(index)])

    def reuse(self, other: StateAssembler) -> int:
        """Take over the chunks that another state has in common with this one; return how many.
        So a joiner whose donors have all moved on fetches only what has changed."""
        if other.manifest.chunk_bytes != self.manifest.chunk_bytes:
            return 0
        before = len(self._missing)
        for index in range(min(len(self.manifest.hashes), len(other.manifest.hashes))):
            same = self.manifest.hashes[index] == other.manifest.hashes[index]
            if same and index not in other._missing:
                start = index * self.manifest.chunk_bytes
                stop = start + self.manifest.length(index)
                self.add(index, memoryview(other._data)[start:stop])
        return before - len(self._missing)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors; they share this object's memory.

        Raises:
            StateError: chunks are missing, or they are not tensors.
        """
        if self._missing:
            raise StateError(f"{len(self._missing)} of {len(self.manifest.hashes)} chunks missing")
        return parse(self._data)


class _Stream:
    """A safetensors file of tensors that stay where they are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
        pieces: list[memoryview] = []
        at = 0
        for name in names:
            tensor = tensors[name]
            kind = _NAMES.get(tensor.dtype)
            if kind is None or tensor.layout is not torch.strided or name == _METADATA:
                raise StateError(f"{name}: a {tensor.layout} tensor of {tensor.dtype} has no form")
            piece = _bytes_of(tensor)
            entries[name] = {
                "dtype": kind,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + len(piece)],
            }
            at += len(piece)
            pieces.append(piece)
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        length = len(header).to_bytes(_LENGTH_BYTES, "little")
        self._pieces = [memoryview(length + header), *pieces]
        self._starts: list[int] = []
        self.size = 0
        for piece in self._pieces:
            self._starts.append(self.size)
            self.size += len(piece)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of a part of the file."""
        found: list[memoryview] = []
        number = bisect_right(self._starts, start) - 1
        while number < len(self._pieces) and self._starts[number] < stop:
            offset = self._starts[number]
            found.append(self._pieces[number][max(0, start - offset) : stop - offset])
            number += 1
        return b"".join(found)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def parse(data: bytearray) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file; they share its memory.

    Raises:
        StateError: says what is wrong with it.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(data) < _LENGTH_BYTES or start > len(data):
        raise StateError("not a safetensors file: the header is cut")
    try:
        raw = msgspec.json.decode(
            memoryview(data)[_LENGTH_BYTES:start], type=dict[str, msgspec.Raw]
        )
        raw.pop(_METADATA, None)
        header = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise StateError(f"not a safetensors file: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    at = start
    for name, entry in header.items():
        dtype = DTYPES.get(entry.dtype)
        begin, end = (start + offset for offset in entry.data_offsets)
        if dtype is None or begin != at or not begin <= end <= len(data):
            raise StateError(f"tensor {name[:80]!r} of {entry.dtype[:20]!r} at {begin} to {end}")
        if any(n < 0 for n in entry.shape) or math.prod(entry.shape) * dtype.itemsize != end - at:
            raise StateError(f"tensor {name[:80]!r}: {end - at} bytes do not fit its shape")
        try:
            tensors[name] = _tensor(data, at, end, dtype).reshape(entry.shape)
        except (RuntimeError, OverflowError) as error:  # such as a shape of (0, 2**62, 2**62)
            raise StateError(f"tensor {name[:80]!r}: no shape {entry.shape[:8]}") from error
        at = end
    if at != len(data):
        raise StateError(f"{len(data) - at} bytes beyond the last tensor")
    return tensors


def _tensor(data: bytearray, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    if start == stop:
        return torch.empty(0, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=stop - start, offset=start)
    return flat.view(dtype)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

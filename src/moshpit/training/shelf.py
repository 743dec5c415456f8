"""Checkpoints in a directory: written whole or not at all, and judged when read.

A checkpoint is a directory ``epoch-00000012-<peer>[-<n>]`` with two files:
``state.safetensors`` and ``manifest.json``. It is written under another name, each file is
forced to the disk, and then the directory gets its name: so a kill or a power cut at any byte
leaves only complete ones, and leftovers whose names begin with a dot. Older ones go only when
the new one is durable, and lose their name first.

Several peers may share a directory: names tell them apart, and the newest epochs of all of
them are kept. What has another name is never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moshpit.errors import StateError
from moshpit.tensors.image import MANIFEST_BYTES_MAX, Manifest, StateAssembler, StateImage
from moshpit.training.state import TrainingState

STATE_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"
ABANDONED_S = 86400.0  # guess: nobody writes a checkpoint for longer than a day
_NAME = re.compile(r"epoch-(\d{8,18})-([a-z2-7]{8})(?:-(\d{1,9}))?")
_LEFTOVER = ".moshpit-"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk, so far only by its name.

    Attributes:
        path: the directory.
        epoch: what it is of.
        owner: the short name of the peer that wrote it.
        number: 1, or higher where the peer has saved the epoch more than once.
    """

    path: Path
    epoch: int
    owner: str
    number: int


def saved_in(directory: Path, owner: str = "") -> list[Saved]:
    """Return the checkpoints in a directory, the newest epoch first; in an epoch those of
    ``owner`` first, and later ones before earlier ones.

    Raises:
        OSError: the directory cannot be read; one that does not exist is empty.
    """
    found: list[Saved] = []
    if not directory.exists():
        return found
    for entry in os.scandir(directory):
        match = _NAME.fullmatch(entry.name)
        if match is not None and entry.is_dir(follow_symlinks=False):
            epoch, whose, number = match.groups()
            found.append(Saved(Path(entry.path), int(epoch), whose, int(number or 1)))
    return sorted(found, key=lambda s: (-s.epoch, s.owner != owner, -s.number, s.owner))


def try_out(directory: Path) -> None:
    """See whether files can be made in a directory, and make it if it does not exist.

    Raises:
        OSError: they cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory, prefix=_LEFTOVER):
        pass


def write(directory: Path, owner: str, image: StateImage) -> Saved:
    """Write a checkpoint; it is on the disk when this returns.

    Raises:
        OSError: it is not, and nothing is left of it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{_LEFTOVER}{owner}-{secrets.token_hex(4)}"
    unfinished.mkdir()
    try:
        chunks = (image.chunk(index) for index in range(len(image)))
        _write_file(unfinished / STATE_FILE, chunks)
        _write_file(unfinished / MANIFEST_FILE, iter((image.manifest.encode(),)))
        _sync(unfinished)
        saved = _name(directory, owner, image.manifest.epoch)
        unfinished.rename(saved.path)
        _sync(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return saved


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint looks usable: its manifest does, and its state is as long as
    that says. Its bytes are not read."""
    try:
        return (path / STATE_FILE).stat().st_size == _manifest(path).size
    except (StateError, OSError):
        return False


def company_of(path: Path) -> int:
    """Return how many peers trained when a checkpoint was saved; 0 if it does not say."""
    try:
        company = _manifest(path).contents.get("company")
    except (StateError, OSError):
        return 0
    return company if isinstance(company, int) else 0


def read(path: Path) -> TrainingState:
    """Read a checkpoint, every byte of it checked.

    Raises:
        StateError: it was altered or cut, or is none.
        OSError: it cannot be read.
    """
    manifest = _manifest(path)
    size = (path / STATE_FILE).stat().st_size
    if size != manifest.size:
        raise StateError(f"{STATE_FILE} has {size} bytes, and should have {manifest.size}")
    assembler = StateAssembler(manifest)
    with (path / STATE_FILE).open("rb", buffering=0) as stream:
        for index in range(len(manifest.hashes)):
            if not assembler.add(index, _read_full(stream.fileno(), manifest.length(index))):
                at = index * manifest.chunk_bytes
                raise StateError(f"{STATE_FILE} was altered at or soon after byte {at}")
    return TrainingState.assembled(assembler)


def prune(directory: Path, keep: int, newest: Saved) -> None:
    """Remove what ``newest`` makes superfluous: epochs before the last ``keep`` up to its own,
    and what its peer saved of the same epoch before.

    Raises:
        OSError: something could not be removed.
    """
    all_saved = saved_in(directory)
    epochs = sorted({s.epoch for s in all_saved if s.epoch <= newest.epoch}, reverse=True)
    kept = epochs[:keep]
    for saved in all_saved:
        again = (saved.epoch, saved.owner) == (newest.epoch, newest.owner)
        superseded = again and saved.number < newest.number
        if superseded or (saved.epoch in epochs and saved.epoch not in kept):
            _remove(saved.path, newest.owner)


def sweep(directory: Path, owner: str) -> None:
    """Remove what a killed process has left half written: this peer's own, and others' after
    a day."""
    if not directory.is_dir():
        return
    for entry in os.scandir(directory):
        if entry.name.startswith(_LEFTOVER) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                mine = entry.name.startswith(f"{_LEFTOVER}{owner}-")
                if mine or time.time() - entry.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    if file.stat().st_size > MANIFEST_BYTES_MAX:
        raise StateError(f"{MANIFEST_FILE} is too long to be one")
    return Manifest.decode(file.read_bytes())


def _name(directory: Path, owner: str, epoch: int) -> Saved:
    before = [s.number for s in saved_in(directory) if (s.epoch, s.owner) == (epoch, owner)]
    number = max(before, default=0) + 1
    name = f"epoch-{epoch:08d}-{owner}" + (f"-{number}" if number > 1 else "")
    return Saved(directory / name, epoch, owner, number)


def _remove(path: Path, remover: str) -> None:
    """Remove a checkpoint so that at no time half of one looks like one."""
    with contextlib.suppress(FileNotFoundError):  # another peer was faster
        unnamed = path.with_name(f"{_LEFTOVER}{remover}-{secrets.token_hex(4)}")
        path.rename(unnamed)
        shutil.rmtree(unnamed)


def _write_file(path: Path, pieces: Iterator[bytes]) -> None:
    with path.open("xb", buffering=0) as stream:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[stream.write(left) :]
        os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    """Force a directory's entries to the disk, where the system can do that."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_full(descriptor: int, length: int) -> bytes:
    """Read so many bytes, or fewer at the end of the file."""
    pieces: list[bytes] = []
    while length > 0:
        piece = os.read(descriptor, length)
        if not piece:
            break
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)

"""What the demo and its processes say to each other: JSON lines over pipes.

A worker reads its `Assignment` from its standard input and writes the others to its standard
output. The end of the input means that the demo is gone; a worker never outlives it.
"""

from __future__ import annotations

import msgspec


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do.

    Attributes:
        index: which part of the text is its own; -1 is the single process, which has all.
        peers: how many peers there are.
        seed: of its random choices; the initial weights are the same for all.
        epochs: how many epochs the peers train for.
        samples_per_epoch: of all peers together.
        batch_size: samples per local step.
        samples: for the single process: how many to train on.
        ticket: how to join; empty for the single process.
        weights_path: where to write the final weights (safetensors).
    """

    index: int
    peers: int
    seed: int
    epochs: int
    samples_per_epoch: int
    batch_size: int
    samples: int = 0
    ticket: str = ""
    weights_path: str = ""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """From the demo: everybody is there, begin."""


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The first peer can be dialled here."""

    addresses: list[str]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """This peer sees all others."""

    peer: str


class Epoch(msgspec.Struct, frozen=True, tag="epoch", kw_only=True):
    """One epoch of one peer, told when its averaging has ended.

    Attributes:
        epoch: epochs done.
        loss: mean training loss of the epoch's local steps.
        samples: this peer's samples since the start.
        rate: samples per second in this epoch.
        group: the short ids of the last round's members.
        outcome: complete, partial or failed.
        bytes_sent: since the start.
        averaging_s: from snapshot to mean.
        seconds: how long the epoch took here.
        waited_s: how long training stood still in it.
        longest_wait_s: the longest single stop in it.
        at: when it ended, on the machine's monotonic clock.
    """

    epoch: int
    loss: float
    samples: float
    rate: float
    group: list[str]
    outcome: str
    bytes_sent: int
    averaging_s: float
    seconds: float
    waited_s: float
    longest_wait_s: float
    at: float


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The single process, now and then: samples so far and the mean loss since the last."""

    samples: float
    loss: float


class Done(msgspec.Struct, frozen=True, tag="done", kw_only=True):
    """The final weights are written. Counts are of this process."""

    samples: float
    rounds: int = 0
    rounds_partial: int = 0
    rounds_failed: int = 0
    bytes_sent: int = 0
    final_epoch: int = 0


Told = Listening | Joined | Epoch | Step | Done

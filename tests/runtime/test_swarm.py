"""What a swarm says to its user: waits that are in vain, and lines of its log."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
import torch

import moshpit
from moshpit.config import TransportConfig
from moshpit.errors import LocalError, WaitTimeoutError
from moshpit.events import Notice
from moshpit.identity.tickets import RunKey
from moshpit.runtime.jobs import Averaging
from moshpit.runtime.told import NoticeLog
from moshpit.tensors.layout import ChunkPlan
from moshpit.types import short


@pytest.fixture
def swarms() -> Iterator[list[moshpit.Swarm]]:
    invite, options = RunKey.generate().invite(), {"listen": "127.0.0.1:0", "identity": "new"}
    with (
        moshpit.join(invite.ticket(()).encode(), **options) as first,
        moshpit.join(invite.ticket(first.addresses).encode(), **options) as second,
    ):
        second.wait_for_peers(2)
        first.wait_for_peers(2)
        yield [first, second]


def test_waiting_in_vain_says_who_was_there(swarms: list[moshpit.Swarm]) -> None:
    first, second = swarms
    with pytest.raises(WaitTimeoutError) as caught:
        first.wait_for_peers(3, timeout_s=0.05)
    said = str(caught.value)
    assert said.startswith(f"2 of 3 peers after 0.05 s (this one and {short(second.peer_id)});")
    assert "same ticket" in said
    assert isinstance(caught.value, TimeoutError)  # what scripts may catch already
    assert isinstance(caught.value, LocalError)


def test_an_averaging_that_takes_too_long_says_that_it_goes_on() -> None:
    vector = torch.zeros(4)
    job = Averaging(vector, ChunkPlan.of(4, TransportConfig()), None)
    with pytest.raises(WaitTimeoutError, match=r"within 0.01 s\. It goes on"):
        job.wait(0.01)


def test_a_latecomer_that_follows_in_steps_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = NoticeLog(itertools.count().__next__)
    with caplog.at_level(logging.INFO, "moshpit"):
        for epoch in (3, 5, 6):
            write(Notice("behind", None, f"swarm is at epoch {epoch}, this peer at 0"))
    lines = [record.message for record in caplog.records if "behind" in record.message]
    assert lines == ["behind: swarm is at epoch 3, this peer at 0"]

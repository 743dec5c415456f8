"""The examples run, alone and as real processes of one run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moshpit.identity.tickets import RunKey
from moshpit.types import Address

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MOSHPIT = "from moshpit.cli import main; main()"
TIMEOUT_S = 280


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Start processes that are ended with the test; their state goes to a folder of its own."""
    running = []

    def run(*args):
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path / str(len(running))),
            "OMP_NUM_THREADS": "1",  # more would wait for each other on a busy machine
        }
        environment.pop("MOSHPIT_TICKET", None)
        process = subprocess.Popen(
            [sys.executable, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def outputs(processes):
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), "\n---\n".join(said)
    return said


def as_peers(start, port, script, *each):
    """Run an example as one peer for each list of arguments; the first one can be dialled."""
    ticket = RunKey.generate().invite().ticket((Address("127.0.0.1", port),)).encode()
    listen = [f"127.0.0.1:{port}"] + ["127.0.0.1:0"] * (len(each) - 1)
    common = ("-c", MOSHPIT, "run", "--ticket", ticket, "--preset", "local")
    processes = [
        start(*common, "--listen", at, str(EXAMPLES / script), *args)
        for at, args in zip(listen, each, strict=True)
    ]
    return outputs(processes)


def test_training_alone(start):
    size = ("--samples-per-epoch", "128", "--batch-size", "16")
    said = outputs([start(str(EXAMPLES / "train_text.py"), "--alone", "--epochs", "3", *size)])
    assert re.findall(r"epoch (\d+): loss", said[0]) == ["1", "2", "3"]


def test_two_peers_train_and_end_with_the_same_weights(start, port):
    size = ("--samples-per-epoch", "512", "--batch-size", "16", "--epochs", "6")
    said = as_peers(start, port, "train_text.py", size, size)
    sums = [re.search(r"weights' sum is (\S+)", text).group(1) for text in said]
    assert sums[0] == sums[1], "\n".join(said)


def test_averaging_only(start, port):
    said = as_peers(
        start,
        port,
        "average_only.py",
        ("--peers", "2", "1", "2", "3"),
        ("--peers", "2", "--weight", "3", "5", "6", "7"),
    )
    for text in said:
        outcome, mean = re.search(r"^(\w+): (\[.*\])$", text, re.M).groups()
        assert outcome == "complete", text
        assert json.loads(mean) == pytest.approx([4.0, 5.0, 6.0], rel=1e-6)

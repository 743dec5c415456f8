"""`moshpit demo`: its parts, and a small run of it with real processes and a real kill."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moshpit.cli.app import app
from moshpit.cli.demo_messages import Assignment, Done, Epoch, Joined, Listening, Step
from moshpit.cli.demo_model import (
    CONTEXT,
    Batches,
    CharTransformer,
    corpus,
    learning_rate,
    load_weights,
    save_weights,
    validation_loss,
)
from moshpit.cli.demo_report import (
    PeerTrace,
    Result,
    failed_checks,
    max_difference,
    plot_losses,
    summary,
    undisturbed,
    waiting_share,
)
from moshpit.cli.demo_view import LiveView, PlainView, Row, view_for

MOSHPIT = "from moshpit.cli import main; main()"
GOOD = Result(
    peers=4,
    killed=["peer 2"],
    epochs=49,
    samples=24576,
    initial_val_loss=4.65,
    final_val_loss=1.52,
    single_process_val_loss=1.50,
    rounds=147,
    rounds_partial=3,
    rounds_failed=0,
    stall_s_after_kill=0.02,
    longest_epoch_s_after_kill=1.0,
    median_epoch_s=0.5,
    waiting_share=0.01,
    max_param_diff=0.0,
    bytes_sent=1000,
    training_seconds=30.0,
    seconds=90.0,
)


def epoch(number, *, at, seconds=1.0, waited_s=0.01, outcome="complete"):
    return Epoch(
        epoch=number,
        loss=3.0 - 0.1 * number,
        samples=100.0 * number,
        rate=100.0,
        group=["aaaaaaaa", "bbbbbbbb"],
        outcome=outcome,
        bytes_sent=1024 * number,
        averaging_s=0.05,
        seconds=seconds,
        waited_s=waited_s,
        longest_wait_s=waited_s,
        at=at,
    )


# --- what is trained ------------------------------------------------------------------------


def test_the_text_is_split_without_overlap():
    data = corpus()
    assert len(data.train) + len(data.held_out) > 300_000
    assert 0.08 < len(data.held_out) / (len(data.train) + len(data.held_out)) < 0.12
    parts = [data.part(i, 4) for i in range(4)]
    assert sum(map(len, parts)) == len(data.train)
    assert torch.equal(torch.cat(parts).bincount(), data.train.bincount())
    assert max(map(len, parts)) - min(map(len, parts)) <= 4096


def test_batches_are_windows_and_follow_the_seed():
    text = torch.arange(1000)
    inputs, targets = Batches(text, seed=3).draw(5)
    assert inputs.shape == targets.shape == (5, CONTEXT)
    assert torch.equal(inputs + 1, targets)
    again, _ = Batches(text, seed=3).draw(5)
    other, _ = Batches(text, seed=4).draw(5)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)


def test_the_model_starts_the_same_everywhere_and_does_not_look_ahead():
    torch.manual_seed(1)
    one = CharTransformer(50)
    torch.manual_seed(2)
    other = CharTransformer(50)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert 150_000 < sum(p.numel() for p in one.parameters()) < 400_000
    tokens = torch.randint(50, (1, CONTEXT))
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 50
    before, after = one(tokens)[0], one(changed)[0]
    torch.testing.assert_close(before[:40], after[:40])
    assert not torch.allclose(before[40:], after[40:])


def test_an_untrained_model_knows_nothing():
    data = corpus()
    loss = validation_loss(CharTransformer(data.characters), data.held_out[:4000])
    assert loss == pytest.approx(math.log(data.characters), abs=0.1)


def test_the_learning_rate_rises_then_falls():
    rates = [learning_rate(i / 100) for i in range(101)]
    top = rates.index(max(rates))
    assert 0 < top < 20
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[100] == pytest.approx(rates[top] / 20)


def test_weights_come_back_as_they_were(tmp_path):
    model = CharTransformer(20)
    save_weights(model, tmp_path / "w.safetensors")
    assert max_difference([load_weights(tmp_path / "w.safetensors"), model.state_dict()]) == 0.0


# --- what it says about it ------------------------------------------------------------------


def test_everything_that_does_not_hold_is_said():
    assert failed_checks(GOOD, kill=1) == []
    broken = {
        "killed": ([], "0 peers were killed"),
        "max_param_diff": (1e-9, "differ by up to 1e-09"),
        "rounds": (0, "nothing was averaged"),
        "rounds_failed": (2, "2 rounds averaged nothing"),
        "initial_val_loss": (1.5, "did not fall"),
        "single_process_val_loss": (1.4, "1.086 × the single"),
        "waiting_share": (0.05, "stood still 5.0%"),
        "stall_s_after_kill": (9.0, "stood still for 9.0 s"),
    }
    for field, (value, words) in broken.items():
        said = failed_checks(msgspec.structs.replace(GOOD, **{field: value}), kill=1)
        assert len(said) == 1
        assert words in said[0]


def test_numbers_that_are_not_numbers_do_not_pass():
    for field in ("final_val_loss", "waiting_share", "stall_s_after_kill", "max_param_diff"):
        assert failed_checks(msgspec.structs.replace(GOOD, **{field: math.nan}), kill=1) != []


def test_difference_of_weights():
    one = {"w": torch.zeros(3)}
    assert max_difference([one, {"w": torch.tensor([0.0, 0.5, 0.0])}, one]) == 0.5
    assert max_difference([one, {"v": torch.zeros(3)}]) == math.inf
    assert max_difference([one, {"w": torch.tensor([0.0, math.nan, 0.0])}]) == math.inf


def test_disturbed_epochs_do_not_count_as_waiting():
    epochs = [
        epoch(1, at=1.0, waited_s=0.9),  # the start
        epoch(2, at=2.0),
        epoch(3, at=3.0, waited_s=0.5),  # the kill
        epoch(4, at=4.0, waited_s=0.5, outcome="partial"),
        epoch(5, at=5.0, waited_s=0.03),
    ]
    assert [e.epoch for e in undisturbed(epochs, [2.5])] == [2, 5]
    assert waiting_share(PeerTrace("peer 0", epochs=epochs), [2.5]) == pytest.approx(0.02)


def test_the_summary_names_what_happened():
    words = summary(GOOD)
    assert "4 peers" in words
    assert "peer 2" in words
    assert "1.013 ×" in words
    assert "bit for bit" in words


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    traces = [
        PeerTrace("peer 0", "aaaaaaaa", [epoch(1, at=1.0), epoch(2, at=2.0)]),
        PeerTrace("peer 1", "bbbbbbbb", [epoch(1, at=1.1)], killed_at=1.5),
    ]
    plot_losses(tmp_path / "p.png", traces, [], GOOD)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines():
    row = Row("peer 0", "aaaaaaaa", "training", epoch(2, at=1.0))
    screen, pipe = io.StringIO(), io.StringIO()
    live = view_for(Console(file=screen, force_terminal=True, width=100), 9, [row], plain=False)
    assert isinstance(live, LiveView)
    with live:
        live.changed(row)
        live.say("killed peer 3")
    assert "2/9" in screen.getvalue()
    assert "killed peer 3" in screen.getvalue()
    plain = view_for(Console(file=pipe), 9, [row], plain=False)
    assert isinstance(plain, PlainView)
    plain.changed(row)
    plain.changed(row)
    plain.changed(replace(row, state="done"))
    assert pipe.getvalue().count("epoch 2/9") == 1, "each epoch once"
    assert isinstance(view_for(Console(force_terminal=True), 9, [row], plain=True), PlainView)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "3", "--kill", "2"], "at least two must survive"),
        (["--samples-per-epoch", "10"], "need at least 128"),
        (["--json", "no-such-folder/x.json"], "no folder"),
        (["--plot", "no-such-folder/x.png"], "no folder"),
    ],
)
def test_what_cannot_be_shown_is_said_at_once(arguments, words):
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code != 0
    assert words in str(done.exception)


# --- real processes -------------------------------------------------------------------------


def test_a_small_demo_with_a_kill(tmp_path):
    result, picture = tmp_path / "result.json", tmp_path / "losses.png"
    done = subprocess.run(
        [
            *(sys.executable, "-c", MOSHPIT, "demo", "--peers", "3", "--kill", "1"),
            *("--epochs", "6", "--samples-per-epoch", "128", "--seed", "5"),
            *("--json", str(result), "--plot", str(picture)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.exists(), done.stdout + done.stderr
    numbers = json.loads(result.read_bytes())
    # So few samples say nothing about losses, and a busy machine nothing about waiting.
    assert (done.returncode == 0) == (numbers["failed_checks"] == [])
    assert len(numbers["killed"]) == 1
    assert f"killed {numbers['killed'][0]}" in done.stdout
    assert numbers["max_param_diff"] == 0.0
    assert numbers["rounds_failed"] == 0
    assert numbers["rounds"] >= 2 * 6
    assert numbers["epochs"] == 7
    assert numbers["samples"] >= 6 * 128 * 0.9
    assert numbers["final_val_loss"] < numbers["initial_val_loss"]
    assert picture.stat().st_size > 10_000


def test_a_worker_whose_demo_is_gone_ends():
    read, write = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-m", "moshpit.cli.demo_worker"],
        stdin=read,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read)
    work = Assignment(
        index=-1, peers=1, seed=0, epochs=4, samples_per_epoch=64, batch_size=16, samples=10**9
    )
    os.write(write, msgspec.json.encode(work) + b'\n{"type":"go"}\n')
    try:
        assert worker.stdout is not None
        assert b'"step"' in worker.stdout.readline()
        os.close(write)
        assert worker.wait(timeout=60) == 3
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.communicate()


def test_messages_come_back_as_they_were():
    done = Done(samples=3.0, rounds=2)
    told = Listening | Joined | Epoch | Step | Done
    for message in (done, Listening(["127.0.0.1:1"]), Joined("a"), Step(1.0, 2.0), epoch(1, at=0)):
        assert msgspec.json.decode(msgspec.json.encode(message), type=told) == message

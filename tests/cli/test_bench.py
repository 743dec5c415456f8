"""`moshpit bench averaging`: its parts, and small runs of it with real processes and links."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from moshpit.cli import bench_worker
from moshpit.cli.app import app
from moshpit.cli.bench_links import Links, bucket, check_root, namespaces
from moshpit.cli.bench_processes import Processes
from moshpit.cli.bench_report import (
    failures_of,
    figures_of,
    headline,
    machine,
    result_of,
    tolerance_of,
)
from moshpit.cli.bench_run import Plan, Round
from moshpit.cli.bench_worker import (
    PATTERN,
    SLICE,
    coefficients,
    error_of,
    expected,
    fill,
    resident_bytes,
    tree_cpu_s,
)
from moshpit.errors import ConfigError, LocalError

MOSHPIT = [sys.executable, "-m", "moshpit"]
SMALL = ["--peers", "2", "--mb", "1", "--rounds", "2", "--warmup", "1"]
PATIENCE_S = 200.0  # sixteen times what it takes: these start many processes


def why_no_links() -> str:
    """Try by hand what `Links` needs; return what is missing."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return "needs root and iproute2, to make network namespaces"
    name = f"moshpit-test-{os.getpid()}"
    steps = [
        f"ip netns add {name}",
        f"ip -n {name} link add probe0 type veth peer name probe1",
        f"tc -n {name} qdisc add dev probe0 root tbf rate 1mbit burst 10kb latency 50ms",
    ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                return f"not possible here: {step}: {done.stderr.strip()}"
        return ""
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def links_work() -> None:
    """Skip, with the reason, where no links can be made."""
    why = why_no_links()
    if why:
        pytest.skip(why)


def plan(**changes: object) -> Plan:
    options: dict[str, object] = {
        "peers": 4,
        "group_size": 4,
        "mb": 1.0,
        "codec": "float32",
        "schedule": "auto",
        "in_place": True,
        "plaintext": False,
        "preset": "lan",
        "link_mbit": (),
        "told": True,
        "loss_percent": 0.0,
        "rounds": 2,
        "warmup": 1,
        "compare": ("gloo",),
        "hivemind_python": None,
    }
    return Plan(**(options | changes))  # type: ignore[arg-type]


def one_round(**changes: object) -> Round:
    fields: dict[str, object] = {
        "seconds": 2.0,
        "meeting_s": 0.25,
        "moving_s": 1.5,
        "cpu_s": 3.0,
        "extra_bytes": 2 << 20,
        "bytes_sent": 3 << 19,
        "error": 1e-7,
    }
    return Round(**(fields | changes))  # type: ignore[arg-type]


def bench(tmp_path: Path, *args: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [*MOSHPIT, "bench", "averaging", *args, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done, file


# --- the values, and whether a mean is right -----------------------------------------------------


@pytest.mark.parametrize("numel", [1, PATTERN - 1, PATTERN, 3 * PATTERN + 5, SLICE + 17])
@pytest.mark.parametrize("peers", [2, 5])
def test_the_true_mean_is_found_right(numel: int, peers: int) -> None:
    vectors = [torch.empty(numel) for _ in range(peers)]
    for index, vector in enumerate(vectors):
        fill(vector, *coefficients(index, 3))
    mean = torch.stack(vectors).mean(dim=0)
    assert error_of(mean, peers, 3) < 1e-6


@pytest.mark.parametrize(
    "spoil",
    [
        lambda mean: mean.mul_(1.01),
        lambda mean: mean[SLICE + 3].add_(0.1),  # one number, not in the first slice
        lambda mean: mean.copy_(mean.roll(1)),
        lambda mean: mean[5].fill_(float("nan")),
        lambda mean: mean[5].fill_(float("inf")),
        lambda mean: fill(mean, *expected(4, 2)),  # the round before
        lambda mean: fill(mean, *expected(3, 3)),  # one peer is missing
        lambda mean: fill(mean, *coefficients(1, 3)),  # nothing was averaged
    ],
)
def test_a_wrong_mean_is_noticed(spoil: Callable[[torch.Tensor], object]) -> None:
    mean = torch.empty(2 * SLICE)
    fill(mean, *expected(4, 3))
    assert error_of(mean, 4, 3) < 1e-6
    spoil(mean)
    assert not error_of(mean, 4, 3) < 1e-4


def test_no_two_peers_and_no_two_rounds_in_a_row_have_the_same_values() -> None:
    seen = {coefficients(index, number) for index in range(64) for number in range(8)}
    assert len(seen) == 64 * 8


def test_cpu_of_children_counts() -> None:
    before = tree_cpu_s()
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_cpu_s() - before >= 0.25
        child.communicate(b"\n")


# --- the report ----------------------------------------------------------------------------------


def test_the_limit_is_that_of_the_paper() -> None:
    assert plan().limit_s is None
    # 2 (M - 1) / M · bytes / bandwidth
    equal = plan(mb=8.0, link_mbit=(100.0,) * 4)
    assert equal.limit_s == pytest.approx(1.5 * (8 << 20) / 12.5e6)
    pair = plan(peers=2, mb=8.0, link_mbit=(100.0,) * 2)
    assert pair.limit_s == pytest.approx((8 << 20) / 12.5e6)
    # ξ* = max(1 / min b, (2M - 2) / Σ b)
    unequal = plan(mb=8.0, link_mbit=(1000.0, 500.0, 200.0, 100.0))
    assert unequal.limit_s == pytest.approx((8 << 20) * max(1 / 100, 6 / 1800) / 125_000)
    nearly = plan(mb=8.0, link_mbit=(100.0, 100.0, 100.0, 99.0))
    assert nearly.limit_s == pytest.approx((8 << 20) * 6 / 399 / 125_000)


@pytest.mark.parametrize(
    ("peers", "size", "rows"), [(4, 4, 1), (16, 4, 4), (6, 4, 2), (7, 4, 1), (27, 3, 1), (64, 8, 8)]
)
def test_gloo_takes_the_grid_where_there_is_a_full_one(peers: int, size: int, rows: int) -> None:
    assert plan(peers=peers, group_size=size).rival_rows == rows


def test_figures_are_medians_shares_and_worst_cases() -> None:
    shaped = plan(link_mbit=(8 * 1.048576,) * 4)  # a vector a second
    rounds = [
        one_round(seconds=2.0),
        one_round(seconds=3.0, extra_bytes=3 << 20),
        one_round(seconds=4.0, meeting_s=None, moving_s=None, error=2e-7),
    ]
    figures = figures_of(shaped, rounds)
    assert (figures.seconds.median, figures.seconds.q1, figures.seconds.q3) == (3.0, 2.5, 3.5)
    assert figures.rounds_s == [2.0, 3.0, 4.0]
    assert (figures.meeting_s, figures.moving_s, figures.rest_s) == (0.25, 1.5, 0.75)
    assert (figures.extra_copies, figures.sent_copies) == (3.0, 1.5)
    assert figures.link_share == pytest.approx(0.5)
    assert figures.error == 2e-7


def test_ratios_are_moshpit_through_the_rival() -> None:
    rival = one_round(seconds=1.0, cpu_s=6.0, meeting_s=None, moving_s=None)
    result = result_of(plan(), machine(), {"moshpit": [one_round()], "gloo": [rival]})
    assert (result.ratios["gloo"].seconds, result.ratios["gloo"].cpu_s) == (2.0, 0.5)
    assert result.failures == []
    assert headline(result).startswith("4 peers, 1.0 MB of float32, codec float32, encrypted, loop")


@pytest.mark.parametrize(
    "wrong",
    [
        {"error": 1e-4},
        {"error": float("inf")},
        {"problems": ["moshpit 1: partial, groups of [4]"]},
    ],
)
def test_a_wrong_round_is_a_failure(wrong: dict[str, object]) -> None:
    rounds = {"moshpit": [one_round(), one_round(**wrong)], "gloo": [one_round()]}
    (said,) = failures_of(plan(), rounds)
    assert said.startswith("moshpit, round 2: ")


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [("float16", 5e-4, 5e-3), ("int8", 4e-3, 0.05), ("auto", 5e-4, 5e-3)],
)
def test_a_codec_may_lose_what_it_loses(codec: str, least: float, most: float) -> None:
    once = tolerance_of(plan(codec=codec))
    assert least < once < most
    assert tolerance_of(plan(codec=codec, peers=16)) > once  # two axes, two more encodings
    assert failures_of(plan(codec=codec), {"moshpit": [one_round(error=once)]}) == []
    # a rival's mean is float32 all the same
    (said,) = failures_of(plan(codec=codec), {"gloo": [one_round(error=once)]})
    assert said.startswith("gloo, round 1")


# --- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--codec", "morse"], "codec 'morse': there are float32"),
        (["--mb", "0"], "--mb 0: choose more than 0"),
        (["--mb", "nan"], "--mb nan: choose more than 0"),
        (["--group-size", "64", "--peers", "64"], "a group of 64: choose --group-size 2 to 63"),
        (["--preset", "moon"], "preset 'moon': choose local, lan or internet"),
        (["--compare", "gloo,smoke"], "--compare 'smoke': choose from gloo, hivemind"),
        (["--link-mbit", "fast"], "--link-mbit 'fast': write numbers from 0.1 to 100000"),
        (["--link-mbit", "nan"], "--link-mbit 'nan': write numbers"),
        (["--link-mbit", "1,2,3"], "3 numbers for 4 peers; give one, or 4"),
        (["--loss", "1"], "--loss needs --link-mbit"),
        (["--untold"], "--untold needs --link-mbit"),
        (["--json", "no/such/x.json"], "there is no folder"),
        (
            ["--compare", "hivemind", "--hivemind-python", "no/python"],
            "--hivemind-python no/python",
        ),
        (
            ["--compare", "hivemind", "--hivemind-python", "/bin/false"],
            "--compare hivemind: not installed for /bin/false",
        ),
    ],
)
def test_nonsense_is_refused_before_anything_starts(args: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "averaging", *args])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert done.stdout == ""


def test_links_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/sbin/{program}")
    with pytest.raises(ConfigError, match="needs root"):
        check_root(loss=False)


def test_links_need_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "nft" else program)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_root(loss=False)
    with pytest.raises(ConfigError, match=r"`nft` \(package nftables\)"):
        check_root(loss=True)


# --- processes -----------------------------------------------------------------------------------


def test_what_a_process_last_said_is_told() -> None:
    code = "import sys; print('no more', file=sys.stderr); sys.exit(7)"
    with Processes() as processes:
        process = processes.start("rival 3", [sys.executable, "-c", code], dict(os.environ))
        with pytest.raises(LocalError, match=r"rival 3 ended \(exit code 7\).*'joined'.*no more"):
            process.expect("joined", time.monotonic() + PATIENCE_S)


def test_no_process_and_none_of_its_children_is_left() -> None:
    code = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'event': 'started', 'pid': child.pid}), flush=True)\n"
        "time.sleep(600)\n"
    )
    with Processes() as processes:
        process = processes.start("slow", [sys.executable, "-c", code], dict(os.environ))
        event = process.expect("started", time.monotonic() + PATIENCE_S)
        with pytest.raises(LocalError, match="slow did not come to 'joined' in time"):
            process.expect("joined", time.monotonic() + 0.05)
    gone(event["pid"])


def test_a_process_ends_with_the_benchmark_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", bench_worker.__file__], stdin=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None
        worker.stdin.close()  # as the kernel does for one that was killed
        assert worker.wait(PATIENCE_S) != 0


def gone(*pids: int) -> None:
    """Wait until these processes have ended (killed ones are reaped by whoever inherits them)."""
    deadline = time.monotonic() + PATIENCE_S
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.02)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_small_run_beside_gloo(tmp_path: Path) -> None:
    done, file = bench(tmp_path, *SMALL, "--compare", "gloo")
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["peers"], result["vector_bytes"], result["failures"]) == (2, 1 << 20, [])
    assert (result["limit_s"], result["link_mbit"], result["rival_rows"]) == (None, [], 1)
    assert list(result["engines"]) == ["moshpit", "gloo"]
    ours, gloo = result["engines"]["moshpit"], result["engines"]["gloo"]
    for figures in (ours, gloo):
        assert len(figures["rounds_s"]) == 2
        assert 0 < figures["seconds"]["q1"] <= figures["seconds"]["median"]
        assert figures["cpu_s"] > 0
        assert 0 <= figures["error"] < 1e-5
        assert figures["link_share"] is None
        if resident_bytes("VmHWM") is not None:
            assert 0 <= figures["extra_copies"] < 200
    assert ours["meeting_s"] + ours["moving_s"] + ours["rest_s"] > 0
    assert ours["sent_copies"] == pytest.approx(1.0)  # (1 - w) + w: half there, half back
    ratio = result["ratios"]["gloo"]["seconds"]
    assert ratio == pytest.approx(ours["seconds"]["median"] / gloo["seconds"]["median"])
    assert "2 peers, 1.0 MB of float32, codec float32, encrypted, loopback" in done.stdout
    assert "/ gloo" in done.stdout


# --- links ---------------------------------------------------------------------------------------


def test_the_bucket_holds_what_a_late_timer_misses() -> None:
    assert bucket(100)[4] == str(128 * 1024)
    assert int(bucket(10_000)[4]) == 2_500_000


def own_namespaces(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"moshpit-bench-{pid}-")]


def peers_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(psutil.Error):  # one that ends meanwhile
        for child in psutil.Process(pid).children():
            if "moshpit.cli.bench_peer" in child.cmdline():
                found.append(child.pid)
    return found


@pytest.mark.root
@pytest.mark.usefixtures("links_work")
def test_links_that_fail_halfway_leave_nothing() -> None:
    speeds = [100.0, float(10**14)]  # the second one is more than `tc` can count
    with pytest.raises(LocalError, match="`tc -n moshpit-bench-"), Links(speeds):
        pass
    assert own_namespaces(os.getpid()) == []


@pytest.mark.root
@pytest.mark.usefixtures("links_work")
def test_what_a_killed_run_left_is_deleted_by_the_next() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = f"moshpit-bench-{dead.pid}-abcdef-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with Links([100.0, 100.0]) as links:
        assert left not in namespaces()
        assert len(own_namespaces(os.getpid())) == 3
        assert len(set(links.hosts)) == 2
    assert own_namespaces(os.getpid()) == []


@pytest.mark.soak
@pytest.mark.root
@pytest.mark.usefixtures("links_work")
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_small_run_on_unequal_links(tmp_path: Path) -> None:
    done, file = bench(tmp_path, *SMALL, "--link-mbit", "40,20", "--compare", "gloo")
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["link_mbit"] == [40.0, 20.0]
    assert result["limit_s"] == pytest.approx((1 << 20) / 2.5e6)
    for figures in result["engines"].values():
        # The bucket's burst and the queue let a little through at once: 128 KB of 1 MB, twice.
        assert 0 < figures["link_share"] < 1.5
        assert figures["seconds"]["median"] > result["limit_s"] / 1.5
    assert "links of 40, 20 Mbit/s" in done.stdout


@pytest.mark.root
@pytest.mark.usefixtures("links_work")
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)]
)
def test_a_run_that_is_stopped_deletes_its_links_and_processes(number: signal.Signals) -> None:
    args = ["--peers", "2", "--mb", "64", "--link-mbit", "1"]  # would take a quarter of an hour
    with subprocess.Popen([*MOSHPIT, "bench", "averaging", *args]) as run:
        deadline = time.monotonic() + PATIENCE_S
        children: list[int] = []
        while len(children) < 2 or len(own_namespaces(run.pid)) < 3:
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
            children = peers_of(run.pid)
        run.send_signal(number)
        assert run.wait(PATIENCE_S) == 128 + number
        assert own_namespaces(run.pid) == []
        gone(*children)

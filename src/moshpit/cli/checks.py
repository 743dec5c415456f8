"""What `moshpit doctor` looks at on this machine: versions, memory, limits, clock.

A check is a function that looks and returns what it found, how bad that is, and what to do.
None of them changes anything, and none speaks to another machine.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

from moshpit.cli.parse import human_bytes
from moshpit.config import TransportConfig

PARTS = ("moshpit", "torch", "numpy", "msgspec", "cryptography", "safetensors")
MEMORY_BYTES_MIN = 1 << 30  # guess: torch alone takes a third of it
CLOCK_FLOOR_S = 1_767_225_600  # the start of 2026: no clock that is right shows less
_STA_UNSYNC = 0x0040  # linux/timex.h


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, but slower, or not for everything."""
    FAIL = "fail"
    """This has to be mended first."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor: what was looked at, what was found, and what to do."""

    subject: str
    status: Status
    found: str
    advice: str = ""
    figures: Mapping[str, object] = field(default_factory=dict[str, object])
    """What was measured, for programs; names carry units."""


def check_python() -> Check:
    """Which Python this is; packaging has seen to it that it is new enough."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    return Check("python", Status.OK, found)


def check_packages() -> Check:
    """Which versions of the parts that matter are installed."""
    found, missing = list[str](), list[str]()
    for name in PARTS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = f"missing: {', '.join(missing)}; install moshpit again, with its dependencies"
        return Check("packages", Status.FAIL, ", ".join(found), advice)
    return Check("packages", Status.OK, ", ".join(found))


def check_torch() -> Check:
    """Whether torch works, and on what."""
    try:
        import torch

        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.backends.mps.is_available():
            devices.append("mps")
        total = float(torch.ones(4).sum())
    except Exception as error:  # a broken install raises anything: ImportError, OSError, ...
        return Check("torch", Status.FAIL, str(error), "install torch again")
    if total != 4.0:
        return Check("torch", Status.FAIL, f"1+1+1+1 = {total}", "install torch again")
    threads = f"{torch.get_num_threads()} threads"
    return Check("torch", Status.OK, f"works on {', '.join(devices) or 'cpu'}, {threads}")


def check_uvloop() -> Check:
    """Whether the faster event loop is there."""
    if importlib.util.find_spec("uvloop") is None:
        return Check(
            "uvloop", Status.WARN, "not installed: the network costs a third more CPU",
            "pip install uvloop (not on Windows)",
        )  # fmt: skip
    return Check("uvloop", Status.OK, f"uvloop {version('uvloop')}")


def check_cpu() -> Check:
    """How many cores there are, and whether they are busy already."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    load = os.getloadavg()[0]
    found = f"{cores} cores, load {load:.1f}"
    if load > 1.5 * cores:
        return Check(
            "cpu", Status.WARN, found,
            "other programs use the cores; training and answering peers will both be slow",
        )  # fmt: skip
    if cores == 1:
        return Check(
            "cpu", Status.WARN, found, "with one core the network takes its time from training"
        )
    return Check("cpu", Status.OK, found)


def check_memory() -> Check:
    """Whether there is room for a model and three copies of its parameters."""
    import psutil

    memory = psutil.virtual_memory()
    found = f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}"
    if memory.available < MEMORY_BYTES_MIN:
        return Check("memory", Status.WARN, found, "averaging holds up to three copies of a model")
    return Check("memory", Status.OK, found)


def check_open_files() -> Check:
    """Whether the process may open a socket for every link."""
    limits = TransportConfig()
    needed = 2 * limits.links_max + limits.unauthenticated_max + 128
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} allowed" + ("" if soft == hard else f", up to {hard} on request")
    if soft != resource.RLIM_INFINITY and soft < needed:
        advice = f"ulimit -n {needed} before starting (a peer may hold {needed} files)"
        return Check("open files", Status.WARN, found, advice)
    return Check("open files", Status.OK, found)


def check_clock() -> Check:
    """Whether this machine's clock can be right. Tickets expire by it, nothing else uses it."""
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < CLOCK_FLOOR_S:
        advice = "set the clock: every ticket with an expiry looks as if it never ended"
        return Check("clock", Status.FAIL, shown, advice)
    synchronised = clock_synchronised()
    if synchronised is None:
        return Check("clock", Status.OK, f"{shown}; this system does not say if it is synchronised")
    if not synchronised:
        advice = "start a time service (systemd-timesyncd, chrony): tickets expire by the clock"
        return Check("clock", Status.WARN, f"{shown}, not synchronised", advice)
    return Check("clock", Status.OK, f"{shown}, synchronised")


def clock_synchronised() -> bool | None:
    """Return what the kernel knows of its clock (Linux; None elsewhere, or if it will not say)."""
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = (ctypes.c_char * 512)()  # struct timex is 208 bytes at most; modes = 0 only reads
        state = libc.adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    # struct timex { unsigned modes; long offset, freq, maxerror, esterror; int status; ... }
    at = 5 * ctypes.sizeof(ctypes.c_long)
    status = int.from_bytes(timex.raw[at : at + 4], sys.byteorder)
    return not status & _STA_UNSYNC


LOCAL_CHECKS: Sequence[Callable[[], Check]] = (
    check_python,
    check_packages,
    check_torch,
    check_uvloop,
    check_cpu,
    check_memory,
    check_open_files,
    check_clock,
)

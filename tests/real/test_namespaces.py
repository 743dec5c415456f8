"""The little internet of the tests does what it says: NAT, cuts, loss, bandwidth, no remains."""

from __future__ import annotations

import subprocess
import sys
import time

from .namespaces import Machine, internet, needs_namespaces, run

TALK = """
import socket, sys
host, size, patience_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with socket.create_connection((host, 7000), timeout=patience_s) as s:
    s.sendall(bytes(size))
    s.shutdown(socket.SHUT_WR)
    print(s.recv(100).decode())
"""
LISTEN = """
import socket, time
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("listening", flush=True)
    while True:
        s, (host, _) = server.accept()
        start, size = time.perf_counter(), 0
        with s:
            while data := s.recv(1 << 16):
                size += len(data)
            s.sendall(f"{host} {size} {time.perf_counter() - start}".encode())
"""


def silent(machine: Machine, host: str) -> bool:
    return talk(machine, host, patience_s=0.3)[0] == ""


def listen(machine: Machine) -> subprocess.Popen[str]:
    command = machine.inside(sys.executable, "-c", LISTEN)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    server.stdout.close()
    return server


def talk(machine: Machine, host: str, size: int = 1, patience_s: float = 30.0) -> tuple[str, float]:
    """Return as whom the server sees a machine, and how long the bytes took; "" without answer."""
    command = machine.inside(sys.executable, "-c", TALK, host, str(size), str(patience_s))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        return "", 0.0
    seen, got, took = done.stdout.split()
    assert int(got) == size
    return seen, float(took)


@needs_namespaces
def test_an_internet_in_namespaces() -> None:
    with internet() as net:
        public, far, router = net.machine(), net.machine(), net.router()
        hidden = router.machine()
        servers = [listen(machine) for machine in (public, hidden)]
        assert talk(hidden, public.address)[0] == router.address
        assert silent(public, router.address), "nobody gets in"
        router.forward(7000, hidden)
        assert talk(far, router.address)[0] == far.address
        router.unforward()
        assert silent(far, router.address)

        net.cut([public], [router])
        assert silent(hidden, public.address)
        assert talk(far, public.address)[0] == far.address
        net.heal()
        net.cut([far], [public], one_way=True)
        assert silent(far, public.address)
        net.heal()
        assert talk(far, public.address)[0] == far.address

        far.shape(8, None)  # a megabyte per second
        assert talk(far, public.address, 1 << 20)[1] > 0.6
        far.shape(None, None)
        far.lose(1.0)
        assert silent(far, public.address)
        far.lose(0.0)
        assert talk(far, public.address)[0] == far.address
        name = net.name
    for server in servers:
        assert server.wait(10) < 0, "they end with their namespace"
    assert name not in run("ip", "netns", "list")


@needs_namespaces
def test_the_next_test_removes_what_a_killed_one_has_left() -> None:
    code = (
        "import time; from tests.real.namespaces import internet\n"
        "with internet() as net:\n  net.machine()\n  print(net.name, flush=True)\n"
        "  time.sleep(600)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    name = killed.stdout.readline().strip()
    killed.kill()
    killed.wait()
    killed.stdout.close()
    assert name in run("ip", "netns", "list")
    began = time.monotonic()
    with internet():
        assert name not in run("ip", "netns", "list"), time.monotonic() - began

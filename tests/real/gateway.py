"""A router that speaks UPnP: Debian's miniupnpd, in the namespace of a `Router`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .namespaces import BRIDGE, WIRE, Router

SETTINGS = f"""
ext_ifname={WIRE}
listening_ip={BRIDGE}
http_port=0
enable_upnp=yes
enable_natpmp=no
secure_mode=yes
uuid=2d395469-e163-47fd-869f-d74c18f0d62c
upnp_table_name=upnp
upnp_nat_table_name=upnp
upnp_forward_chain=through
upnp_nat_chain=in
upnp_nat_postrouting_chain=out
allow 1024-65535 0.0.0.0/0 1024-65535
"""


def needs_gateway(test: object) -> object:
    """Mark a test that is skipped where there is no miniupnpd, or no package that asks it."""
    missing = ""
    if shutil.which("miniupnpd") is None:
        missing = "needs the program miniupnpd"
    elif importlib.util.find_spec("miniupnpc") is None:
        missing = "needs the package miniupnpc (the extra `upnp`)"
    return pytest.mark.skipif(bool(missing), reason=missing)(test)


@contextmanager
def upnp(router: Router, folder: Path) -> Iterator[None]:
    """Have a router open ports when it is asked to."""
    router.nft(
        "add table inet upnp; "
        "add chain inet upnp through { type filter hook forward priority 0 ; }; "
        "add chain inet upnp in { type nat hook prerouting priority -100 ; }; "
        "add chain inet upnp out { type nat hook postrouting priority 100 ; }"
    )
    settings, said = folder / "miniupnpd.conf", folder / "miniupnpd.log"
    settings.write_text(SETTINGS)
    command = ["miniupnpd", "-d", "-f", str(settings), "-P", str(folder / "miniupnpd.pid")]
    with said.open("w") as log:
        server = subprocess.Popen(router.inside(*command), stdout=log, stderr=log)
    try:
        yield
    finally:
        assert server.poll() is None, said.read_text()
        server.kill()
        server.wait()


def forwarded(router: Router) -> dict[int, str]:
    """Return which ports of a router lead where, as UPnP has set it."""
    rules = router.run("nft", "list", "chain", "inet", "upnp", "in")
    found: dict[int, str] = {}
    for rule in rules.splitlines():
        words = rule.split()
        if "dnat" in words:
            found[int(words[words.index("dport") + 1])] = words[words.index("to") + 1]
    return found

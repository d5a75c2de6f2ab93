"""A private network for emulated jobs: one bridge on this machine, one address for each job, no way out.

Needs root. The bridge is the Hub's own; a job's interface lies in the job's network namespace and goes with it. Nothing
of the machine's routing, forwarding or firewall is touched: jobs see the Hub and each other, and that is all.
"""

import ipaddress
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

PREFIX = "bgj"


class NetworkRefused(Exception):
    """Namespaces, bridges or veth pairs can't be had here; the message says which and why."""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=10)
    if done.returncode:
        raise NetworkRefused(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class JobNetwork:
    """A bridge with a /16 of its own. `close` removes it, and with it nothing that it did not make."""

    def __init__(self) -> None:
        _check_rights()
        _remove_stale()
        self.bridge = f"{PREFIX}{os.getpid()}"
        self.subnet = _free_subnet()
        self._taken: set[int] = {0, 1, self.subnet.num_addresses - 1}
        self.address = str(self.subnet[1])
        _ip("link", "add", self.bridge, "type", "bridge")
        try:
            _ip("addr", "add", f"{self.address}/{self.subnet.prefixlen}", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
        except NetworkRefused:
            self.close()
            raise

    def take(self) -> str:
        """A free address; give it back with `give_back`."""
        number = next(n for n in range(2, self.subnet.num_addresses) if n not in self._taken)
        self._taken.add(number)
        return str(self.subnet[number])

    def give_back(self, address: str) -> None:
        self._taken.discard(int(ipaddress.ip_address(address)) - int(self.subnet[0]))

    def connect(self, pid: int) -> str:
        """Give the network namespace of process `pid` an `eth0` on the bridge; returns the interface's name here."""
        veth = f"{PREFIX}{secrets.token_hex(5)}"
        _ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _ip("link", "set", veth, "master", self.bridge)
        _ip("link", "set", veth, "up")
        return veth

    def close(self) -> None:
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False, timeout=10)


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise NetworkRefused("network namespaces with an address of their own need root")
    if shutil.which("ip") is None:
        raise NetworkRefused("the command `ip` is missing (Debian: apt-get install iproute2)")


def _free_subnet() -> ipaddress.IPv4Network:
    """A /16 below 10.0.0.0/8 that no interface of this machine uses."""
    used = {int(second) for second in re.findall(r"\b10\.(\d+)\.", _ip("-o", "-4", "addr") + _ip("-4", "route"))}
    free = [second for second in range(64, 250) if second not in used]
    return ipaddress.IPv4Network(f"10.{secrets.choice(free)}.0.0/16")


def _remove_stale() -> None:
    """A Hub that was killed left its bridge: remove those whose process is gone."""
    for path in Path("/sys/class/net").iterdir():
        match = re.fullmatch(rf"{PREFIX}(\d+)", path.name)
        if match and (path / "bridge").exists() and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["ip", "link", "del", path.name], capture_output=True, check=False, timeout=10)

"""A network of hosts on one machine: a namespace each, a switch, slow links.

Nothing but the names of the namespaces is visible outside of them: the bridge
that joins the hosts stands in a namespace of its own.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
  """A link's rate, and how finely the kernel keeps it.

  The token bucket is what a link lends after idling: here a millisecond's
  worth, so that the headers of frames outweigh it in a transfer of 30 ms, and a
  busy machine is still in time to refill it. A bucket must hold a packet as the
  kernel hands it over, with the headers of all the frames that it becomes, or
  every packet is split; so packets are smaller where the bucket is.
  """

  bytes_per_s: float
  burst: int
  packet: int


_PACKET = 64 << 10  # The kernel's default.

RATES: dict[str, Rate | None] = {
  "50mbit": Rate(50e6 / 8, burst=32 << 10, packet=16 << 10),
  "200mbit": Rate(200e6 / 8, burst=32 << 10, packet=16 << 10),
  "1gbit": Rate(1e9 / 8, burst=128 << 10, packet=_PACKET),
  "10gbit": Rate(10e9 / 8, burst=1 << 20, packet=_PACKET),
  "unlimited": None,
}


def least_s(size: float, rate: str) -> float:
  """Returns the seconds that bytes need on a link; 0 where it has no limit."""
  limit = RATES[rate]
  return size / limit.bytes_per_s if limit else 0.0


# What waits for tokens. No packet is dropped before this many bytes wait: the
# sockets' own buffers, 4 MB each, fill first.
_QUEUE = 64 << 20

# The pid is that of the process whose namespace it is.
_NAME = re.compile(r"zenjax-(?P<pid>\d+)-[0-9a-f]{6}-(switch|\d+)")
_FILES = pathlib.Path("/etc/netns")  # `ip netns exec` mounts them over /etc.


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
  """Bytes of a host's interface since it was made.

  As the kernel hands them over: up to 64 kB under one header. On a wire that
  would be up to 45 frames with a header each.
  """

  sent_bytes: int
  received_bytes: int


class Network:
  """`hosts` namespaces that reach each other at `addresses`."""

  def __init__(self, hosts: int):
    self.addresses = [f"10.0.0.{i + 1}" for i in range(hosts)]
    self._made: list[str] = []
    self._limited = False
    prefix = _free_prefix()
    self._switch = f"{prefix}-switch"
    self._hosts = [f"{prefix}-{i}" for i in range(hosts)]

  def create(self) -> None:
    """Makes the namespaces and links; `close` is due also if it fails."""
    self._add_namespace(self._switch)
    _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", self._switch, "link", "set", "br0", "addrgenmode", "none", "up")
    for i, (host, address) in enumerate(zip(self._hosts, self.addresses)):
      self._add_namespace(host)
      self._add_hosts_file(host, address)
      self._add_link(host, f"port{i}", address)

  def _add_namespace(self, name):
    _ip("netns", "add", name)  # Fails if there is one: it is not ours then.
    self._made.append(name)

  def _add_hosts_file(self, host, address):
    # Programs (gloo) listen on the address that the host's own name has, and
    # the name is the machine's, the same in every namespace.
    directory = _FILES / host
    directory.mkdir(parents=True)
    names = f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n"
    names += "".join(f"{a} host{i}\n" for i, a in enumerate(self.addresses))
    (directory / "hosts").write_text(names, encoding="utf-8")

  def _add_link(self, host, port, address):
    switch = ("-n", self._switch, "link")
    peer = ("peer", "name", "eth0", "netns", host)
    _ip(*switch, "add", port, "type", "veth", *peer)
    # No address of IPv6: its discovery would show up in the counters.
    up = ("addrgenmode", "none", "up")
    _ip(*switch, "set", port, "master", "br0", *up)
    _ip("-n", host, "link", "set", "eth0", *up)
    _ip("-n", host, "link", "set", "lo", "up")
    _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
    # The machine's choice may pace by itself; what limits here is the link.
    setting = "net.ipv4.tcp_congestion_control=reno"
    _run(*self.inside(self._hosts.index(host)), "sysctl", "-qw", setting)

  def set_rate(self, name: str) -> None:
    """Limits sending and receiving of every host to `RATES[name]`."""
    rate = RATES[name]
    packet = str(rate.packet if rate else _PACKET)
    for i, host in enumerate(self._hosts):
      _ip("-n", host, "link", "set", "eth0", "gso_max_size", packet)
      # Connections ask for the size anew when their route is looked up anew.
      _ip("-n", host, "route", "flush", "cache")
      # A queue shapes what leaves an interface: what the host sends leaves its
      # own end, what it receives leaves the switch's.
      for namespace, device in ((host, "eth0"), (self._switch, f"port{i}")):
        tc, where = ("tc", "-n", namespace, "qdisc"), ("dev", device, "root")
        if rate:
          bucket = ("rate", name, "burst", f"{rate.burst}b")
          shaped = ("handle", "1:", "tbf", *bucket, "limit", f"{_QUEUE}b")
          _run(*tc, "replace", *where, *shaped)
        elif self._limited:
          _run(*tc, "delete", *where)
    self._limited = rate is not None

  def inside(self, host: int) -> list[str]:
    """Returns the words before a command that is to run on `host`."""
    return ["ip", "netns", "exec", self._hosts[host]]

  def free_port(self, host: int) -> int:
    """One that nothing on `host` uses, nor the kernel gives to connections."""
    sockets = _run("ss", "-N", self._hosts[host], "-Htan").splitlines()
    taken = {line.split()[3].rpartition(":")[2] for line in sockets}
    return next(p for p in range(20000, 32768) if str(p) not in taken)

  def counters(self) -> list[Counters]:
    """Returns those of every host."""
    show = ("-s", "-j", "link", "show", "eth0")
    links = [json.loads(_ip("-n", host, *show))[0] for host in self._hosts]
    both = [[x["stats64"][way]["bytes"] for way in ("tx", "rx")] for x in links]
    return [Counters(*sent_and_received) for sent_and_received in both]

  def close(self) -> None:
    """Deletes what `create` made, and nothing else."""
    with contextlib.ExitStack() as stack:  # One failure does not end it.
      while self._made:
        stack.callback(_delete, self._made.pop(0))


def clean() -> list[str]:
  """Deletes what processes that were killed left; returns their names."""
  left = list(filter(_is_left, _names()))
  for name in left:
    _delete(name)
  return left


def require() -> None:
  """Raises RuntimeError if this machine or user cannot have namespaces."""
  missing = [
    f"`{x}`" for x in ("ip", "ss", "tc", "sysctl") if not shutil.which(x)
  ]
  needs = [f"{', '.join(missing)} (iproute2, procps)"] if missing else []
  if os.geteuid() != 0:
    needs.append("to run as root")
  if needs:
    raise RuntimeError(
      f"A testbed of network namespaces needs {' and '.join(needs)}. Use"
      " `loopback=True` (`--loopback`) for processes on 127.0.0.1, whose rate"
      " is not limited."
    )


def _free_prefix():
  taken = {name.rpartition("-")[0] for name in _names()}
  while True:
    prefix = f"zenjax-{os.getpid()}-{secrets.token_hex(3)}"
    if prefix not in taken:
      return prefix


def _names():
  """Namespaces, and files for them, that are there: ours and others'."""
  return sorted(_namespaces() | {file.name for file in _FILES.glob("*")})


def _namespaces():
  known = json.loads(_ip("-j", "netns", "list") or "[]")  # Nothing for none.
  return {namespace["name"] for namespace in known}


def _is_left(name):
  if not (match := _NAME.fullmatch(name)):
    return False
  try:
    stat = pathlib.Path(f"/proc/{match['pid']}/stat").read_text()
  except FileNotFoundError:
    return True
  return stat.rpartition(")")[2].split()[0] == "Z"  # Ended, not collected.


def _delete(name):
  if name in _namespaces():
    # A namespace without a name lives on while a process is in it.
    for pid in _ip("netns", "pids", name).split():
      with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", name)
  if (_FILES / name).is_dir():
    shutil.rmtree(_FILES / name)


def _ip(*arguments):
  return _run("ip", *arguments)


def _run(*command):
  # In a session of its own Ctrl-C does not reach it: no step ends half done.
  done = subprocess.run(
    command, capture_output=True, text=True, start_new_session=True, check=False
  )
  if done.returncode:
    raise RuntimeError(
      f"`{' '.join(command)}` failed ({done.returncode}):"
      f" {done.stderr.strip() or done.stdout.strip()}. Network namespaces need"
      " root's full rights; `loopback=True` (`--loopback`) needs none."
    )
  return done.stdout

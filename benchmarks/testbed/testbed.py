"""Several hosts on one machine, joined by links of a known rate.

    with Testbed(hosts=4, rate="200mbit") as bed:
      print(bed.probe())
      bed.start([sys.executable, "worker.py"])
      replies = bed.ask({"steps": 10})

On the command line `python -m benchmarks.testbed`; see `benchmarks/README.md`.
"""

import atexit
from collections.abc import Mapping, Sequence
import contextlib
import os
import pathlib
import socket
import sys
import tempfile
from typing import Any

from benchmarks import table
from benchmarks.testbed import hosts as hosts_lib
from benchmarks.testbed import interrupts
from benchmarks.testbed import netns
from benchmarks.testbed import probe as probe_lib
from benchmarks.testbed.probe import Links

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LOOPBACK = "127.0.0.1"
MOST_HOSTS = 16


class Testbed:
  """Hosts to start processes on, and links whose rate can be set.

  All of it is gone when the `with` block ends, however it ends; if the process
  itself is killed, its hosts are too, and `netns.clean()` deletes namespaces
  that are left. Enter it in a thread that outlives it, best the main one: the
  hosts end with the thread that started them.

  There are 2 to 16. `rate`, of `netns.RATES`, is that of every link in both
  directions. With `loopback` hosts are mere processes on 127.0.0.1, which needs
  neither root nor Linux; `rate` must then be "unlimited".
  """

  __test__ = False  # No test, whatever pytest thinks of the name.

  def __init__(
    self, hosts: int = 4, rate: str = "200mbit", loopback: bool = False
  ):
    require(hosts, rate, loopback)
    self.hosts, self.rate, self.loopback = hosts, rate, loopback
    self._network: netns.Network | None = None
    self._running = hosts_lib.Hosts()
    self._logs: pathlib.Path | None = None

  def __enter__(self) -> "Testbed":
    self._life = self._live()
    self._life.__enter__()
    return self

  def __exit__(self, *raised) -> None:
    self._life.__exit__(*raised)

  @contextlib.contextmanager
  def _live(self):
    with interrupts.sigterm_unwinds(), contextlib.ExitStack() as stack:
      try:
        with interrupts.held():
          # Also if Ctrl-C comes between this and the `with` block.
          atexit.register(stack.close)
          self._set_up(stack)
        yield
      finally:
        with interrupts.held():
          self._logs = None
          stack.close()
          atexit.unregister(stack.close)

  def _set_up(self, stack):
    logs = tempfile.TemporaryDirectory(prefix="zenjax-testbed-")
    self._logs = pathlib.Path(stack.enter_context(logs))
    if not self.loopback:
      self._network = netns.Network(self.hosts)
      stack.callback(self._network.close)
      self._network.create()
      self._network.set_rate(self.rate)
    stack.callback(self.stop)

  def set_rate(self, rate: str) -> None:
    """Sets the rate of all links, under whatever runs."""
    _require_rate(rate, self.loopback)
    if self._network is not None:
      self._network.set_rate(rate)
    self.rate = rate

  def counters(self) -> list[netns.Counters] | None:
    """Returns the counters of every host's interface; None on loopback."""
    return None if self._network is None else self._network.counters()

  def start(
    self,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    merge_stderr: bool = False,
  ) -> list[hosts_lib.Host]:
    """Starts a command on every host, with pipes as its stdin and stdout.

    Its environment is this process's, with this repository on PYTHONPATH,
    `env`, ZENJAX_HOST_INDEX, ZENJAX_HOST_COUNT, and as ZENJAX_COORDINATOR a
    free address:port of host 0.
    stderr goes to the host's log, or with `merge_stderr` where stdout goes.
    """
    if self._running:
      raise RuntimeError("One command at a time: call `stop()` before `start`.")
    with interrupts.held():
      self._running = self._launch(argv, env or {}, merge=merge_stderr)
    return list(self._running)

  def stop(self) -> None:
    """Kills what was started and still runs, with all that it started."""
    self._running.end()

  def watch(self, timeout: float | None = None) -> None:
    """Waits until all have ended with 0; raises HostDied or TimeoutError."""
    self._running.watch(timeout)

  def ask(self, message: Any, timeout: float = 60.0) -> list[Any]:
    """Writes one line of JSON to every host and reads one from each.

    Raises HostDied as soon as one ends, TimeoutError after `timeout` seconds;
    `stop` the hosts then, as late replies would pass for those to come.
    """
    if not self._running:
      raise RuntimeError("Nobody to ask: call `start` before `ask`.")
    return self._running.ask(message, timeout)

  def probe(self, bytes: int | None = None, repeats: int = 5) -> Links:
    """Measures what the links give; RuntimeError if one beats its rate.

    By `repeats` transfers back to back, and as many after idling, of so many
    bytes of payload, by default what takes 30 ms.
    """
    argv = [sys.executable, "-m", "benchmarks.testbed.probe"]
    peers = hosts_lib.Hosts()
    try:
      with interrupts.held():
        peers = self._launch(argv, {})
      rate = netns.RATES[self.rate]
      return probe_lib.measure(peers, rate, bytes=bytes, repeats=repeats)
    finally:
      with interrupts.held():
        peers.end()

  def _launch(self, argv, env, *, merge=False):
    if self._logs is None:
      raise RuntimeError("A testbed has hosts in its `with` block only.")
    if self._network is not None:
      addresses = self._network.addresses
      places = [self._network.inside(i) for i in range(self.hosts)]
      port = self._network.free_port(0)
    else:
      addresses, places = [_LOOPBACK] * self.hosts, [[]] * self.hosts
      with socket.socket() as s:
        s.bind((_LOOPBACK, 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    same = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)} | env
    same["ZENJAX_COORDINATOR"] = f"{addresses[0]}:{port}"
    same["ZENJAX_HOST_COUNT"] = str(self.hosts)
    environments = [
      same | {"ZENJAX_HOST_INDEX": str(i), "ZENJAX_HOST_ADDRESS": address}
      for i, address in enumerate(addresses)
    ]
    logs = pathlib.Path(tempfile.mkdtemp(dir=self._logs))
    return hosts_lib.start(argv, places, environments, logs, merge=merge)


def require(hosts: int, rate: str, loopback: bool) -> None:
  """Raises ValueError or RuntimeError if there can be no such testbed here."""
  if hosts not in range(2, MOST_HOSTS + 1):
    raise ValueError(
      f"`hosts` must be 2 to {MOST_HOSTS}, got {hosts!r}; choose a number in"
      " it."
    )
  _require_rate(rate, loopback)
  if not loopback:
    netns.require()


def _require_rate(rate, loopback):
  if rate not in netns.RATES:
    known = ", ".join(map(repr, netns.RATES))
    raise ValueError(f"`rate` must be one of {known}, got {rate!r}.")
  if loopback and rate != "unlimited":
    raise ValueError(
      "`rate` must be 'unlimited' with `loopback=True`, where nothing limits"
      f" it, got {rate!r}; limited links need `loopback=False` and root."
    )


def show(bed: Testbed, links: Links) -> None:
  """Prints what the links gave."""
  megabit = 8e-6
  told = (
    ("latency, us", links.latency_s, 1e6),
    ("Mbit/s back to back", links.bandwidth_Bps, megabit),
    ("Mbit/s after 100 ms idle", links.idle_bandwidth_Bps, megabit),
  )
  names = ("min", "median", "max")
  table.show_rows(
    f"{bed.hosts} hosts, {bed.rate}: links from each host to the next,"
    f" all at once, {links.bytes:,} bytes a transfer",
    ("", *names),
    [[x, *(f"{getattr(s, n) * u:,.1f}" for n in names)] for x, s, u in told],
  )

"""One process a host, spoken to in lines of JSON, and never waited for in vain.

Whoever waits for a host watches all of them: the first that ends too early ends
the wait.
"""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.testbed import interrupts

_TETHER = pathlib.Path(__file__).with_name("tether.py")
_POLL_S = 0.05
_REPLY_POLL_S = 0.005
_LOG_LINES = 20


class HostDied(RuntimeError):
  """A host's process ended when it should have gone on.

  With an exit status, negative for the signal that killed it, and the last
  lines of its log.
  """

  def __init__(self, host: int, status: int, log: str):
    self.host, self.status = host, status
    how = f"with status {status}"
    if status < 0:
      how = f"by {signal.Signals(-status).name}"
    super().__init__(f"Host {host} ended {how}; its log ends:\n{log}")


class Host:
  """A running process, with pipes as its stdin and stdout.

  `lines` has what it printed, line by line, then None; stderr goes to `log`.
  """

  def __init__(
    self,
    index: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: pathlib.Path,
    *,
    merge: bool = False,
  ):
    self.index, self.log = index, log
    self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with open(log, "ab") as f:  # `Hosts.ask` adds to it too.
      # A session of its own: Ctrl-C reaches the controller only, which ends
      # the hosts and whatever they have started.
      self.process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge else f,
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
        bufsize=1,
      )
    threading.Thread(target=self._read, daemon=True).start()

  def _read(self):
    assert self.process.stdout is not None
    with self.process.stdout as lines:
      for line in lines:
        self.lines.put(line)
    self.lines.put(None)

  def status(self) -> int | None:
    """Its exit status, None while it runs."""
    # Popen keeps its lock for ever if Ctrl-C ends `poll` at a bad moment.
    with interrupts.held():
      return self.process.poll()

  def died(self, *, status: int | None = None) -> HostDied:
    """The error that says how; waits for a process that is just ending."""
    if status is None:
      try:
        with interrupts.held():
          status = self.process.wait(timeout=5)
      except subprocess.TimeoutExpired:
        raise RuntimeError(
          f"Host {self.index} closed its stdin or stdout and runs on; its"
          " process must keep both open until it ends."
        ) from None
    return HostDied(self.index, status, self.tail(_LOG_LINES))

  def tail(self, count: int) -> str:
    """Returns the last lines of its log."""
    lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-count:]) or "-"

  def write(self, line: str, deadline: float) -> None:
    """Writes a line, unless the host has ended or does not read."""
    assert self.process.stdin is not None
    pipe = self.process.stdin.fileno()
    left = line.encode()
    while left:
      wait = max(0.0, deadline - time.monotonic())
      if not select.select([], [pipe], [], wait)[1]:
        raise TimeoutError(f"Host {self.index} does not read its stdin.")
      try:
        # A pipe that is ready takes this much without blocking.
        left = left[os.write(pipe, left[: select.PIPE_BUF]) :]
      except BrokenPipeError:
        raise self.died() from None

  def end(self) -> None:
    """Kills it and what it started, if they still run."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()
    assert self.process.stdin is not None
    self.process.stdin.close()


class Hosts(list[Host]):
  """The processes of one program, host 0 first."""

  def check(self) -> None:
    """Raises HostDied if any has ended, with whatever status."""
    self._raise_if(lambda status: status is not None)

  def watch(self, timeout: float | None = None) -> None:
    """Waits until all have ended well; raises HostDied at the first failure."""
    deadline = _deadline(timeout)
    while True:
      self._raise_if(bool)
      running = [host.index for host in self if host.status() is None]
      if not running:
        return
      if time.monotonic() > deadline:
        raise TimeoutError(f"Hosts {running} still run after {timeout} s.")
      time.sleep(_POLL_S)

  def ask(self, message: Any, timeout: float = 60.0) -> list[Any]:
    """Sends a line of JSON to every host; returns the one that each replies.

    Within `timeout` seconds. Lines that are no JSON go to the host's log.
    """
    self.check()
    deadline = _deadline(timeout)
    for host in self:
      host.write(json.dumps(message) + "\n", deadline)
    replies: dict[int, Any] = {}
    while True:
      for host in self:
        self._take(host, replies)
      self._raise_if(bool)
      missing = [host.index for host in self if host.index not in replies]
      if not missing:
        return [replies[host.index] for host in self]
      if time.monotonic() > deadline:
        raise TimeoutError(f"No reply within {timeout} s from hosts {missing}.")
      time.sleep(_REPLY_POLL_S)

  def _take(self, host, replies):
    """Adds the reply of a host if it is there."""
    while host.index not in replies and not host.lines.empty():
      line = host.lines.get()
      if line is None:
        raise host.died()
      try:
        replies[host.index] = json.loads(line)
      except ValueError:  # Gloo, for one, greets on stdout.
        with open(host.log, "a", encoding="utf-8") as f:
          f.write(line)

  def _raise_if(self, bad):
    for host in self:
      status = host.status()
      if bad(status):
        raise host.died(status=status)

  def end(self) -> None:
    """Kills all that still run."""
    while self:
      self[-1].end()
      self.pop()


def start(
  argv: Sequence[str],
  places: Sequence[Sequence[str]],
  environments: Sequence[Mapping[str, str]],
  logs: pathlib.Path,
  *,
  merge: bool = False,
) -> Hosts:
  """Starts `argv` on every host: `places` have what it starts with there.

  The directory `logs` gets a log a host, in which stderr is unless `merge` has
  it go where stdout goes.
  """
  hosts = Hosts()
  tether = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid())]
  try:
    for i, (place, env) in enumerate(zip(places, environments, strict=True)):
      command, log = [*place, *tether, *argv], logs / f"host-{i}.log"
      hosts.append(Host(i, command, env, log, merge=merge))
  except BaseException:
    hosts.end()
    raise
  return hosts


def answer(worker: Any) -> None:
  """On a host: does what each line of stdin says until there are no more."""
  for line in sys.stdin:
    message = json.loads(line)
    reply = getattr(worker, message.pop("do"))(**message)
    print(json.dumps(reply), flush=True)


def _deadline(timeout):
  return float("inf") if timeout is None else time.monotonic() + timeout

"""Measures links: plain TCP between all hosts at once, each to the next one.

`measure` asks a process of this module on every host to send to the next host
while it receives from the one before, as a collective does.
"""

import contextlib
import dataclasses
import os
import socket
import statistics
import sys
import threading
import time

from benchmarks.testbed import hosts as hosts_lib
from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.netns import Rate

# No NumPy here: eight of these start in a moment.

_IDLE_S = 0.1
_PINGS = 50
_TRANSFER_S = 0.03
_TIMEOUT_S = 60.0
_UNLIMITED_BYTES = 16 << 20
_CHUNK = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
  """The values of one measure over all links."""

  min: float
  median: float
  max: float

  @classmethod
  def of(cls, values: list[float]) -> "Spread":
    return cls(min(values), statistics.median(values), max(values))


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
  """The measures of links, each from a host to the next, all at once."""

  bytes: int  # Payload of a transfer.
  # Half of a round trip of one byte, median of many, one link at a time.
  latency_s: Spread
  bandwidth_Bps: Spread  # Payload bytes a second of transfers back to back.
  # Of one transfer after the links idled for 100 ms; of each link the fastest,
  # which shows what a token bucket lends.
  idle_bandwidth_Bps: Spread


def measure(
  hosts: Hosts, rate: Rate | None, *, bytes: int | None = None, repeats: int = 5
) -> Links:
  """Measures the links between new processes of this module.

  No link may beat `rate`. Otherwise as `Testbed.probe`.
  """
  if bytes is None:
    bytes = int(rate.bytes_per_s * _TRANSFER_S) if rate else _UNLIMITED_BYTES
  ends = hosts.ask({"do": "listen"}, _TIMEOUT_S)
  hosts.ask({"do": "connect", "ends": ends}, _TIMEOUT_S)
  # One at a time: two cores would not answer eight hosts at once.
  pings = [
    hosts.ask({"do": "ping", "host": i, "pings": _PINGS}, _TIMEOUT_S)[i]
    for i in range(len(hosts))
  ]
  transfer = {"do": "transfer", "bytes": bytes, "repeats": repeats}
  streamed = _transfers(hosts, {**transfer, "idle_s": 0})
  rested = _transfers(hosts, {**transfer, "idle_s": _IDLE_S})
  whole = [times[-1][1] - times[0][0] for times in streamed]
  single = [min(end - start for start, end in times) for times in rested]
  _require_limit(bytes * repeats, whole, rate, "back to back")
  _require_limit(bytes, single, rate, "after idling")
  return Links(
    bytes=bytes,
    latency_s=Spread.of([statistics.median(times) / 2 for times in pings]),
    bandwidth_Bps=Spread.of([bytes * repeats / s for s in whole]),
    idle_bandwidth_Bps=Spread.of([bytes / s for s in single]),
  )


def _transfers(hosts, message):
  """Returns of every link (start of sending, end of receiving) of transfers."""
  replies = hosts.ask(message, _TIMEOUT_S)
  following = [*replies[1:], replies[0]]
  # The clock is the machine's, the same on every host.
  return [
    list(zip(one["sent"], other["received"]))
    for one, other in zip(replies, following)
  ]


def _require_limit(bytes, seconds, rate, when):
  if rate is None:
    return
  least = (bytes - rate.burst) / rate.bytes_per_s / 1.02
  for i, s in enumerate(seconds):
    if s < least:
      raise RuntimeError(
        f"The link from host {i} is not limited: {bytes} bytes {when} took"
        f" {s * 1e3:.2f} ms, at {rate.bytes_per_s:,.0f} bytes/s and a burst of"
        f" {rate.burst} they need {least * 1e3:.2f} ms. Nothing measured on"
        " these links counts; report it with the kernel's version."
      )


class _Peer:
  """The process on a host: sends to the next one, receives from the last."""

  def __init__(self):
    address = os.environ["ZENJAX_HOST_ADDRESS"]
    self._index = int(os.environ["ZENJAX_HOST_INDEX"])
    self._count = int(os.environ["ZENJAX_HOST_COUNT"])
    self._listener = socket.create_server((address, 0))

  def listen(self):
    return self._listener.getsockname()

  def connect(self, ends):
    end = ends[(self._index + 1) % self._count]
    self._next = socket.create_connection(tuple(end))
    self._last, _ = self._listener.accept()
    for s in (self._next, self._last):
      s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  def ping(self, host, pings):
    times = []
    for _ in range(pings):
      if self._index == host:
        start = time.monotonic()
        self._next.sendall(b"x")
        self._next.recv(1)
        times.append(time.monotonic() - start)
      elif self._index == (host + 1) % self._count:
        self._last.sendall(self._last.recv(1))
    return times

  def transfer(self, bytes, repeats, idle_s):
    sent, received = [], []
    arguments = (bytes, repeats, idle_s, sent)
    sender = threading.Thread(target=self._send, args=arguments, daemon=True)
    sender.start()
    space = bytearray(_CHUNK)
    for _ in range(repeats):
      left = bytes
      while left:
        got = self._last.recv_into(space, min(left, _CHUNK))
        if not got:
          sys.exit("The host before this one has gone.")
        left -= got
      received.append(time.monotonic())
    sender.join()
    return {"sent": sent, "received": received}

  def _send(self, bytes, repeats, idle_s, sent):
    chunk = memoryview(bytearray(_CHUNK))
    for _ in range(repeats):
      time.sleep(idle_s)
      sent.append(time.monotonic())
      for first in range(0, bytes, _CHUNK):
        self._next.sendall(chunk[: bytes - first])


if __name__ == "__main__":
  with contextlib.suppress(KeyboardInterrupt):
    hosts_lib.answer(_Peer())

"""What runs on every host: `python -m benchmarks.network.host`.

Reads one command a line from stdin and answers with one line, JSON both.
Started by `benchmarks.testbed`, which says in the environment which host it is.
"""

import os
import time

import jax
from jax.sharding import Mesh
import numpy as np

from benchmarks import served
from benchmarks import workloads
from benchmarks.network import collectives
from benchmarks.network import local_work
from benchmarks.network.common_start import CommonStart
from benchmarks.network.exchange import AXIS
from benchmarks.network.exchange import Exchange
from benchmarks.network.exchange import Exchanges
from benchmarks.network.variants import VARIANTS
from benchmarks.shared_compiler import SharedCompiler

# Hosts reach a collective apart, and are timed from when the last one does.
# Where both ends of a connection begin at once, Gloo sends both ways at once;
# a millisecond apart, first one way and then the other.
_APART_S = 1e-3


class Host:
  """This host's share of a run."""

  def __init__(self, compiler: SharedCompiler, epoch: float):
    self._compiler = compiler
    self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
    self._exchanges: Exchanges | None = None
    self._built: dict[str, Exchange] = {}
    self._start = CommonStart(self._mesh, epoch)

  def workload(self, name: str, batches: int) -> dict:
    """Draws the batches of a workload and forgets the last one."""
    self._built.clear()
    self._exchanges = Exchanges(
      workloads.get(name), self._mesh, batches, self._compiler
    )
    return self._exchanges.facts()

  def build(self, variant: str) -> dict:
    """Compiles a variant and checks its answer on this host."""
    exchange = self._shared().exchange(VARIANTS[variant])
    self._built[variant] = exchange
    wrong = exchange.check()
    return {
      "wrong": wrong,
      "compile_s": exchange.compile_s,
      "wire_bytes": exchange.wire_bytes,
      "least_wire_bytes": exchange.least_wire_bytes,
    }

  def _shared(self):
    if self._exchanges is None:
      raise ValueError("`workload` must be called before `build`.")
    return self._exchanges

  def time(self, variant: str) -> float:
    """Seconds of one exchange."""
    return self._built[variant].time(self._start)

  def repeat(self, variant: str, times: int) -> None:
    """Exchanges with nothing else on the links, for their counters."""
    exchange, batches = self._built[variant], self._shared().batches
    for turn in range(times):
      exchange(exchange.gradient(batches[turn % len(batches)]))

  def collective(self, op: str, words: int, repeats: int) -> list[float]:
    """Seconds of a collective of `words` of 32 bits a host."""
    run = collectives.build(op, words, self._mesh)
    run()
    seconds = []
    for _ in range(repeats):
      start = self._start() + _APART_S
      if jax.process_index() % 2:
        time.sleep(_APART_S)
      run()
      seconds.append(time.monotonic() - start)
    return seconds

  def work(self) -> dict[str, list[float]]:
    """Seconds of each kind of local work, all hosts at it together."""
    return local_work.measure(self._mesh, self._start)


def main() -> None:
  """Serves until stdin ends."""
  served.configure()
  compiler = served.join()
  served.serve(Host(compiler, float(os.environ["ZENJAX_HOST_EPOCH"])))


if __name__ == "__main__":
  main()

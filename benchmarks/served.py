"""A program on every host of a testbed that does what it is asked.

One line of JSON asks, one answers. `Served` is the side that asks, `serve` the
program.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

import jax

from benchmarks.shared_compiler import SharedCompiler
from benchmarks.testbed import Testbed

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Of a host's log, where it does not answer.
_LOG_LINES = 8
# glibc's names for what `benchmarks.run` sets with mallopt.
_KEPT = {
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(1 << 60),
}


class Served:
  """The processes on a testbed's hosts.

  Args:
    bed: Entered; nothing else runs on it.
    module: What every host runs; it calls `serve`.
    cache: A directory of this run alone, for what one compiles for all.
    keep_memory: Whether hosts keep what they free, as `run --keep-memory`.
  """

  def __init__(
    self,
    bed: Testbed,
    module: str,
    cache: str,
    *,
    keep_memory: bool = False,
  ):
    self.bed = bed
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    self._hosts = bed.start(
      [sys.executable, "-m", module],
      {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "ZENJAX_HOST_CACHE": cache,
        "ZENJAX_HOST_EPOCH": str(time.monotonic()),
        **(_KEPT if keep_memory else {}),
      },
    )

  def ask(self, do: str, *, timeout: float, **arguments) -> list[Any]:
    """Has every host do one thing; returns what each replies."""
    try:
      return self.bed.ask({"do": do, **arguments}, timeout)
    except TimeoutError as error:
      logs = (f"log of host {h.index} ends:\n{_tail(h)}" for h in self._hosts)
      raise RuntimeError(
        f"`{do}` of {arguments}: {error}\n" + "\n".join(logs)
      ) from error


def _tail(host):
  lines = host.log.read_text(encoding="utf-8", errors="replace").splitlines()
  return "\n".join(lines[-_LOG_LINES:]) or "-"


def configure() -> None:
  """One CPU device a host; before the first use of it."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # What JAX reads back from its cache cannot be handed on to other hosts: it
  # lacks functions there ("wrapped_tanh not found").
  jax.config.update("jax_enable_compilation_cache", False)


def join() -> SharedCompiler:
  """Finds the other hosts; returns what compiles for all of them."""
  index, count = (
    int(os.environ[f"ZENJAX_HOST_{key}"]) for key in ("INDEX", "COUNT")
  )
  jax.distributed.initialize(
    os.environ["ZENJAX_COORDINATOR"], num_processes=count, process_id=index
  )
  jax.devices()
  return SharedCompiler(pathlib.Path(os.environ["ZENJAX_HOST_CACHE"]), index)


def serve(host: Any) -> None:
  """Calls the method of `host` that each line names, until stdin ends."""
  for line in sys.stdin:
    message = json.loads(line)
    reply = getattr(host, message.pop("do"))(**message)
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()

"""A host's own part of an exchange, timed once for each kind of work.

On all hosts at once: they share the machine's cores, as in an exchange.
"""

from collections.abc import Callable
import time

import jax
from jax.sharding import Mesh
import numpy as np

from zenjax._src.machine import local_work

_REPEATS = 9


def measure(
  mesh: Mesh, common_start: Callable[[], float]
) -> dict[str, list[float]]:
  """Seconds of every repetition on this host.

  Args:
    mesh: Of all hosts, one device each.
    common_start: Returns on all hosts at one instant, and says which.
  """
  own = Mesh(np.array(jax.local_devices()[:1]), mesh.axis_names)
  runs = local_work.runs(own, mesh.size)
  return {name: _samples(run, common_start) for name, run in runs.items()}


def _samples(run, common_start) -> list[float]:
  run()
  seconds = []
  for _ in range(_REPEATS):
    start = common_start()
    run()
    seconds.append(time.monotonic() - start)
  return seconds

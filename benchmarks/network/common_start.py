"""All hosts begin at one instant of the clock that they share.

A barrier alone lets hosts go as its messages reach them, ten milliseconds apart
where eight of them share two cores: the first would count its wait for the last
as time of the exchange, and local work would be timed without the others beside
it.
"""

import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

# int32 holds 59 hours of these.
_TICK_S = 1e-4
# Longer than a barrier's last message is under way, and than a link's bucket
# takes to fill.
_LEAD_S = 0.05


class CommonStart:
  """Agrees with the other hosts on when to begin.

  Args:
    mesh: Of all hosts, one device each, with one axis.
    epoch: An instant of `time.monotonic`, the same on all hosts.
  """

  def __init__(self, mesh: Mesh, epoch: float):
    self._epoch = epoch
    self._split = NamedSharding(mesh, P(mesh.axis_names))
    self._shape = (mesh.size,)
    (axis,) = mesh.axis_names
    latest = jax.shard_map(
      lambda x: jax.lax.pmax(x, axis),
      mesh=mesh,
      in_specs=P(axis),
      out_specs=P(),
    )
    self._latest = jax.jit(latest)
    self()

  def __call__(self) -> float:
    """Returns at an instant of `time.monotonic`, and says which."""
    ticks = int((time.monotonic() - self._epoch) / _TICK_S)
    mine = jax.make_array_from_process_local_data(
      self._split, np.array([ticks], np.int32), self._shape
    )
    latest = int(jnp.squeeze(self._latest(mine)))
    start = self._epoch + latest * _TICK_S + _LEAD_S
    while (left := start - time.monotonic()) > 0:
      time.sleep(left)
    return start

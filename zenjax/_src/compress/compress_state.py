"""The state of `zenjax.compress.all_reduce`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from zenjax._src.compress.exdyna import PartitionMemory
from zenjax._src.core.folding import folded
from zenjax._src.sync import sync_state


def nodes(state: Any) -> Iterator["CompressState"]:
  """Yields each such state, also those in the `others` of another one."""
  for node in sync_state.nodes(state, CompressState):
    yield node
    yield from nodes(node.others)


class Residual(NamedTuple):
  """What each device has to send later of one leaf."""

  value: Any  # [1, *shape] float32 on a device, [n, *shape] globally

  @property
  def devices(self) -> int:
    """The number of devices that a global state was made for."""
    return self.value.shape[0]

  def specs(self, split: PartitionSpec) -> "Residual":
    """Returns partition specs: each device has its own residual."""
    return Residual(split)


class CompressState(NamedTuple):
  """State of `zenjax.compress.all_reduce`.

  Residuals and momenta differ between devices, all else is equal.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> tx = zenjax.compress.all_reduce(zenjax.compress.LowBit(bits=4), "data")
    >>> state = zenjax.init_state(tx, {"w": jnp.zeros((400, 80))}, mesh, "data")
    >>> state.residuals["w"].value.shape
    (2, 400, 80)
  """

  step: jax.Array  # [] int32, steps taken
  residuals: dict[str, Residual]  # by name of the leaf
  momenta: dict[str, Residual]  # by name of the leaf; empty without momentum
  memory: Any  # of the compressor
  mean: jax.Array  # [] bool, whether the last step averaged
  leaves: dict[str, jax.Array]  # [] int32, elements, by name of the leaf
  wire_bytes: jax.Array  # [] float32, received per device in the last step
  # The same of a ring all-reduce, which adds up in float32.
  dense_bytes: jax.Array
  stats: dict[str, jax.Array]  # [] float32, of the compressor's last step
  others: Any  # the state of the transformation of all other leaves

  def specs(self, split: PartitionSpec) -> "CompressState":
    """Returns partition specs: each device has its own residuals."""
    same = jax.tree.map(lambda _: PartitionSpec(), self)
    own = lambda kept: {name: x.specs(split) for name, x in kept.items()}
    return same._replace(
      residuals=own(self.residuals), momenta=own(self.momenta)
    )

  def on_devices(self, devices: int) -> "CompressState":
    """Converts a state in host memory to another number of devices.

    Residuals and momenta are folded so that no gradient is lost.
    """

    def moved(x: Any) -> Any:
      if isinstance(x, PartitionMemory):
        return x.on_devices(devices)
      if not isinstance(x, Residual) or x.devices == devices:
        return x
      return Residual(folded(x.value, devices, averages=bool(self.mean)))

    return jax.tree.map(
      moved, self, is_leaf=lambda x: isinstance(x, PartitionMemory | Residual)
    )

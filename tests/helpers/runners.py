"""Ways to run a per-device function over stacked local gradients.

A function `f(tree of [...], axis_name)` is what one device does. A runner turns
it into `run(tree of [n, ...]) -> tree of numpy [n, ...]` whose results hold
what *every* device got. Each runs on the first `n` of eight CPU devices.

`vmap` keeps one copy of what it knows to be equal; the others show each shard.
`*_replicated` return through `out_specs=P()`, as a training step does, and read
the copy on each device; `*_shards` return through `out_specs=P("data")`.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import zenjax

AXIS = "data"

PerDevice = Callable[[Any, str], Any]
Run = Callable[[Any], Any]


@functools.cache
def mesh(n: int) -> Mesh:
  """The first `n` devices on one automatic axis called "data"."""
  return Mesh(np.asarray(jax.devices()[:n]), (AXIS,))


def shards(x: jax.Array) -> np.ndarray:
  """What each device holds of an array, `[n, *shape of a shard]`."""
  by_device = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
  return np.stack([np.asarray(shard.data) for shard in by_device])


class HostRows(NamedTuple):
  """SparseRows in NumPy, which has no dtype for their ids."""

  indices: np.ndarray
  values: np.ndarray
  num_rows: int


def to_host(tree: Any, read: Callable[[Any], np.ndarray] = np.asarray) -> Any:
  """Every array as `read` gives it, SparseRows as HostRows."""
  is_rows = lambda x: isinstance(x, zenjax.SparseRows)

  def convert(x):
    if is_rows(x):
      return HostRows(read(x.indices), read(x.values), x.num_rows)
    return read(x)

  return jax.tree.map(convert, tree, is_leaf=is_rows)


def _vmap(f: PerDevice, n: int) -> Run:
  mapped = jax.jit(jax.vmap(lambda x: f(x, AXIS), axis_name=AXIS, axis_size=n))
  return lambda stack: to_host(mapped(stack))


def _pmap(f: PerDevice, n: int) -> Run:
  mapped = jax.pmap(
    lambda x: f(x, AXIS), axis_name=AXIS, devices=jax.devices()[:n]
  )
  return lambda stack: to_host(mapped(stack))


def _shard_map(check_vma: bool, replicated: bool) -> Callable[..., Run]:
  def build(f: PerDevice, n: int) -> Run:
    def body(stack):
      local = jax.tree.map(lambda x: x[0], stack)
      result = f(local, AXIS)
      if replicated:
        return result
      return jax.tree.map(lambda x: x[None], result)

    mapped = jax.jit(
      jax.shard_map(
        body,
        mesh=mesh(n),
        in_specs=P(AXIS),
        out_specs=P() if replicated else P(AXIS),
        check_vma=check_vma,
      )
    )
    split = NamedSharding(mesh(n), P(AXIS))

    def run(stack):
      result = mapped(jax.device_put(stack, split))
      return to_host(result, shards if replicated else np.asarray)

    return run

  return build


RUNNERS: dict[str, Callable[[PerDevice, int], Run]] = {
  "vmap": _vmap,
  "pmap": _pmap,
  "shard_map_replicated": _shard_map(False, True),
  "shard_map_shards": _shard_map(False, False),
  "shard_map_vma_replicated": _shard_map(True, True),
  "shard_map_vma_shards": _shard_map(True, False),
}

"""Which rows of each table a device touched, as a step hands them out."""

import jax
from jax import lax

from zenjax._collectives import Axes


@jax.tree_util.register_pytree_with_keys_class
class RowSets(dict[str, jax.Array]):
  """Table -> `[n, ceil(R / 8)] uint8`: a bit for each row, of `n` devices.

  A type of its own, as `data_parallel` sums integers and these are none.
  """

  def tree_flatten_with_keys(self):
    keyed = [(jax.tree_util.DictKey(name), self[name]) for name in sorted(self)]
    return keyed, tuple(sorted(self))

  @classmethod
  def tree_unflatten(cls, names, packed):
    return cls(zip(names, packed))


def of_all(sets: RowSets, axes: Axes) -> RowSets:
  """Those of every device, one after the other."""
  gather = lambda packed: lax.all_gather(packed, axes, tiled=True)
  return jax.tree.map(gather, sets)

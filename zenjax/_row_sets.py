"""Which rows of each table a device touched, as a step hands them out."""

import jax


@jax.tree_util.register_pytree_with_keys_class
class RowSets(dict[str, jax.Array]):
  """Table -> `[n, ceil(R / 8)] uint8`: a bit for each row, of `n` devices.

  A type of its own: from `data_parallel` those of all devices come out.
  """

  def tree_flatten_with_keys(self):
    keyed = [(jax.tree_util.DictKey(name), self[name]) for name in sorted(self)]
    return keyed, tuple(sorted(self))

  @classmethod
  def tree_unflatten(cls, names, packed):
    return cls(zip(names, packed))

"""Compiled steps beside those without zenjax: what is summed, what is moved."""

from collections import Counter
from typing import Any

import declaring
import hlo
import jax
import jax.numpy as jnp

import zenjax


def moves(found: list[hlo.Found]) -> Counter[hlo.Found]:
  """All collectives that are no sums."""
  return Counter([x for x in found if x.op != "all-reduce"])


def summed(found: list[hlo.Found]) -> int:
  """Elements of all sums, however XLA joins them."""
  return sum(x.elements for x in found if x.op == "all-reduce")


def of_table(
  shape: tuple[int, int],
  devices: int,
  *,
  look_ups: int | None = None,
) -> list[hlo.Found]:
  """What zen_sync declares of one exchange of a table over the axis "data".

  Args:
    shape: Of the table.
    devices: Along the axis.
    look_ups: A device's, of row gradients; None for an array.
  """
  leaf: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
  if look_ups is not None:
    leaf = jax.eval_shape(
      lambda: zenjax.SparseRows(
        jnp.zeros(look_ups, jnp.int32),
        jnp.zeros((look_ups, shape[1])),
        shape[0],
      )
    )
  declared = declaring.declare({"table": leaf}, ("data",), (devices,))
  sent = [(x, ()) for x in declared.first]
  sent += [(x, ("while",)) for turn in declared.loops for x in turn]
  sent += [(x, ("while",)) for turn in declared.dense for x in turn]
  # What a device has got of `words` that it gave.
  got = {"all_gather": devices, "reduce_scatter": 1 / devices}
  return [
    hlo.Found(x.op.replace("_", "-"), int(x.words * got.get(x.op, 1)), around)
    for x, around in sent
  ]

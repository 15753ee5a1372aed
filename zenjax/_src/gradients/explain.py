"""`explain_tables`: which gradients are rows, and why the others are not."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core.arguments import SparseSpec
from zenjax._src.gradients import table_uses
from zenjax._src.gradients.loss import partial_loss
from zenjax._src.tables.sharded_table import is_sharded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableUse:
  """How a loss uses one parameter.

  Attributes:
    name: Of the leaf, as in reports.
    shape: Of the leaf.
    rows: Whether `zenjax.value_and_grad` returns its gradient as SparseRows.
    look_ups: Rows that a call reads of it; 0 where it is not only looked up.
    reason: Why its gradient is dense; "" where it is rows.
    place: The line of the program that the reason is about, if it is one.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> loss = lambda table, ids: jnp.sum(table[ids])
    >>> params, ids = jnp.ones((9, 4)), jnp.arange(3)
    >>> found = zenjax.rows.explain_tables(loss, params, ids)
    >>> (use,) = found.uses
    >>> use.rows, use.look_ups, use.shape
    (True, 3, (9, 4))
  """

  name: str
  shape: tuple[int, ...]
  rows: bool
  look_ups: int
  reason: str
  place: str


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
  """Every parameter, in order; `str` and `print` give a table.

  Attributes:
    uses: One of each leaf.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> loss = lambda table, ids: jnp.sum(table[ids])
    >>> args = jnp.ones((9, 4)), jnp.arange(3)
    >>> [use.reason for use in zenjax.rows.explain_tables(loss, *args).uses]
    ['']
  """

  uses: tuple[TableUse, ...]

  def __str__(self) -> str:
    lines = [("leaf", "shape", "gradient", "why"), *map(_line, self.uses)]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(
      "  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[3]])
      for line in lines
    )


def explain_tables(
  fun: Callable[..., Any],
  *args: Any,
  argnums: int | Sequence[int] = 0,
  tables: SparseSpec = None,
  **kwargs: Any,
) -> Explanation:
  """Says what `zenjax.value_and_grad` makes of each parameter, and why.

  Traces `fun` and computes nothing; shapes (`jax.ShapeDtypeStruct`) will do for
  arrays.

  Args:
    fun: As for `value_and_grad`; it may return a loss or a pair `(loss, aux)`.
    *args: Of `fun`.
    argnums: As for `value_and_grad`.
    tables: Likewise; what it demands in vain is explained, not raised.
    **kwargs: Of `fun`.

  Returns:
    How each leaf is used. Print it.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def loss(params, ids):
    ...   return jnp.sum(params["table"][ids] @ params["w"])
    >>> params = {"table": jnp.ones((9, 4)), "w": jnp.ones((4, 2))}
    >>> print(zenjax.rows.explain_tables(loss, params, jnp.array([1, 2])))
    leaf   shape  gradient  why
    table  9x4    rows      2 rows looked up
    w      4x2    dense     is used by `dot_general`, at <doctest ... (loss)
  """
  leaves, structure = jax.tree.flatten((args, kwargs))
  kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
  is_array = [isinstance(leaf, kinds) for leaf in leaves]
  found: list[TableUse] = []

  def inside(arrays):
    left = iter(arrays)
    all_ = [next(left) if is_ else x for x, is_ in zip(leaves, is_array)]
    args, kwargs = jax.tree.unflatten(structure, all_)
    found[:] = _uses(fun, argnums, tables, args, kwargs)

  jax.eval_shape(inside, [x for x, is_ in zip(leaves, is_array) if is_])
  return Explanation(tuple(found))


def _uses(fun, argnums, tables, args, kwargs) -> list[TableUse]:
  loss = partial_loss(fun, argnums, args, kwargs)
  found = table_uses.find(loss, tables)
  leaves = found.traced.leaves[: found.wanted]
  return [_use(i, leaf, found) for i, leaf in enumerate(leaves)]


def _use(i, leaf, found) -> TableUse:
  refusal = found.refusals.get(i)
  return TableUse(
    name=found.names[i],
    shape=tuple(leaf.shape) if is_sharded(leaf) else jnp.shape(leaf),
    rows=refusal is None,
    look_ups=sum(x.rows for x in found.sites.values() if x.param == i),
    reason=refusal.reason if refusal else "",
    place=refusal.place if refusal else "",
  )


def _line(use: TableUse) -> tuple[str, str, str, str]:
  why = f"{use.look_ups} rows looked up"
  if not use.rows:
    why = f"{use.reason}, at {use.place}" if use.place else use.reason
  kind = "rows" if use.rows else "dense"
  return use.name, "x".join(map(str, use.shape)) or "-", kind, why

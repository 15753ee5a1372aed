"""Defines `explain_tables`, which explains why gradients are rows or arrays."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import text
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.gradients import table_uses
from zenjax._src.gradients.loss import partial_loss
from zenjax._src.rows import leaf_util
from zenjax._src.tables.sharded_table import is_sharded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableUse:
  """How a loss uses one parameter.

  Attributes:
    name: The parameter's name, as in reports.
    shape: Its shape.
    rows: True if `zenjax.value_and_grad` returns SparseRows for it.
    look_ups: The number of rows that a call reads; 0 for dense gradients.
    reason: Why its gradient is dense; empty for SparseRows.
    place: The line of the program that is the reason; empty if there is none.

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
  """Result of `explain_tables`; `print` shows it as a table.

  Attributes:
    uses: The use of each parameter, in order.

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
    return "\n".join(text.columns(lines, left=4))


def explain_tables(
  fun: Callable[..., Any],
  *args: Any,
  argnums: int | Sequence[int] = 0,
  tables: SparseSpec = None,
  **kwargs: Any,
) -> Explanation:
  """Explains why each gradient is a row gradient or an array.

  Use it if `zenjax.value_and_grad` returns an array where you expect
  SparseRows. It only traces `fun`, so shapes (`jax.ShapeDtypeStruct`) can be
  given instead of arrays.

  Args:
    fun: The loss, which may return a loss or a pair `(loss, aux)`.
    *args: Positional arguments of `fun`.
    argnums: Positions of the arguments to differentiate by.
    tables: Which parameters must give rows, as for `value_and_grad`. If one
      cannot, the reason is in the result; nothing is raised.
    **kwargs: Keyword arguments of `fun`.

  Returns:
    The use of each parameter. Print it.

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
  kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
  arrays, back = leaf_util.arrays_of(
    (args, kwargs), lambda x: isinstance(x, kinds)
  )
  uses: list[TableUse] = []

  def inside(arrays):
    args, kwargs = back(arrays)
    loss = partial_loss(fun, argnums, args, kwargs)
    found = table_uses.find(loss, tables)
    leaves = enumerate(found.traced.leaves[: found.wanted])
    uses[:] = [_use(i, leaf, found) for i, leaf in leaves]

  jax.eval_shape(inside, arrays)
  return Explanation(tuple(uses))


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

"""Programs of an optimizer's update, and refusals of those that mix rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import optax

from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_program
from zenjax._src.rows.row_program import RowProgram
from zenjax._src.rows.sparse_rows import is_rows


class Programs:
  """Reads programs of one optimizer, each kind of arguments once."""

  def __init__(self, inner: optax.GradientTransformationExtraArgs):
    self._inner = inner
    self._known: dict[Any, RowProgram] = {}

  def of(
    self,
    grads: Any,
    state: Any,
    params: Any,
    extra: Mapping[str, Any],
    tables: Sequence[bool],
  ) -> RowProgram:
    """Returns the program for such arguments: see `row_program`."""
    trees = grads, state, params, dict(extra)
    leaves, structure = jax.tree.flatten(trees, is_leaf=is_rows)
    known = all(is_rows(x) or hasattr(x, "dtype") for x in leaves)
    types = tuple(map(row_program.type_of, leaves)) if known else ()
    key = structure, types, tuple(tables)
    if known and key in self._known:
      return self._known[key]
    program = row_program.row_program(
      self._inner, grads, state, params, extra, tables
    )
    if known and not program.holds_tracers:
      self._known[key] = program
    return program


def of_rows(
  programs: Programs,
  merged: Any,
  state: Any,
  params: Any,
  extra: Mapping[str, Any],
) -> RowProgram | None:
  """Returns the program for updates of which some leaves are SparseRows.

  None where none are.

  Raises:
    ValueError: A table that has rows cannot be updated by rows.
  """
  leaves = jax.tree.leaves(merged, is_leaf=is_rows)
  tables = [is_rows(x) for x in leaves]
  if not any(tables):
    return None
  program = programs.of(merged, state, params, extra, tables)
  names = [name for name, _ in leaf_util.named_leaves(merged, is_rows)]
  require(program, names, "inner", REMEDY)
  return program


def require(
  program: RowProgram, names: Sequence[str], argument: str, remedy: str
) -> None:
  """Raises ValueError where a table of a program cannot be updated by rows."""
  for table, refusal in program.refusals.items():
    raise ValueError(
      f"`{argument}` must update a row by that row alone, by the step, and by"
      f" sums over all gradients, but in table {names[table]!r} {refusal};"
      f" {remedy}."
    )


REMEDY = (
  "put what clips or measures before what keeps a state, take dense gradients"
  " by `jax.value_and_grad`, or give tables another optimizer by"
  " `optax.partition`"
)


def require_row_by_row(
  inner: optax.GradientTransformationExtraArgs, params: Any
) -> None:
  """Looks at `inner` before it is known which leaves are tables.

  Those are taken for tables that look like one, or all leaves of two dimensions
  where none does. `update` looks again at those that are.

  Raises:
    ValueError: None of these tables can be updated by rows.
  """
  require_no_accumulation(jax.eval_shape(inner.init, params), "inner")
  named = leaf_util.named_leaves(params)
  types = jax.tree.map(row_program.type_of, params)
  tables = [
    jnp.ndim(x) == 2 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
    for _, x in named
  ]
  state = jax.eval_shape(inner.init, params)
  given = {}, {"value": jax.ShapeDtypeStruct((), jnp.float32)}
  programs = (
    row_program.row_program(inner, types, state, types, extra, tables)
    for extra in given
  )
  try:
    # Some optimizers want the loss beside its gradient.
    program = next((p for p in programs if not p.wants_more), None)
  except NameError as error:
    raise ValueError(
      "`inner` must not synchronize devices, but it wants an axis of them"
      f" ({error}); put zen_sync before lazy_rows, and sharded_optimizer in the"
      " place of both."
    ) from error
  if program is None:
    return  # It needs arguments that only the user has.
  tall = [
    i
    for i, chosen in enumerate(leaf_util.select(params, None, "row"))
    if chosen and tables[i]
  ]
  if tall or len(program.refusals) == sum(tables):
    some = tall or list(program.refusals)
    refusals = {i: r for i, r in program.refusals.items() if i in some}
    names = [name for name, _ in named]
    require(program.refusing(refusals), names, "inner", REMEDY)
  warn_of_decay(program, [name for name, _ in named], tall or range(len(named)))


def warn_of_decay(
  program: RowProgram, names: Sequence[str], tables: Iterable[int]
) -> None:
  """Tells of tables whose rows decay, be they touched or not."""
  found = [names[i] for i in program.decays if i in tables]
  if found:
    warnings.warn(
      f"Weight decay, or what else moves rows without a gradient, acts only on"
      f" the rows of table {found[0]!r} that a step touches. For the plain"
      ' optimizer use `zen_sync(.., output="dense")` without `lazy_rows`;'
      " `optax.masked` leaves the table out.",
      stacklevel=2,
    )


def require_no_accumulation(state: Any, argument: str) -> None:
  """Raises ValueError where a `state` of `argument` accumulates gradients.

  A row whose gradients come in steps that only accumulate is in none that
  updates, and would never move.
  """
  accumulates = lambda node: isinstance(node, optax.MultiStepsState)
  if any(map(accumulates, jax.tree.leaves(state, is_leaf=accumulates))):
    raise ValueError(
      f"`{argument}` must not be `optax.MultiSteps`, whose steps without an"
      " update would lose the rows that they alone touch, got one; accumulate"
      " in the loss, `jax.lax.map(jax.checkpoint(loss), micro_batches).mean()`,"
      " of which there is one exchange, or inside `zenjax.data_parallel` put it"
      " around the chain and take array gradients by `jax.value_and_grad`."
    )

"""Defines `lazy_rows`, which runs an optimizer on touched rows only."""

from collections.abc import Sequence
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import optax

from zenjax._src.core import arguments
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_analysis
from zenjax._src.rows import touched_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one


def lazy_rows(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Runs an optimizer on touched rows instead of on whole tables.

  Use it for tables of which a step looks up a few rows: the cost of a step then
  depends on these rows, not on the size of the table. Put your whole chain
  inside, because transformations of optax raise an error on SparseRows. Donate
  parameters and state, and apply updates with `optax.apply_updates` or
  `zenjax.apply_updates`.

  Rows that a step does not touch keep their parameters and state. (Gradients
  that are arrays are updated as a whole.) For SGD and Adagrad this changes
  nothing. Adam and momentum would move such rows; here they wait for the row's
  next gradient (LazyAdam). Weight decay acts only on touched rows, and a
  `UserWarning` says so. For Adam on all rows, use `zen_sync(output="dense")`
  without `lazy_rows`.

  The traced program of `inner` shows what it does to rows:

  - It may treat rows independently: SGD, Adam, Lion, schedules, masks.
  - It may sum over gradients, because untouched rows would add zero: a global
    norm, a mean, a test if all gradients are finite.
  - Anything else is refused, and the error names the line: LAMB, a norm after
    Adam, a maximum over rows, noise for every row, `optax.MultiSteps`.

  Args:
    inner: The optimizer for touched rows and for all other parameters.

  Returns:
    A transformation of trees that may contain SparseRows. Its state is the one
    of `inner` for dense parameters.

  Raises:
    ValueError: `inner` mixes rows, or only some of its steps update. `init`
      raises it if no table could be updated by rows, otherwise `update`.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> table = jnp.zeros((1000, 1))
    >>> tx = zenjax.lazy_rows(optax.adagrad(1.0, initial_accumulator_value=0.0))
    >>> state = tx.init(table)
    >>> grads = zenjax.SparseRows(jnp.array([7]), jnp.array([[4.0]]), 1000)
    >>> updates, state = tx.update(grads, state, table)
    >>> zenjax.apply_updates(table, updates)[6:8].round(3).tolist()
    [[0.0], [-1.0]]

  References:
    TensorFlow Addons' `LazyAdam`.
  """
  inner = optax.with_extra_args_support(arguments.optimizer("inner", inner))
  cache: dict[Any, RowAnalysis] = {}

  def init(params):
    leaf_util.refuse_sharded(params, "params", "lazy_rows")
    _require_row_by_row(inner, params)
    return inner.init(params)

  def update(updates, state, params=None, **extra):
    leaf_util.refuse_sharded(updates, "updates", "lazy_rows")
    if params is not None:
      touched_rows.require_shapes(updates, params)
    leaves, back = touched_rows.combined(updates, touched_rows.FEWEST)
    rows = {i: x for i, x in enumerate(leaves) if is_rows(x)}
    if not rows:
      return inner.update(updates, state, params, **extra)
    touched = {}
    for i, x in rows.items():
      require_one("an update", x)
      touched[i] = touched_rows.Touched.of(x.indices, x.num_rows)
    sizes = {i: x.capacity for i, x in rows.items()}
    analysis = row_analysis.analysis_of(
      inner, updates, state, params, extra, sizes, cache
    )
    names = [name for name, _ in leaf_util.named_leaves(updates, is_rows)]
    if analysis.refusals:
      _require_no_sync(state)
      _require_own(state, inner, updates)
    require(analysis, names, "inner")
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    if params is not None:
      params = [
        touched[i].take(x) if i in touched else x
        for i, x in enumerate(structure.flatten_up_to(params))
      ]
    grads = touched_rows.values(leaves)
    out, few, places = touched_rows.step(
      analysis, structure, grads, params, state, touched, extra
    )
    return back(out), touched_rows.put(state, few, places)

  return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
  """Applies updates like `optax.apply_updates`, also SparseRows.

  Use it if updates contain None, or for clear errors about shapes of
  SparseRows.

  Args:
    params: A tree of arrays.
    updates: A tree of the same structure, with arrays or SparseRows. A
      parameter whose update is None or of dtype float0 (from `allow_int=True`)
      does not change.

  Returns:
    The sums, in the dtypes of `params`; in place if these are donated.

  Raises:
    ValueError: SparseRows have another shape than the parameter.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> rows = zenjax.SparseRows(jnp.array([1, 1]), jnp.ones((2, 1)), 2)
    >>> zenjax.apply_updates(jnp.array([[5.0], [5.0]]), rows).tolist()
    [[5.0], [7.0]]
  """
  touched_rows.require_shapes(updates, params)

  def apply(p, u):
    if u is None or u.dtype == jax.dtypes.float0:
      return p
    return optax.apply_updates(p, u)

  return jax.tree.map(apply, params, updates)


def require(analysis: RowAnalysis, names: Sequence[str], argument: str) -> None:
  """Raises ValueError for a table that cannot be updated by its rows."""
  remedy = (
    "Give this table another optimizer, such as `optax.adagrad` or"
    " `optax.adam`, with `optax.partition`"
  )
  if argument == "inner":
    remedy = (
      "To keep this optimizer, leave out `lazy_rows`, and put"
      ' `zenjax.zen_sync(axis_name, output="dense")` first in the chain; on one'
      " device, use `jax.value_and_grad`. Or give this table another optimizer"
      " with `optax.partition`"
    )
  for table, refusal in analysis.refusals.items():
    raise ValueError(
      f"`{argument}` must update a row by that row alone, or by sums over all"
      f" gradients, such as a norm. For table {names[table]!r}, {refusal}."
      f" {remedy}."
    )


def _require_own(
  state: Any, inner: optax.GradientTransformationExtraArgs, updates: Any
) -> None:
  """Raises ValueError if a state is of another optimizer or other tables."""
  whole = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  types = jax.tree.map(whole, updates, is_leaf=is_rows)
  own, shapes = jax.eval_shape(inner.init, types), []
  for tree in own, state:
    leaves, structure = jax.tree.flatten(tree)
    shapes.append((structure, [*map(jnp.shape, leaves)]))
  if shapes[0] != shapes[1]:
    raise ValueError(
      "`state` of lazy_rows must be made by this optimizer for these"
      " parameters, but it has other arrays. Make it with"
      " `zenjax.init_state(tx, params, mesh, axis_name)` or `tx.init(params)`."
    )


def _require_row_by_row(
  inner: optax.GradientTransformationExtraArgs, params: Any
) -> None:
  """Analyses `inner` before gradients show which leaves are tables.

  Leaves that look like tables are taken for tables; if there are none, all
  leaves of two dimensions. `update` analyses the actual tables.

  Raises:
    ValueError: None of these tables can be updated by rows.
  """
  types = jax.tree.map(row_analysis.type_of, params)
  state = jax.eval_shape(inner.init, types)
  require_no_accumulation(state, "inner")
  named = leaf_util.named_leaves(types)
  tables = [
    i
    for i, (_, x) in enumerate(named)
    if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
  ]
  tall = [i for i in tables if leaf_util.is_table(named[i][1])]
  sizes = dict.fromkeys(tall or tables, touched_rows.FEWEST)
  analysis = row_analysis.analysis_of(inner, types, state, types, {}, sizes)
  names = [name for name, _ in named]
  if analysis.wants_more:
    return  # Only `update` is given all arguments.
  if analysis.refusals and len(analysis.refusals) == len(sizes):
    _require_no_sync(state)
    require(analysis, names, "inner")
  warn_of_decay(analysis, names)


def warn_of_decay(analysis: RowAnalysis, names: Sequence[str]) -> None:
  """Warns of tables whose rows would move without a gradient."""
  tables = [names[table] for table in analysis.program.moving()]
  if tables:
    warnings.warn(
      "Weight decay, or whatever moves rows without a gradient, acts only on"
      f" the rows of {tables} that a step touches. To have none in these"
      " tables, exclude them by `mask=` of the optimizer or `optax.masked`. To"
      " have it in all rows, as without zenjax, use your optimizer behind"
      ' `zen_sync(.., output="dense")`. `lazy_rows`, `sharded_optimizer` and'
      " `planner.set_up` cannot do that.",
      stacklevel=2,
    )


def _require_no_sync(state: Any) -> None:
  """Raises ValueError if an optimizer synchronizes devices by itself."""
  syncs = ("zenjax._src.sync", "zenjax._src.compress")
  is_one = lambda node: type(node).__module__.startswith(syncs)
  for node in filter(is_one, jax.tree.leaves(state, is_leaf=is_one)):
    raise ValueError(
      "`inner` of lazy_rows must not synchronize devices, but its state holds a"
      f" {type(node).__name__}. Put the synchronization in front:"
      " `optax.chain(zenjax.zen_sync(axis_name), zenjax.lazy_rows(optimizer))`."
      " (`sharded_optimizer` needs no `lazy_rows`.)"
    )


def require_no_accumulation(state: Any, argument: str) -> None:
  """Raises ValueError if only some steps of an optimizer update.

  A row whose gradients come only in the other steps would never move.
  """
  kinds = {
    optax.MultiStepsState: "MultiSteps",
    optax.ApplyEvery: "apply_every",
    optax.contrib.SAMState: "contrib.sam",
  }
  is_one = lambda node: type(node) in kinds
  for node in filter(is_one, jax.tree.leaves(state, is_leaf=is_one)):
    raise ValueError(
      f"`{argument}` must not be `optax.{kinds[type(node)]}`, because only some"
      " of its steps update. To accumulate gradients, average over"
      " `micro_batches`, `[micro-batches, examples, ..]`, inside the loss:"
      " `jax.lax.map(jax.checkpoint(lambda x: loss(params, x)),"
      " micro_batches).mean()`. If examples are padded, divide the sum of all"
      " losses by the number of real examples instead."
    )

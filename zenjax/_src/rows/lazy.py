"""`lazy_rows`: an optimizer that touches the rows of its updates only."""

from collections.abc import Sequence
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import optax

from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_analysis
from zenjax._src.rows import touched_rows
from zenjax._src.rows.row_analysis import RowAnalysis
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import require_one


def lazy_rows(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Runs `inner` on the rows of SparseRows instead of on whole tables.

  Use it for tables of which a step looks up a few rows: a step then costs by
  these rows, not by the table. Gradients of one id are added up, the touched
  rows of state and parameters are gathered, and `inner` runs once on arrays
  `[K, D]` beside all other leaves. Donate parameters and state, and apply the
  updates by `optax.apply_updates` or `zenjax.apply_updates`.

  Rows that a step does not touch keep their state and parameters. SGD and
  Adagrad do nothing to such rows anyway. Adam and momentum would move them:
  here they wait for the row's next gradient (LazyAdam). Weight decay acts only
  on touched rows, and a `UserWarning` says so. For Adam on all rows, use
  `zen_sync(output="dense")` without `lazy_rows`.

  Put all of your chain inside: transformations of optax raise an error on
  SparseRows. What `inner` does to rows is read off its traced program:

  - Rows that are independent are right: SGD, Adam, Lion, schedules, masks.
  - Sums over gradients are right, since untouched rows would add zero: a global
    norm, a mean, a flag that all is finite.
  - Anything else is refused, and the error names the line: sums of parameters
    or of momentum (LAMB, a norm after Adam), a maximum or an order of rows,
    noise for every row, `optax.MultiSteps`.

  Args:
    inner: The optimizer for touched rows and for all other leaves.

  Returns:
    A transformation of trees that may hold SparseRows. Its state is that of
    `inner`, made for dense parameters.

  Raises:
    ValueError: `inner` mixes rows, or only some of its steps update. `init`
      raises it where no table could be updated by rows, else `update`.

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
  inner = optax.with_extra_args_support(inner)
  known: dict[Any, RowAnalysis] = {}

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
    at = {}
    for i, x in rows.items():
      require_one("an update", x)
      at[i] = touched_rows.At.of(x.indices, x.num_rows)
    sizes = {i: x.capacity for i, x in rows.items()}
    analysis = row_analysis.analysis_of(
      inner, updates, state, params, extra, sizes, known
    )
    names = [name for name, _ in leaf_util.named_leaves(updates, is_rows)]
    require(analysis, names, "inner")
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    if params is not None:
      params = [
        at[i].take(x) if i in at else x
        for i, x in enumerate(structure.flatten_up_to(params))
      ]
    grads = touched_rows.values(leaves)
    out, few, places = touched_rows.step(
      analysis, structure, grads, params, state, at, extra
    )
    return back(out), touched_rows.put(state, few, places)

  return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
  """`optax.apply_updates` for updates that may hold SparseRows.

  Args:
    params: A tree of arrays.
    updates: The same with SparseRows for tables, or None for what stays, as
      does what has a gradient of float0, by `jax.grad(.., allow_int=True)`.

  Returns:
    The sums, in the dtypes of `params`; in place where these are donated.

  Raises:
    ValueError: SparseRows of another shape than the parameter.

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
  for table, refusal in analysis.refusals.items():
    raise ValueError(
      f"`{argument}` must update a row by that row alone, by the step, and by"
      f" sums over all gradients, but in table {names[table]!r} {refusal}. Give"
      " tables another optimizer by `optax.partition`. To keep this one, use"
      ' `zen_sync(.., output="dense")` without `lazy_rows`. If a clip is the'
      " cause, put it before what keeps a state."
    )


def _require_row_by_row(
  inner: optax.GradientTransformationExtraArgs, params: Any
) -> None:
  """Looks at `inner` before it is known which leaves are tables.

  These are taken for tables: leaves that look like one, or all leaves of two
  dimensions where none does. `update` looks again at those that are.

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
    return  # It needs arguments that only the user has.
  if len(analysis.refusals) == len(sizes):
    require(analysis, names, "inner")
  warn_of_decay(analysis, names)


def warn_of_decay(analysis: RowAnalysis, names: Sequence[str]) -> None:
  """Tells of tables whose rows move without a gradient."""
  for table in analysis.program.moving()[:1]:
    warnings.warn(
      "Weight decay, or what else moves rows without a gradient, acts only on"
      f" the rows of table {names[table]!r} that a step touches. For the plain"
      ' optimizer use `zen_sync(.., output="dense")` without `lazy_rows`;'
      " `optax.masked` leaves the table out.",
      stacklevel=2,
    )


def require_no_accumulation(state: Any, argument: str) -> None:
  """Raises ValueError where only some steps of an optimizer update.

  A row whose gradients come in the other steps alone would never move.
  """
  for kind, name in (
    (optax.MultiStepsState, "MultiSteps"),
    (optax.ApplyEvery, "apply_every"),
    (optax.contrib.SAMState, "contrib.sam"),
  ):
    is_one = lambda node, kind=kind: isinstance(node, kind)
    if any(map(is_one, jax.tree.leaves(state, is_leaf=is_one))):
      raise ValueError(
        f"`{argument}` must not be `optax.{name}`, whose steps without an"
        " update would lose the rows that they alone touch, got one;"
        " accumulate in the loss, `jax.lax.map(jax.checkpoint(loss),"
        " micro_batches).mean()`, of which there is one exchange, or inside"
        " `zenjax.data_parallel` put it around the chain and take array"
        " gradients by `jax.value_and_grad`."
      )

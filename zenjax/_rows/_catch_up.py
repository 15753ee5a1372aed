"""`catch_up`: rows that steps skipped, before they are read."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax._rows import _catch_up_state
from zenjax._rows import _catching_up
from zenjax._rows import _idle
from zenjax._rows import _on_rows
from zenjax._rows import _row_ids
from zenjax._rows._sparse_rows import is_rows
from zenjax._rows._sparse_rows import SparseRows


def catch_up(
  tx: optax.GradientTransformation,
  params: Any,
  opt_state: Any,
  ids: Any = None,
) -> tuple[Any, Any]:
  """Gives rows the steps that they missed, before a loss reads them.

  With `lazy_rows(..., catch_up=True)` a row that steps do not touch is behind:
  its momentum would have moved it on. Called with the ids that a step will look
  up, before its gradients, this makes the step that of the dense optimizer;
  without ids, before an evaluation or at the end of training, it brings all
  rows to where dense training would have them. It costs by the number of ids,
  without ids by the table, and next to nothing where no row is behind. To call
  it more often or with more ids than needed changes results by rounding only.

  Where devices share parameters, all must bring the same rows up to date: give
  the ids of all, `jax.lax.all_gather(ids, axis_name)`. Rows that a step touches
  and that were left out count in `CatchUpState.late`, of which `zenjax.report`
  tells.

  Args:
    tx: The optimizer: `lazy_rows(..., catch_up=True)`, or what holds it.
    params: Its parameters.
    opt_state: Its state.
    ids: In the structure of `params`, ids of any shape for tables, or
      SparseRows for the rows they hold; all else may be None or left out of
      dicts. They may repeat. Those out of range stand for the nearest row,
      negative ones count from the end. None: all rows of all tables.

  Returns:
    Parameters and state. Donate both: rows are changed in place.

  Raises:
    ValueError: `tx` holds no such transformation, or `ids` are of what is no
      table.
    TypeError: `ids` are no integers.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx = zenjax.lazy_rows(optax.sgd(1.0, momentum=0.5), catch_up=True)
    >>> params = {"table": jnp.zeros((3, 1)), "bias": jnp.zeros(1)}
    >>> state = tx.init(params)
    >>> for row in (1, 2, 1):
    ...   ids = {"table": jnp.array([row])}
    ...   params, state = zenjax.catch_up(tx, params, state, ids)
    ...   print(params["table"][:, 0].tolist())
    ...   rows = zenjax.SparseRows(jnp.array([row]), jnp.array([[-4.0]]), 3)
    ...   grads = {"table": rows, "bias": jnp.zeros(1)}
    ...   updates, state = tx.update(grads, state, params)
    ...   params = zenjax.apply_updates(params, updates)
    [0.0, 0.0, 0.0]
    [0.0, 4.0, 0.0]
    [0.0, 6.0, 4.0]
  """
  owners = _within(tx, params)
  nodes, structure = jax.tree.flatten(
    opt_state, is_leaf=_catch_up_state.is_state
  )
  number = sum(map(_catch_up_state.is_state, nodes))
  if not owners or number != len(owners):
    raise ValueError(
      "`tx` must hold `lazy_rows(..., catch_up=True)` and `opt_state` be its"
      f" state: it holds {len(owners)}, the state {number}; make the state with"
      " `tx.init(params)`."
    )
  leaves, params_structure = jax.tree.flatten(params)
  wanted = _ids_of_leaves(params, ids)
  for owner in owners:
    owner.asked = True
  left = iter(owners)
  for place, node in enumerate(nodes):
    if _catch_up_state.is_state(node):
      leaves, nodes[place] = next(left).bring(leaves, node, wanted)
  return params_structure.unflatten(leaves), structure.unflatten(nodes)


def _within(tx, params):
  """Who owns each CatchUpState of a state of `tx`, in their order."""
  owners = []

  def init(params):
    with _catching_up.asking() as found:
      state = tx.init(params)
    for node in jax.tree.leaves(state, is_leaf=_catch_up_state.is_state):
      owners.extend(owner for made, owner in found if made is node)
    return state

  jax.eval_shape(init, params)
  return owners


def _ids_of_leaves(params, ids):
  """Which rows of each leaf are meant; None for none."""
  paths, _ = jax.tree_util.tree_flatten_with_path(params)
  if ids is None:
    return [_on_rows.ALL for _ in paths]
  given = dict(jax.tree_util.tree_flatten_with_path(ids, is_leaf=is_rows)[0])
  found = [
    _at(jax.tree_util.keystr(path), leaf, given.pop(path))
    if path in given
    else None
    for path, leaf in paths
  ]
  if given:
    places = ", ".join(
      jax.tree_util.keystr(path) or "its root" for path in given
    )
    raise ValueError(
      "`ids` must stand where `params` has tables, but it has no leaf at"
      f" {places}; give a tree like `params`, None for all else."
    )
  return found


def _at(name, leaf, ids):
  """Each row once; `ids` as indexing reads them."""
  if not _idle.is_table(leaf):
    raise ValueError(
      f"`ids` must be of tables, arrays `[R, D]` of floating dtype, but"
      f" {name} is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}; leave it"
      " out."
    )
  num_rows = len(leaf)
  if is_rows(ids):
    ids = jnp.ravel(ids.indices)
  else:
    ids = _row_ids.given(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
      raise TypeError(
        f"`ids` of {name} must be integers, got {ids.dtype}; convert them with"
        " `.astype(jnp.int32)`."
      )
    ids = jnp.ravel(_row_ids.narrowed(ids, num_rows))
    ids = jnp.where(ids < 0, ids + num_rows, ids)
    ids = jnp.clip(ids, 0, num_rows - 1)
  once = SparseRows(ids, jnp.zeros((len(ids), 0), jnp.float32), num_rows)
  return _on_rows.touched(once.combine())

"""`catch_up`: rows that steps skipped, before they are read."""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
from typing import Any, NamedTuple
import warnings

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import compat
from zenjax._src.rows import by_rows
from zenjax._src.rows import idle_law
from zenjax._src.rows import idle_step
from zenjax._src.rows import sharded_tables
from zenjax._src.rows import sparse_rows
from zenjax._src.rows import touched_rows
from zenjax._src.rows import trees
from zenjax._src.rows.idle_law import Law
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows

# The state of rows that catch up, and what is said where they do not.


_MOST = np.iinfo(np.int32).max

_REMEDY = (
  "call `params, opt_state = zenjax.rows.catch_up(tx, params, opt_state, ids)`"
  " before the gradients of each step, with the ids of all devices,"
  " `jax.lax.all_gather(ids, axis_name)`"
)


class CatchUpState(NamedTuple):
  """State of `lazy_rows(..., catch_up=True)`.

  Attributes:
    inner: Of the optimizer within.
    current: Of each table `[R] int32`, how many steps a row has taken.
    steps: `int32`, how many steps there were.
    late: `int32`, how many rows of all updates so far were behind when `update`
      saw them, so that gradients were taken where they stood: zero if
      `zenjax.rows.catch_up` is called as it should. Rows that have taken no
      step count only where an optimizer moves such rows too, as weight decay
      does. `zenjax.report` tells of it. It stops at `2**31 - 1`.

  Example:
    >>> import optax
    >>> import zenjax
    >>> tx = zenjax.lazy_rows(optax.sgd(0.1, 0.9), catch_up=True)
    >>> state = tx.init({"table": jnp.zeros((600, 32))})
    >>> state.current["table"].shape, int(state.steps), int(state.late)
    ((600,), 0, 0)
  """

  inner: Any
  current: Any
  steps: jax.Array
  late: jax.Array


def is_state(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, CatchUpState)


def later(late: jax.Array, more: Sequence[jax.Array]) -> jax.Array:
  """`late` and so many more, as far as `int32` counts."""
  for number in more:
    late = late + jnp.minimum(number, _MOST - late)
  return late


def warn_of_no_call() -> None:
  """For an optimizer that nobody asked to bring rows up to date."""
  warnings.warn(
    "`catch_up=True` of `lazy_rows` should come with `zenjax.rows.catch_up`,"
    " which"
    f" was not called with this optimizer: {_REMEDY}. Otherwise gradients are"
    " taken of rows that miss steps, and parameters part from those of the"
    " dense optimizer; with `catch_up=False` rows keep what they have.",
    stacklevel=2,
  )


def late_lines(state: Any) -> list[str]:
  """Returns the lines of a report on rows that were behind."""
  nodes = jax.tree.leaves(state, is_leaf=is_state)
  late = sum(int(np.asarray(node.late)) for node in nodes if is_state(node))
  if not late:
    return []
  return [
    f"lazy_rows: {late} rows were behind when `update` saw them, and gradients"
    f" had been taken where they stood: {_REMEDY}."
  ]


# Rows that missed steps, brought to where these would have led them.


# Rows go in blocks, those together that need about as many steps one by one:
# most need few. A block below this size would not fill a machine, and more
# blocks than this would stand in line for an accelerator.
_ELEMENTS = 1 << 16
_BLOCKS = 8


def caught_up(
  law: Law,
  leaves: Sequence[jax.Array],
  ids: jax.Array | None,
  missed: jax.Array,
  end: jax.Array,
  counts: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """`leaves` with some rows where `missed` steps would have led them.

  Costs nothing where nobody missed any. Leaves are changed in place where the
  caller has no further use for them.

  Args:
    law: What such steps do.
    leaves: `[R, ...]`: the table's of the state, then its parameters.
    ids: `[K]`, all different, beyond `R` for none; None for all rows.
    missed: `[K] int32`.
    end: The step that comes next.
    counts: The counters at that step.

  Returns:
    The leaves; the steps that rows miss then, `[K]`: zeros; and how many rows
    were late, `int32`: had missed steps that would have moved them.
  """
  none = jnp.zeros((), jnp.int32)
  if law.is_nothing or not leaves[-1].size or not missed.size:
    return list(leaves), jnp.zeros_like(missed), none
  num_rows = len(leaves[-1])
  every = jnp.arange(num_rows, dtype=jnp.int32) if ids is None else ids
  *leaves, missed, every = _one_type([*leaves, missed, every])
  size = _block_size(len(every), leaves[-1].shape[1])

  def once(carry):
    leaves, missed, _ = carry
    # A row that has taken no step missed all of them.
    stood = jnp.zeros_like(missed, bool) if law.moves_new else missed == end
    late = jnp.sum((missed > 0) & ~stood, dtype=jnp.int32)
    alone = _steps_alone(law, leaves, None if ids is None else every, missed)
    # The longest first, and at the end those that missed nothing.
    order = jnp.argsort(-jnp.where(missed > 0, alone + 1, 0))
    order = jnp.pad(order, (0, -len(order) % size), constant_values=len(order))

    def block(i, leaves):
      which = lax.dynamic_slice(order, (i * size,), (size,))
      pick = lambda x, fill: x.at[which].get(mode="fill", fill_value=fill)
      at = touched_rows.At(
        touched_rows.distinct(pick(every, num_rows), num_rows), num_rows
      )
      few = [touched_rows.gather(x, at) for x in leaves]
      rows = idle_step.as_rows(law.idle, few)
      rows = _go(law, rows, pick(missed, 0), pick(alone, 0), end, counts)
      rows = [y.astype(x.dtype).reshape(x.shape) for x, y in zip(few, rows)]
      return [touched_rows.scatter(x, y, at) for x, y in zip(leaves, rows)]

    blocks = -(-jnp.sum(missed > 0, dtype=jnp.int32) // size)
    return _turns(blocks, block, leaves), jnp.zeros_like(missed), late

  behind = lambda carry: jnp.any(carry[1] > 0)
  carry = leaves, missed, compat.cast_like(none, missed)
  leaves, left, late = lax.while_loop(behind, once, carry)
  return list(leaves), left, late


def _go(law, x, missed, alone, end, counts):
  """Rows `x`, as `Idle.rows` takes them, after all steps that they missed."""

  def step(i, x):
    at = [c - (missed - i) for c in counts]
    *state, update = law.idle.rows(x, at)
    new = [*state, optax.apply_updates(x[-1], update)]
    return [jnp.where(_beside(i < alone, n), n, old) for n, old in zip(new, x)]

  x = _turns(jnp.max(alone), step, x)
  rest = missed - alone
  matrix = law.matrix(rest, end, counts)
  return [
    jnp.where(_beside(rest > 0, old), _mixed(law, matrix, i, x), old)
    for i, old in enumerate(x)
  ]


def _mixed(law, matrix, i, x):
  """Applies the matrices `[k, n, n]` to leaf `i`."""
  reads = [j for j in range(len(x)) if law.mixes[i, j]]
  terms = [
    _beside(matrix[:, i, j], x[j]) * idle_law.precise(x[j]) for j in reads
  ]
  return sum(terms[1:], terms[0]).astype(x[i].dtype)


def _steps_alone(law, leaves, ids, missed):
  """How many steps each row goes one by one."""
  number = jnp.minimum(missed, law.steps)
  if not (law.steps and law.at_rest):
    return number
  moves = jnp.zeros_like(missed, bool)
  for leaf in leaves[:-1]:
    at = touched_rows.At(ids, len(leaf))
    rows = leaf if ids is None else touched_rows.gather(leaf, at)
    moves |= jnp.any((rows != 0).reshape(len(rows), -1), axis=1)
  return jnp.where(moves, number, 0)


def _turns(count, body, x):
  """`fori_loop` from 0 to a count that only the run knows."""
  turn = lambda carry: (carry[0] + 1, body(*carry))
  return lax.while_loop(lambda c: c[0] < count, turn, (count * 0, x))[1]


def _block_size(rows, width):
  least = max(_ELEMENTS // max(width, 1), -(-rows // _BLOCKS), 1)
  return min(least, rows)


def _beside(column, x):
  """`[k]` with as many dimensions as `x`."""
  return column.reshape(-1, *[1] * (x.ndim - 1))


def _one_type(values):
  """All varying over the axes that any varies over: loops carry them."""
  for like in values:
    values = [compat.cast_like(x, like) for x in values]
  return values


# The transformation that lets rows catch up.


def catching_up(
  inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """See `zenjax.lazy_rows`."""
  owner = Owner(inner)

  def init(params):
    sharded_tables.refuse(params, "params", "lazy_rows")
    by_rows.require_row_by_row(inner, params, catches_up=True)
    owner.laws(params)
    state = CatchUpState(
      inner=inner.init(params),
      current=jax.tree.map(_none_taken, params),
      steps=jnp.zeros((), jnp.int32),
      late=jnp.zeros((), jnp.int32),
    )
    asked = _found.get()
    if asked is not None:
      asked.append((state, owner))
    return state

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `lazy_rows(..., catch_up=True)`,"
        " got None: rows that missed steps are moved; call `tx.update(grads,"
        " state, params)`."
      )
    return owner.update(trees.combined(updates), state, params, extra)

  return optax.GradientTransformationExtraArgs(init, update)


class Owner:
  """Facts that `catch_up=True` knows of an optimizer.

  Attributes:
    asked: Whether `zenjax.rows.catch_up` was called, or the user told that it
      must.
  """

  def __init__(self, inner: optax.GradientTransformationExtraArgs):
    self.asked = False
    self._inner = inner
    self._laws: dict[Any, dict[int, idle_law.Law]] = {}
    self._programs = by_rows.Programs(inner)

  def laws(self, params: Any) -> dict[int, idle_law.Law]:
    """Returns the law of each table that missed steps change, by number."""
    leaves, structure = jax.tree.flatten(params)
    kinds = tuple((jnp.ndim(x), jnp.result_type(x)) for x in leaves)
    key = structure, kinds
    if key not in self._laws:
      with jax.ensure_compile_time_eval():
        self._laws[key] = idle_law.laws(self._inner, params)
    return self._laws[key]

  def update(self, merged, state, params, extra):
    """Runs `inner` on rows that are brought up to date first."""
    laws = self.laws(params)
    current, current_structure = jax.tree.flatten(state.current)
    gone: dict[int, jax.Array] = {}
    left: dict[int, jax.Array] = {}
    late: dict[int, jax.Array] = {}

    def before(few, few_params, touched):
      new, structure = jax.tree.flatten(few_params)
      for i, at in enumerate(jax.tree.leaves(touched)):
        if i in laws and at.ids is not None:
          old = new[i]
          missed = _missed(current[i], at, state.steps)
          few, new[i], left[i], late[i] = _brought(
            laws[i], few, old, None, missed, state.steps
          )
          gone[i] = _difference(new[i], old)
      return few, structure.unflatten(new)

    touched_rows.require_shapes(merged, params)
    program = by_rows.of_rows(
      self._programs, merged, state.inner, params, extra
    )
    if program is None:
      out, inner = self._inner.update(merged, state.inner, params, **extra)
    elif program.knows_size and laws:
      raise ValueError(
        "`inner` of `lazy_rows(..., catch_up=True)` must do the same whatever"
        " size a table has, but it reads sizes in Python, of tables of shapes"
        f" {[*program.tables.values()]}; give masks, labels and rates by name,"
        " as trees, or leave `catch_up` out."
      )
    else:
      merged = trees.with_room(merged, program.fewest)
      out, inner = touched_rows.update(
        self._inner, program, merged, state.inner, params, extra, before
      )
    if late and not self.asked:
      self.asked = True
      warn_of_no_call()
    leaves, structure = jax.tree.flatten(trees.values(out))
    leaves = [
      _sum(x, gone[i]) if i in gone else x for i, x in enumerate(leaves)
    ]
    out = trees.with_values(merged, structure.unflatten(leaves))
    steps = state.steps + 1
    for i, leaf in enumerate(jax.tree.leaves(merged, is_leaf=is_rows)):
      if is_rows(leaf):
        at = touched_rows.touched(leaf)
        current[i] = _taken(current[i], at, steps, left.get(i))
      elif current[i].ndim:
        # All rows take a step. That none is behind is the caller's to see to:
        # to ask would cost a pass through tables that never are.
        current[i] = current[i] + 1
    current = current_structure.unflatten(current)
    total = later(state.late, list(late.values()))
    return out, CatchUpState(inner, current, steps, total)

  def bring(self, leaves, state, wanted):
    """All leaves of the parameters and the state after `catch_up`."""
    current, structure = jax.tree.flatten(
      state.current, is_leaf=trees.is_masked
    )
    mine = [i for i, x in enumerate(current) if not trees.is_masked(x)]
    params = jax.tree.unflatten(
      jax.tree.structure(state.current), [leaves[i] for i in mine]
    )
    laws, inner, leaves = self.laws(params), state.inner, list(leaves)
    for number, i in enumerate(mine):
      if not idle_step.is_table(leaves[i]) or wanted[i] is None:
        continue
      at, left = wanted[i], None
      if number in laws:
        missed = _missed(current[i], at, state.steps)
        inner, leaves[i], left, _ = _brought(
          laws[number], inner, leaves[i], at.ids, missed, state.steps
        )
      current[i] = _taken(current[i], at, state.steps, left)
    current = structure.unflatten(current)
    return leaves, state._replace(inner=inner, current=current)


def _brought(law, state, table, ids, missed, end):
  """State and parameters of one table after the steps that rows missed.

  And how many each row misses then: none; and how many rows were late.
  """
  leaves, structure = jax.tree.flatten(state)
  counts = [leaves[i] for i in law.idle.counters]
  own = [leaves[i] for i in law.idle.own]
  (*own, table), left, late = caught_up(
    law, [*own, table], ids, missed, end, counts
  )
  for i, x in zip(law.idle.own, own):
    leaves[i] = x
  return structure.unflatten(leaves), table, left, late


def _none_taken(leaf):
  return jnp.zeros(
    leaf.shape[:1] if idle_step.is_table(leaf) else (), jnp.int32
  )


def _missed(current, at, steps):
  """How many steps; none where `at` pads."""
  missed = steps - touched_rows.gather(current, at)
  return missed if at.ids is None else jnp.where(at.pads, 0, missed)


def _taken(current, at, steps, left):
  """`current` where rows have taken all steps but those `left`."""
  # Zeros, but known only after `current` was read: were that read in several
  # places while it is written, XLA would copy all of it.
  left = 0 if left is None else left
  if at.ids is None:
    return jnp.zeros_like(current) + (steps - left)
  now = jnp.zeros_like(at.ids) + (steps - left)
  return current.at[at.ids].set(now, mode="drop", unique_indices=True)


def _difference(new, old):
  return new.astype(idle_law.precision()) - old.astype(idle_law.precision())


def _sum(update, gone):
  return (idle_law.precise(update) + gone).astype(update.dtype)


# States that `init` makes, and who made them, while somebody asks.
_found: contextvars.ContextVar[list | None] = contextvars.ContextVar(
  "found", default=None
)


@contextlib.contextmanager
def asking() -> Iterator[list[tuple[CatchUpState, "Owner"]]]:
  """Collects states that `init` makes meanwhile, and who made them."""
  found: list = []
  token = _found.set(found)
  try:
    yield found
  finally:
    _found.reset(token)


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
    ...   params, state = zenjax.rows.catch_up(tx, params, state, ids)
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
  nodes, structure = jax.tree.flatten(opt_state, is_leaf=is_state)
  number = sum(map(is_state, nodes))
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
    if is_state(node):
      leaves, nodes[place] = next(left).bring(leaves, node, wanted)
  return params_structure.unflatten(leaves), structure.unflatten(nodes)


def _within(tx, params):
  """Who owns each CatchUpState of a state of `tx`, in their order."""
  owners = []

  def init(params):
    with asking() as found:
      state = tx.init(params)
    for node in jax.tree.leaves(state, is_leaf=is_state):
      owners.extend(owner for made, owner in found if made is node)
    return state

  jax.eval_shape(init, params)
  return owners


def _ids_of_leaves(params, ids):
  """Which rows of each leaf are meant; None for none."""
  paths, _ = jax.tree_util.tree_flatten_with_path(params)
  if ids is None:
    return [touched_rows.ALL for _ in paths]
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
  if not idle_step.is_table(leaf):
    raise ValueError(
      f"`ids` must be of tables, arrays `[R, D]` of floating dtype, but"
      f" {name} is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}; leave it"
      " out."
    )
  num_rows = len(leaf)
  if is_rows(ids):
    ids = jnp.ravel(ids.indices)
  else:
    ids = sparse_rows.given(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
      raise TypeError(
        f"`ids` of {name} must be integers, got {ids.dtype}; convert them with"
        " `.astype(jnp.int32)`."
      )
    ids = jnp.ravel(sparse_rows.narrowed(ids, num_rows))
    ids = jnp.where(ids < 0, ids + num_rows, ids)
    ids = jnp.clip(ids, 0, num_rows - 1)
  once = SparseRows(ids, jnp.zeros((len(ids), 0), jnp.float32), num_rows)
  return touched_rows.touched(once.combine())

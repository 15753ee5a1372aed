"""`lazy_rows`: an optimizer that touches the rows of its updates only."""

from typing import Any

import jax
import optax

from zenjax._rows import _by_rows
from zenjax._rows import _catching_up
from zenjax._rows import _in_chunks
from zenjax._rows import _on_rows
from zenjax._rows import _trees
from zenjax._rows._sparse_rows import is_rows


def lazy_rows(
  inner: optax.GradientTransformation, *, catch_up: bool = False
) -> optax.GradientTransformationExtraArgs:
  """Runs `inner` on the rows of SparseRows instead of on whole tables.

  Rows of one index are added up, the touched rows of every state leaf and of
  the parameters gathered, `inner` sees arrays `[K, D]`, and what it makes of
  the state is written back: a step costs by the rows, not by the table. Arrays
  in the tree go through `inner` as they are. Donate parameters and state, and
  apply what comes out with `zenjax.apply_updates`. For TPU, tables whose width
  128 does not divide are stored by `zenjax.packed`, or each step copies them.

  Optax around it sees SparseRows and raises an error: it goes inside, and of
  clipping `zenjax.clip_by_global_norm` may stand before. `optax.MultiSteps`
  needs gradients that are arrays; add SparseRows of several batches with `+`.

  Rows that a step does not touch keep their state and their parameters. For
  SGD, Adagrad and all else that does nothing where the gradient is zero, this
  equals `inner` on dense gradients to rounding. Adam and momentum would go on
  decaying moments and moving such rows; here moments wait as they are for the
  row's next gradient, and Adam corrects their bias by the number of all steps
  (LazyAdam). Weight decay acts on touched rows only: a `UserWarning` says so.

  How `inner` treats rows is read off its program. Values of all gradients come
  out as on arrays, in however many parts rows are updated: a global norm, a
  mean, a maximum, a flag that all is finite (`optax.clip_by_global_norm`,
  `clip_by_block_rms`, `apply_if_finite`, NovoGrad). An optimizer that needs
  other rows in another way is refused, and the error names the line: what
  reads the state or the parameters of rows without a gradient (LAMB, Adafactor,
  a norm taken behind Adam), draws or numbers rows, or empties at some steps
  what waits in all of them. `python tests/optax_table.py` prints what each
  transformation of optax does.

  With `catch_up=True` a row remembers the last step that it took, in 4 bytes,
  and is given those that it missed, as with gradients of zero, when it is next
  touched:

  - Momentum SGD, Nesterov's, and weight decay, coupled or not: `k` steps are
    the power of a small matrix, whatever `k` is. With a schedule they are a
    product of `k` such matrices, not of rows.
  - Adam, AdamW, and others whose movement dies out: step by step, but for at
    most 225 steps with `b1=0.9` in float32, 117 in bfloat16. By then the first
    moment is 5e-11 of what it was, and rounding 6e-8; moments and weight decay
    of all further steps are products as above.

  Rows must be brought up to date *before* a loss reads them, or gradients are
  taken where the row stood: call `zenjax.catch_up` before the gradients, and
  without ids before an evaluation and at the end. Then 200 steps on a text gave
  the dense optimizer's parameters to 2e-6 with momentum (with and without
  Nesterov) and 3e-6 with Adam and AdamW; each was 0.5e-6 to 6e-6 from the same
  in float64. Without the call parameters parted by up to 0.5 with momentum and
  0.2 with Adam.

  A `UserWarning` tells of an optimizer that steps before anyone called
  `zenjax.catch_up` with it. `CatchUpState.late` counts rows that were behind
  when a step touched them, as where each device gives its own ids alone, and
  `zenjax.report` says so.

  A gradient that comes as an array is a step of all rows, and those behind stay
  so: the loss that it is of read all rows, so bring all up to date before it.
  What a missed step was is known by its number alone. Schedules are followed;
  numbers in the state that the program may change, as
  `optax.inject_hyperparams` keeps them, are refused.

  Args:
    inner: Any transformation that updates a row by that row's gradient, state
      and parameters, and by values of all gradients; `chain` as usual.
    catch_up: Whether rows are given the steps that they missed.

  Returns:
    A transformation of trees that may hold SparseRows. Its state is that of
    `inner`, made for dense parameters; with `catch_up` a `CatchUpState` of it.

  Raises:
    ValueError: `inner` accumulates gradients (`optax.MultiSteps`), or updates
      rows by others (LAMB, Adafactor). `init` says so; where `inner` needs
      more arguments than updates, parameters and `value`, and where leaves of
      two dimensions are treated unlike, `update` does. With `catch_up`, that
      missed steps cannot be made up for: they would depend on more than the row
      and the number of the step, state is changed by other than factors
      (AMSGrad, AdaBelief), or rows never come to rest (Lion, Adam on L2).

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
    TensorFlow Addons' `LazyAdam` for the rule without `catch_up`. Lazy updates
    in closed form: B. Carpenter, "Lazy Sparse Stochastic Gradient Descent for
    Regularized Multinomial Logistic Regression", 2008.
  """
  inner = optax.with_extra_args_support(inner)
  if catch_up:
    return _catching_up.catching_up(inner)

  programs = _by_rows.Programs(inner)

  def init(params):
    _by_rows.require_row_by_row(inner, params)
    return inner.init(params)

  def update(updates, state, params=None, **extra):
    merged = _trees.combined(updates)
    if params is not None:
      _on_rows.require_shapes(merged, params)
    program = _by_rows.of_rows(programs, merged, state, params, extra)
    if program is None:
      return inner.update(updates, state, params, **extra)
    merged = _trees.with_room(merged, program.fewest)
    return _in_chunks.in_chunks_or_whole(
      inner, program, merged, state, params, extra
    )

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
  _on_rows.require_shapes(updates, params)

  def apply(u, p):
    if u is None or u.dtype == jax.dtypes.float0:
      return p
    if is_rows(u):
      return p.at[u.indices].add(u.values.astype(p.dtype), mode="drop")
    return optax.apply_updates(p, u)

  return jax.tree.map(
    apply, updates, params, is_leaf=lambda x: x is None or is_rows(x)
  )

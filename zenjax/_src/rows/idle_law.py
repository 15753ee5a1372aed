"""Applies many steps without gradients to a row, at a bounded cost.

Let `x` be what an element of a table holds: its share of the state, then the
parameter. Two kinds of optimizers can be caught up:

- Linear ones, `x' = A x` with one matrix `A` for all elements (momentum,
  weight decay of SGD). `k` steps are `A ** k`, and where `A` depends on the
  step, by a schedule, the product of `k` small matrices.
- Those whose state is scaled by constants and whose movement dies out with it,
  but for a share of the parameter (Adam: `b1 ** k`, `b2 ** k`). The first steps
  are gone through one by one, all others are one product as above.

Which kind one is follows from its derivatives: whether these depend on `x`, and
on the counters. That is read off the program; no number of trials could tell
that a schedule never changes.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.rows import idle_step
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_program
from zenjax._src.rows.idle_step import Idle

# Powers and products of the small matrices that idle steps are.
#
# `k` is the number of rows, `n` that of what an element of a row holds.


_BITS = 6  # of an exponent, looked up at once
_DIGITS = -(-31 // _BITS)
_CHUNK = 512  # steps whose matrices are made at once


def precision() -> Any:
  """The dtype of matrices: float32, or float64 where JAX has it."""
  return jnp.result_type(float)


def precise(x: jax.Array) -> jax.Array:
  """`x` in the dtype of matrices."""
  return x.astype(precision())


def tables(matrix: np.ndarray) -> np.ndarray:
  """`matrix ** (d * 64 ** i)` as `[i, d, n, n]`, in float64."""
  base, found = np.asarray(matrix, np.float64), []
  with np.errstate(all="ignore"):
    for _ in range(_DIGITS):
      powers = [np.eye(len(matrix))]
      for _ in range(1 << _BITS):
        powers.append(powers[-1] @ base)
      found.append(powers[:-1])
      base = powers[-1]
  return np.array(found)


def powers_of(digits: np.ndarray, exponents: jax.Array) -> jax.Array:
  """`matrix ** exponents` as `[k, n, n]`, to some roundings.

  Squaring in float32 would double the error at every turn; one product of
  numbers rounded once for each digit does not.
  """
  result = jnp.asarray(digits[0], precision())[exponents & (1 << _BITS) - 1]
  for i in range(1, _DIGITS):
    digit = (exponents >> (_BITS * i)) & (1 << _BITS) - 1
    factor = jnp.asarray(digits[i], precision())[digit]
    result = _times(factor, result)
  return result


def products(
  change: Callable[[jax.Array], jax.Array], first: jax.Array, end: jax.Array
) -> jax.Array:
  """For each row, the matrices of steps `first` to `end - 1` multiplied.

  All rows end at one step, so one product from the end backwards passes
  through what every row asks for: the cost is that of the longest, in numbers
  and not in rows of a table. Matrices are held by what they differ from one,
  for a decay of 1e-8 a step would be lost in float32.

  Args:
    change: Of steps `[c] int32`, `[c, n, n]`: their matrices less one.
    first: `[k] int32`.
    end: `int32`, not before any of `first`.

  Returns:
    `[k, n, n]`, less one as well.
  """
  total = jnp.zeros_like(change(end[None])[0])
  out = total + jnp.zeros_like(first, precision())[:, None, None]

  def chunk(carry):
    end, total, out = carry
    start = end - _CHUNK
    steps = start + jnp.arange(_CHUNK, dtype=jnp.int32)
    suffix = lax.associative_scan(_then, change(steps), reverse=True)
    suffix = _then(jnp.broadcast_to(total, suffix.shape), suffix)
    at = first - start
    here = (at >= 0) & (at < _CHUNK)
    found = suffix.at[at].get(mode="clip")
    return start, suffix[0], jnp.where(here[:, None, None], found, out)

  earliest = jnp.min(first)
  carry = (end, total, out)
  return lax.while_loop(lambda c: c[0] > earliest, chunk, carry)[-1]


def _then(later, earlier):
  """Both steps, each less one."""
  return later + earlier + _times(later, earlier)


def _times(a, b):
  # Accelerators round the operands of a matrix product to fewer bits.
  return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)


# Derivatives of a step without gradients, and what they depend on.


class Slopes:
  """Derivatives of what a step adds to an element."""

  def __init__(self, idle: Idle):
    self._idle = idle
    self._x = [jnp.ones((), dtype) for dtype in idle.dtypes]

  def _at(self, i: int, j: int, x: Any, counts: Any) -> jax.Array:
    """Differentiates output `i` by input `j` alone."""

    def added(v):
      values = [*x[:j], v, *x[j + 1 :]]
      out = precise(self._idle(values, counts)[i])
      # The last output is what is added already.
      return out if i == len(x) - 1 else out - precise(values[i])

    return jax.jvp(added, (x[j],), (jnp.ones_like(x[j]),))[1]

  def value(self, i: int, j: int) -> float:
    return float(self._at(i, j, self._x, self._idle.start))

  def bends(self, i: int, j: int) -> bool:
    """Returns True if it depends on the element."""
    start = self._idle.start
    return _depends(lambda x: self._at(i, j, x, start), self._x)

  def varies(self, i: int, j: int) -> bool:
    """Returns True if it depends on the counters."""
    counts = list(self._idle.start)
    return _depends(lambda c: self._at(i, j, self._x, c), counts)

  def matrix(
    self, which: Sequence[int], counts: Sequence[jax.Array]
  ) -> jax.Array:
    at = lambda i, j: self._at(i, j, self._x, counts)
    return jnp.stack([jnp.stack([at(i, j) for j in which]) for i in which])

  def sum_up_to(self, outputs: Sequence[int]) -> bool:
    """True if some outputs are inputs times slopes, tried for signs and steps.

    Their slopes are those of constants, which they are not.
    """
    idle, n = self._idle, len(self._x)
    rng = np.random.default_rng(0)
    rounding = 16 * max(float(jnp.finfo(d).eps) for d in idle.dtypes)
    for scale in (1e-3, 1.0, 1e3):
      x = [jnp.asarray(scale * rng.random(), d) for d in idle.dtypes]
      counts = [c + int(scale) for c in idle.start]
      before = np.array([*map(float, x[:-1]), 0.0])
      added = np.array([float(v) for v in idle(x, counts)]) - before
      slopes = np.asarray(self.matrix(range(n), counts), np.float64)
      terms = slopes * np.array([float(v) for v in x])
      size = np.abs(terms).sum(1) + np.abs(before)
      off = np.abs(added - terms.sum(1)) > rounding * size
      if np.any(off[list(outputs)]):
        return False
    return True


def _depends(fun, args):
  """Returns True if what `fun` returns is another for other `args`; never run.

  A program under `vmap` is mapped only where it depends on what is mapped.
  """
  many = jax.tree.map(lambda x: jnp.stack([x, x]), args)
  if not many:
    return False
  try:
    jax.eval_shape(jax.vmap(fun, out_axes=None), many)
  except ValueError as error:
    if "out_axes" not in str(error):
      raise
    return True
  return False


# Steps that are gone through one by one, at most.
MOST = 4096

# Movement dies out when it is this much under a rounding of what it began as:
# a schedule may raise it a thousand times until then and not be missed.
_SPARE_BITS = 10

_NO_FACTORS = "a leaf of its state is changed by more than constant factors"


@dataclasses.dataclass(frozen=True, eq=False)
class Law:
  """How one table's rows change at steps without gradients.

  Attributes:
    idle: One such step.
    steps: How many are gone through one by one.
    at_rest: Whether a row of which all state is zero needs none of these.
    moves_new: Whether it moves rows that have taken no step, as weight decay.
    mixes: `[n, n]`, which leaves the product of the others reads for which.
    whole: Whether the matrix of every step is `changes`, or the last entry.
    changes: That of the step with some counters, less one, if it varies.
    digits: Of the powers of the matrix, or of what of it does not vary.
  """

  idle: Idle
  steps: int
  at_rest: bool
  moves_new: bool
  mixes: np.ndarray
  whole: bool
  changes: Callable[[Sequence[jax.Array]], jax.Array] | None
  digits: np.ndarray

  @property
  def is_nothing(self) -> bool:
    """Returns True if a step without gradients leaves rows as they are."""
    one = np.eye(len(self.mixes))
    same = np.array_equal(self.digits[0, 1], one) and self.changes is None
    return same and self.steps == 0

  def matrix(
    self, number: jax.Array, end: jax.Array, counts: Sequence[jax.Array]
  ) -> jax.Array:
    """Returns the last idle steps of each row as `[k, n, n]`.

    Args:
      number: `[k] int32`, of these steps.
      end: The step that follows.
      counts: The counters at that step.
    """
    changes = self.changes
    if changes is None:
      return powers_of(self.digits, number)

    def at(steps):
      return jax.vmap(lambda s: changes([c - (end - s) for c in counts]))(steps)

    product = products(at, end - number, end)
    if self.whole:
      return product + jnp.eye(len(self.mixes), dtype=precision())
    powers = powers_of(self.digits, number)
    return powers.at[:, -1, -1].set(1 + product[:, 0, 0])


class Unlawful(Exception):
  """Why rows cannot be caught up."""


def laws(
  inner: optax.GradientTransformationExtraArgs, params: Any
) -> dict[int, Law]:
  """How rows of each table change that do change, by the leaf's number.

  Raises:
    ValueError: There is a table that cannot be caught up.
  """
  try:
    idles = idle_step.idle_steps(inner, params)
  except TypeError as error:
    raise ValueError(
      _refusal(
        "it needs more than gradients and parameters, which nobody has"
        " at a step that is made up for"
      )
    ) from error
  names = [name for name, _ in leaf_util.named_leaves(params)]
  shared: dict[Any, Law] = {}
  for table, idle in idles.items():
    try:
      _require_known(idle)
      if idle.kind not in shared:
        shared[idle.kind] = law(idle)
    except Unlawful as error:
      raise ValueError(_refusal(f"{error} (table {names[table]!r})")) from None
  tables = [i in idles for i in range(len(names))]
  if not row_program.is_elementwise(inner, params, tables):
    raise ValueError(_refusal("it moves elements of a table by others"))
  found = {
    i: dataclasses.replace(shared[idle.kind], idle=idle)
    for i, idle in idles.items()
  }
  return {i: law for i, law in found.items() if not law.is_nothing}


def _refusal(reason: str) -> str:
  return (
    "`inner` must be one of which missed"
    f" steps can be made up for, but {reason}; use momentum SGD, Adam or AdamW"
    " with numbers or schedules, clip before it by"
    " `zenjax.rows.clip_by_global_norm`."
  )


def _require_known(idle):
  if idle.strange:
    raise Unlawful(
      "a step without gradients depends on more than the row, the number of the"
      f" step and what is fixed: on {', '.join(idle.strange)}"
    )


def law(idle: Idle) -> Law:
  """How rows change; raises `Unlawful` where neither kind fits."""
  n = len(idle.dtypes)
  slopes = Slopes(idle)
  rests = _rests(idle)
  straight = not any(slopes.bends(i, j) for i in range(n) for j in range(n))
  linear = straight and slopes.sum_up_to(range(n))
  shown = [(i, j) for i in range(n) for j in range(n)]
  if not linear:
    _require_state_scaled(slopes, n)
    shown = [(i, j) for i, j in shown if i < n - 1] + [(n - 1, n - 1)]
  matrix = np.eye(n)
  for i, j in shown:
    matrix[i, j] += slopes.value(i, j)
  varying = [(i, j) for i, j in shown if slopes.varies(i, j)]
  fixed = [(i, j) for i, j in shown if slopes.value(i, j)]
  of_parameter = any(j == n - 1 for _, j in fixed + varying)
  mixes = matrix != 0
  for i, j in varying:
    mixes[i, j] = True
  mixes = np.linalg.matrix_power(mixes.astype(int), n) > 0
  _require_shapes(mixes, idle)
  changes = None
  if varying:
    last = range(n) if linear else [n - 1]
    changes = lambda counts: slopes.matrix(last, counts)
  return Law(
    idle=idle,
    steps=0 if linear else _steps_until_still(idle),
    at_rest=rests,
    moves_new=of_parameter or not (rests and idle.zero),
    mixes=mixes,
    whole=linear,
    changes=changes,
    digits=tables(matrix),
  )


def _require_state_scaled(slopes, n):
  if not slopes.sum_up_to(range(n - 1)):
    raise Unlawful(_NO_FACTORS)
  for i in range(n - 1):
    for j in range(n):
      if slopes.bends(i, j) or slopes.varies(i, j):
        raise Unlawful(_NO_FACTORS)
    if slopes.value(i, n - 1) != 0:
      raise Unlawful("its state follows the parameters, and it is not linear")
  if slopes.bends(n - 1, n - 1):
    raise Unlawful("it moves a parameter by more than a share of it")


def _require_shapes(mixes, idle):
  wide = np.array([*idle.wide, True])
  if np.any(mixes & (wide[:, None] != wide)):
    raise Unlawful("state of a row and state of its elements mix")


def _rests(idle):
  """Returns True if all zeros stay so."""
  x = [jnp.zeros((), dtype) for dtype in idle.dtypes]
  later = [c + 1000 for c in idle.start]
  found = [v for counts in (idle.start, later) for v in idle(x, counts)]
  return not any(np.any(np.asarray(v, np.float64)) for v in found)


def _steps_until_still(idle):
  """After how many steps the movement has died out, by trying.

  The parameter is zero, so that a share of it is no movement, and the counters
  stand still, so that a schedule's end is no rest: only the state changes.
  """
  rng = np.random.default_rng(0)
  sizes = np.array([1e-3, 1.0, 1e3])[:, None] * (0.5 + rng.random((3, 4)))
  state = [
    jnp.array(sizes if w else sizes[:, 0], dtype)
    for w, dtype in zip(idle.wide, idle.dtypes)
  ]
  zeros = jnp.zeros(sizes.shape, idle.dtypes[-1])

  def movements(later):
    counts = [jnp.full(len(sizes), c + later) for c in idle.start]

    def step(state, _):
      *state, moved = idle.rows([*state, zeros], counts)
      return state, jnp.max(jnp.abs(precise(moved)), axis=1)

    return lax.scan(step, state, length=MOST)[1]

  later = jnp.array([0, *(10**i for i in range(6))], jnp.int32)
  moved = np.asarray(jax.jit(jax.vmap(movements))(later), np.float64)
  bits = jnp.finfo(idle.dtypes[-1]).nmant + 1 + _SPARE_BITS
  moves = moved > moved.max(axis=1, keepdims=True) * 2.0**-bits
  steps = 1 + int(np.max(np.nonzero(moves)[1], initial=-1))
  if steps >= MOST:
    raise Unlawful(f"it still moves a row after {MOST} steps without gradients")
  return steps

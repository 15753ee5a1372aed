"""Defines SparseRows, a gradient that holds only some rows of a table."""

from collections.abc import Sequence
import copy
import math
from typing import Any, NoReturn

import jax
from jax import lax
from jax.core import Tracer
from jax.extend import random as jex_random
import jax.numpy as jnp
import numpy as np

from zenjax._src.core import collectives
from zenjax._src.rows import batch_layout
from zenjax.kernels.reference import row_mask

# Part of the errors of programs that compute with SparseRows as with arrays.
_CURES = (
  "take norms with zenjax.global_norm, and add SparseRows with `+`. Move optax"
  " transformations that are in front of zen_sync behind it. Put all that are"
  " behind it inside zenjax.lazy_rows, where Adam and decay act on looked-up"
  " rows only, or write zen_sync(.., output='dense'); for sharded tables use"
  " zenjax.sharded_optimizer(tx, axis_name), which clips with clip_norm="
)

# Row ids are in an array that refuses arithmetic.
#
# A transformation that maps `lambda g: 0.1 * g` over all leaves would multiply
# plain integers too, and silently train other rows. Therefore ids have an
# extended dtype. JAX can move it but not compute with it, so code that does not
# know SparseRows raises a TypeError. Random keys are the only such dtype that
# JAX lets others define.


def _not_a_key(*args, **kwargs):
  del args, kwargs
  raise TypeError("Row ids of SparseRows are not a random key.")


_ROW_IDS = jex_random.define_prng_impl(
  key_shape=(1,),
  seed=_not_a_key,
  split=_not_a_key,
  random_bits=_not_a_key,
  fold_in=_not_a_key,
  name="zenjax_row_ids",
  # JAX shows it: "multiply does not accept dtypes float32, key<..>".
  tag=f"zenjax row_id of SparseRows: {_CURES}",
)

# Other code may replace ids with zeros, for example by `jnp.zeros_like`. Then
# they must not be a row, so zero encodes the smallest integer, which is out of
# range for any table.
_NOWHERE = np.uint32(1 << 31)


def narrowed(ids: Any, num_rows: int, what: str) -> jax.Array:
  """Returns integer ids as int32; ids out of range stay out of range.

  Args:
    ids: Integers of any dtype. Without x64, JAX would truncate NumPy's int64 to
      32 bits, so that an id out of range would become another row.
    num_rows: The number of rows of the table.
    what: The name of the argument, for errors.
  """
  if not isinstance(ids, jax.Array):
    is_jax = any(isinstance(x, jax.Array) for x in jax.tree.leaves(ids))
    ids = jnp.asarray(ids) if is_jax else np.asarray(ids)
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise TypeError(
      f"{what} must be integers, got {ids.dtype}. Use `.astype(jnp.int32)`."
    )
  info = jnp.iinfo(ids.dtype)
  if info.min < 0 and info.bits <= 32 or info.bits < 32:
    return jnp.asarray(ids, jnp.int32)
  # One beyond either end, because -1 is the last row.
  low = -num_rows - 1 if info.min < 0 else 0
  bounds = np.asarray([low, num_rows], ids.dtype)
  clip = jnp.clip if isinstance(ids, jax.Array) else np.clip
  return jnp.asarray(clip(ids, *bounds), jnp.int32)


def seal(ids: jax.Array) -> jax.Array:
  """Converts `[K] int32` to the extended dtype."""
  words = lax.bitcast_convert_type(ids, jnp.uint32) ^ _NOWHERE
  return jax.random.wrap_key_data(words[..., None], impl=_ROW_IDS)


def unseal(sealed: Any) -> Any:
  """Inverse of `seal`; specs and shapes are returned as they are."""
  is_array = isinstance(sealed, jax.Array)
  if not is_array or not jnp.issubdtype(sealed.dtype, jax.dtypes.prng_key):
    return sealed
  # Without the clone, `jax_debug_key_reuse` would allow only one read.
  words = jax.random.key_data(jax.random.clone(sealed))[..., 0]
  return lax.bitcast_convert_type(words ^ _NOWHERE, jnp.int32)


# Classes that are not arrays, and whose errors say what to do instead.
#
# Errors of Python, NumPy, JAX and optax name a class or an operator, but not a
# remedy. Therefore operators raise their own errors, and the class's name has
# the remedy. JAX prints it if two trees differ in structure, for example in
# `optax.adam`, and if an argument must be an array.


class _Named(type):
  _CURES = f"{_CURES}, or convert with .to_dense()"

  def __repr__(cls) -> str:
    return f"<class 'zenjax.{cls.__name__}', not an array: {cls._CURES}>"


class NoArray(metaclass=_Named):
  """Base of the classes that have some rows of a table."""

  __slots__ = ()

  # Otherwise NumPy's operators would run once for each element.
  __array_ufunc__ = None
  _NO_ARITHMETIC = (
    "SparseRows take no arithmetic but `+`. Scale them with"
    " `rows.with_values(rows.values * factor)`."
  )

  def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
      "SparseRows are not an array. Use `rows.values` for the rows, or"
      " `rows.to_dense()` for the whole table."
    )

  def _not_added(self, other: Any) -> NoReturn:
    raise TypeError(
      "SparseRows can only be added to SparseRows of the same table, or to an"
      f" array on their left, got {type(other).__name__}. To update parameters,"
      " call `zenjax.apply_updates(params, updates)`."
    )

  def _not_scaled(self, other: Any = None) -> NoReturn:
    del other
    raise TypeError(self._NO_ARITHMETIC)

  __sub__ = __rsub__ = _not_added
  __mul__ = __rmul__ = __truediv__ = __neg__ = _not_scaled


@jax.tree_util.register_pytree_with_keys_class
class SparseRows(NoArray):
  """Gradient of a `[num_rows, D]` table as some rows; all others are zero.

  `zenjax.value_and_grad` returns it for tables that are only looked up, and
  `zen_sync(output="rows")` for tables that are synchronized sparsely. It is a
  pytree of two leaves, ids and values. The dtype of the ids refuses arithmetic,
  so a transformation that scales or sums all leaves raises TypeError. Use optax
  inside `zenjax.lazy_rows`.

  `jax.vmap` and `jax.lax.scan` stack several SparseRows in one, with more
  dimensions in front. Only `to_dense` and `combine` accept a stack.

  Args:
    indices: Row ids, `[K]` integers. Negative ids count from the end, as in
      NumPy. Ids out of range, such as `num_rows`, mark padding. If an id
      repeats, its rows are summed.
    values: The rows, `[K, D]`.
    num_rows: The number of rows of the whole table; static.

  Raises:
    TypeError: `indices` are not integers.
    ValueError: The shapes do not match, or `num_rows` is not from 0 to
      2**31 - 2.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> rows = zenjax.SparseRows(
    ...   indices=jnp.array([1, 3, 1]), values=jnp.ones((3, 2)), num_rows=3
    ... )
    >>> rows
    SparseRows(rows [1 3 1] of 3, values float32[3,2])
    >>> rows.to_dense().tolist()
    [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    >>> rows.combine()
    SparseRows(rows [1 3 3] of 3, values float32[3,2])
  """

  # `unique` promises that no index occurs twice and that padding is zero.
  # `by_owner` marks the gradient of a sharded table. Both are static, and part
  # of the pytree's structure, so that they survive `jit`.
  __slots__ = ("_ids", "values", "num_rows", "unique", "by_owner")

  def __init__(self, indices: Any, values: Any, num_rows: int):
    if not 0 <= num_rows < 2**31 - 1:
      raise ValueError(
        f"`num_rows` must be from 0 to 2**31 - 2, got {num_rows!r}. Split a"
        " larger table into parameters of fewer than 2**30 rows each."
      )
    ids = narrowed(indices, num_rows, "`indices` of SparseRows")
    values = jnp.asarray(values)
    _require_shapes(ids.shape, values.shape)
    self._ids = seal(ids)
    self.values = values
    self.num_rows = num_rows
    self.unique = False
    self.by_owner = False

  @property
  def indices(self) -> Any:
    """Row ids, `[K] int32`."""
    return unseal(self._ids)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the whole table, `(num_rows, D)`, or of all in a stack."""
    *stacked, _, width = self.values.shape
    return *stacked, self.num_rows, width

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    """The number of elements of the whole table."""
    return math.prod(self.shape)

  @property
  def dtype(self) -> Any:
    return self.values.dtype

  @property
  def capacity(self) -> int:
    """`K`, the number of rows including padding."""
    return self.values.shape[-2]

  def to_dense(self) -> jax.Array:
    """Returns the whole table, `[num_rows, D]`."""
    if self.ndim > 2:
      return jax.vmap(SparseRows.to_dense)(self)
    zeros = jnp.zeros(self.shape, self.values.dtype)
    return zeros.at[self.indices].add(self.values, mode="drop")

  def combine(self) -> "SparseRows":
    """Returns the same gradient with every index once, and zeros as padding.

    16-bit values are summed in float32. Indices are sorted afterwards, which
    costs a sort of `K` ids. Results of `zen_sync` and `combine` have every
    index once already, and are returned as they are.
    """
    if self.ndim > 2:
      return jax.vmap(SparseRows.combine)(self)
    if self.unique or not self.capacity:
      return self
    ids, values = _wide(self)
    order = jnp.argsort(ids, stable=True)
    ids, values = ids[order], values[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    segment = jnp.cumsum(starts, dtype=jnp.int32)[: len(ids)] - 1
    total = jnp.zeros_like(values).at[segment]
    total = total.add(values, indices_are_sorted=True).astype(self.dtype)
    unique = jnp.full_like(ids, self.num_rows).at[segment]
    unique = unique.set(ids, indices_are_sorted=True)
    return SparseRows(unique, total, self.num_rows).as_unique()

  def as_unique(self, unique: bool = True) -> "SparseRows":
    """Marks rows of which no index occurs twice and padding is zero."""
    return self._with(unique=unique)

  def as_by_owner(self) -> "SparseRows":
    """Marks rows as the gradient of a sharded table."""
    return self._with(by_owner=True)

  def with_values(self, values: Any) -> "SparseRows":
    """Returns the same rows with other `values: [K, D']`."""
    values = jnp.asarray(values)
    _require_shapes(self._ids.shape, values.shape)
    return self._with(values=values)

  def _with(self, **changes: Any) -> "SparseRows":
    rows = copy.copy(self)
    for name, value in changes.items():
      setattr(rows, name, value)
    return rows

  def __add__(self, other: Any) -> "SparseRows":
    """Concatenates both: `K` is the sum of both.

    Raises:
      TypeError, ValueError: `other` is not SparseRows of the same table.
    """
    if not isinstance(other, SparseRows):
      self._not_added(other)
    require_one("one that is added", self)
    return concatenated([self, other])

  def __radd__(self, table: Any) -> jax.Array:
    """Returns `table + rows`, an array in the table's dtype.

    `optax.apply_updates`, Flax's `TrainState.apply_gradients` and
    `nnx.Optimizer.update` use it to apply updates.

    Raises:
      TypeError, ValueError: `table` is not an array of this shape.
    """
    if not isinstance(table, jax.Array | np.ndarray):
      self._not_added(table)
    require_update(self, table.shape)
    return added(jnp.asarray(table), self)

  @classmethod
  def in_place(cls, table: jax.Array) -> "SparseRows":
    """Returns all rows of `table: [R, D]`, zero rows as padding; no copy."""
    num_rows = table.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    nonzero = row_mask(table).nonzero
    rows = cls(jnp.where(nonzero, row, num_rows), table, num_rows)
    return rows.as_unique()

  @classmethod
  def from_dense(cls, table: jax.Array, capacity: int) -> "SparseRows":
    """Returns the first `capacity` nonzero rows of `table: [R, D]`."""
    if not len(table):
      return no_rows(table, capacity)
    nonzero, num_rows = row_mask(table).nonzero, len(table)
    (ids,) = jnp.nonzero(nonzero, size=capacity, fill_value=num_rows)
    values = table.at[ids].get(mode="fill", fill_value=0)
    return cls(ids, values, num_rows)

  def __repr__(self) -> str:
    ids = self.indices
    known = isinstance(ids, jax.Array) and not isinstance(ids, Tracer)
    which = np.array2string(np.asarray(ids), threshold=8) if known else "..."
    values = self.values
    if hasattr(values, "shape"):
      values = f"{values.dtype}[{','.join(map(str, values.shape))}]"
    return f"SparseRows(rows {which} of {self.num_rows}, values {values})"

  def tree_flatten_with_keys(self):
    key = jax.tree_util.GetAttrKey
    children = (key("indices"), self._ids), (key("values"), self.values)
    return children, (self.num_rows, self.unique, self.by_owner)

  @classmethod
  def tree_unflatten(cls, static, children) -> "SparseRows":
    # Children may be anything, for example specs, so nothing is checked here.
    self = object.__new__(cls)
    self._ids, self.values = children
    self.num_rows, self.unique, self.by_owner = static
    return self


def _wide(rows: SparseRows) -> tuple[jax.Array, jax.Array]:
  """Returns ids in `[0, num_rows]`, and values in the dtype of sums.

  Padding has the id `num_rows`. Its values, which may be NaN, become zero.
  """
  ids, num_rows = rows.indices, rows.num_rows
  ids = jnp.where(ids < 0, ids + num_rows, ids)
  real = (ids >= 0) & (ids < num_rows)
  values = rows.values.astype(collectives.accumulator(rows.dtype))
  return jnp.where(real, ids, num_rows), jnp.where(real[:, None], values, 0)


def merged(rows: SparseRows) -> SparseRows:
  """Returns the same gradient with every index once, in any order.

  If there are more lookups than rows in the table, it has all rows, no sort.
  """
  if rows.unique or rows.ndim > 2 or rows.capacity <= rows.num_rows:
    return rows.combine()
  ids, values = _wide(rows)
  total = jnp.zeros(rows.shape, values.dtype).at[ids].add(values, mode="drop")
  touched = jnp.zeros(rows.num_rows, bool).at[ids].set(True, mode="drop")
  row = jnp.arange(rows.num_rows, dtype=jnp.int32)
  row = jnp.where(touched, row, rows.num_rows)
  return SparseRows(row, total.astype(rows.dtype), rows.num_rows).as_unique()


def added(table: jax.Array, rows: SparseRows) -> jax.Array:
  """Returns `table: [R, D]` plus `rows` in its dtype; in place if donated.

  Rows of a wider dtype are added in that dtype, and the sum is rounded once.
  """
  wide = jnp.promote_types(table.dtype, rows.dtype)
  if wide == table.dtype:
    values = rows.values.astype(wide)
    return table.at[rows.indices].add(values, mode="drop")
  rows = rows.with_values(rows.values.astype(wide)).combine()
  old = table.at[rows.indices].get(mode="fill", fill_value=0).astype(wide)
  new = (old + rows.values).astype(table.dtype)
  return table.at[rows.indices].set(new, mode="drop")


def concatenated(parts: Sequence[SparseRows]) -> SparseRows:
  """Joins rows of one table, in any order.

  Raises:
    ValueError: They are from different tables.
  """
  first = parts[0]
  for part in parts[1:]:
    if part.shape != first.shape:
      raise ValueError(
        "SparseRows can only be added to SparseRows of the same table, got"
        f" shapes {first.shape} and {part.shape}."
      )
  if len(parts) == 1:
    return first
  # Values may have a type without a mesh, which the ids then have.
  arrays = [x for part in parts for x in (part.values, part.indices)]
  spread = batch_layout.spread_of(arrays)
  parts = [filled_up(part, spread.devices) for part in parts]
  return SparseRows(
    batch_layout.joined([part.indices for part in parts], spread),
    batch_layout.joined([part.values for part in parts], spread),
    first.num_rows,
  )


def no_rows(table: Any, padding: int = 0) -> SparseRows:
  """Returns the gradient of a table that was not looked up."""
  num_rows, width = math.prod(table.shape[:-1]), table.shape[-1]
  ids = jnp.full(padding, num_rows, jnp.int32)
  return SparseRows(ids, jnp.zeros((padding, width), table.dtype), num_rows)


def filled_up(rows: SparseRows, devices: int) -> SparseRows:
  """Adds padding, so that `devices` divides the number of rows."""
  return resized(rows, rows.capacity + -rows.capacity % devices)


def resized(rows: SparseRows, capacity: int) -> SparseRows:
  """Returns the same rows in other arrays; only padding is cut off."""
  if capacity == rows.capacity:
    return rows
  missing = max(0, capacity - rows.capacity)
  ids = jnp.pad(rows.indices, (0, missing), constant_values=rows.num_rows)
  values = jnp.pad(rows.values, ((0, missing), (0, 0)))
  cut = SparseRows(ids[:capacity], values[:capacity], rows.num_rows)
  return cut._with(unique=rows.unique, by_owner=rows.by_owner)


def require_one(what: str, rows: SparseRows) -> None:
  """Raises ValueError for a stack of several SparseRows."""
  if rows.ndim > 2:
    raise ValueError(
      f"SparseRows must have `values: [K, D]`, but {what} is a stack with"
      f" values of shape {rows.values.shape}. If a scan made it, put the scan"
      " into the loss. Otherwise convert it with `.to_dense()`."
    )


def require_update(
  rows: SparseRows, shape: tuple[int, ...], of: str = ""
) -> None:
  """Raises ValueError for rows that do not update a parameter of this shape.

  Args:
    rows: The update.
    shape: The shape of the parameter.
    of: Which parameter it is, in words.
  """
  if rows.by_owner:
    raise ValueError(
      f"`updates` has the gradient{of} of a ShardedTable instead of an update."
      " Call `zenjax.sharded_optimizer(..).update` first. To freeze the table,"
      " put `optax.set_to_zero()` inside it."
    )
  require_one(f"the update{of}", rows)
  if rows.shape != shape:
    raise ValueError(
      f"SparseRows{of} must have the shape of the parameter, {shape}, got"
      f" {rows.shape}. Set `num_rows` to its first dimension."
    )


def is_rows(node: Any) -> bool:
  """Returns True for SparseRows; for use as `is_leaf=`."""
  return isinstance(node, SparseRows)


def _require_shapes(indices, values):
  if len(values) != 2 or indices != values[:1]:
    raise ValueError(
      "SparseRows takes `indices: [K]` and `values: [K, D]`, got shapes"
      f" {indices} and {values}. Reshape ids to one dimension."
    )

"""A table of which only some rows are held."""

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

# What a program wants that computes with SparseRows as if they were arrays.
_CURES = (
  "add them by `+` or zen_sync, run optax inside zenjax.lazy_rows"
  " (sharded_optimizer for sharded tables), take the norm by"
  " zenjax.global_norm, and behind zen_sync clip by"
  " zenjax.rows.clip_by_global_norm"
)

# Row ids in an array that refuses arithmetic.
#
# A transform that maps `lambda g: 0.1 * g` over all leaves would multiply plain
# integers too, and train the rows of other ids without a word. Ids therefore
# have an extended dtype: JAX may move it but not compute with it, so code that
# does not know SparseRows raises a TypeError. Random keys are the only such
# dtype that JAX lets others define.


def _not_a_key(*args, **kwargs):
  del args, kwargs
  raise TypeError("Row ids of a SparseRows are no random key.")


_ROW_IDS = jex_random.define_prng_impl(
  key_shape=(1,),
  seed=_not_a_key,
  split=_not_a_key,
  random_bits=_not_a_key,
  fold_in=_not_a_key,
  name="zenjax_row_ids",
  # Errors of JAX show it: "multiply does not accept dtypes float32, key<..>".
  tag=f"zenjax row_id of SparseRows: {_CURES}",
)

# Zeros that others make in the place of ids, as `jnp.zeros_like` does, are to
# be no row: they stand for the least integer, which is beyond any table.
_NOWHERE = np.uint32(1 << 31)


def narrowed(ids: Any, num_rows: int, what: str) -> jax.Array:
  """Returns integer ids as int32; what is out of range stays on its side.

  Args:
    ids: Integers of any dtype. Without x64, JAX would cut int64 of NumPy to 32
      bits, and what is out of range would be another row.
    num_rows: Rows of the table.
    what: Name of the argument.
  """
  if not isinstance(ids, jax.Array):
    is_jax = any(isinstance(x, jax.Array) for x in jax.tree.leaves(ids))
    ids = jnp.asarray(ids) if is_jax else np.asarray(ids)
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise TypeError(
      f"{what} must be integers, got {ids.dtype}; convert ids with"
      " `.astype(jnp.int32)`."
    )
  info = jnp.iinfo(ids.dtype)
  if info.min < 0 and info.bits <= 32 or info.bits < 32:
    return jnp.asarray(ids, jnp.int32)
  # One past either end: -1 is the last row.
  low = -num_rows - 1 if info.min < 0 else 0
  bounds = (np.asarray(bound, ids.dtype) for bound in (low, num_rows))
  clip = jnp.clip if isinstance(ids, jax.Array) else np.clip
  return jnp.asarray(clip(ids, *bounds), jnp.int32)


def seal(ids: jax.Array) -> jax.Array:
  """`[K] int32` as `[K]` of the extended dtype."""
  words = lax.bitcast_convert_type(ids, jnp.uint32) ^ _NOWHERE
  return jax.random.wrap_key_data(words[..., None], impl=_ROW_IDS)


def unseal(sealed: jax.Array) -> jax.Array:
  """Inverse of `seal`."""
  # A clone, or `jax_debug_key_reuse` would have ids read only once.
  words = jax.random.key_data(jax.random.clone(sealed))[..., 0]
  return lax.bitcast_convert_type(words ^ _NOWHERE, jnp.int32)


def is_sealed(x: Any) -> bool:
  """True if `x` came from `seal`; specs, shapes and the like did not."""
  is_array = isinstance(x, jax.Array)
  return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# What is no array, and says what to do where one is wanted.
#
# Errors of Python, NumPy, JAX and optax name a class or an operator and know no
# cure. Operators therefore raise one of their own, and the class's name holds
# it for all that print the class: JAX for trees of two structures, as
# `optax.adam` meets them, and for arguments that must be arrays.


class _Named(type):
  def __repr__(cls) -> str:
    return (
      f"<class 'zenjax.{cls.__name__}', not an array: {_CURES}, call"
      " .to_dense(), or take jax.grad (MultiSteps)>"
    )


class NoArray(metaclass=_Named):
  """Base of a class that holds some rows of a table."""

  __slots__ = ()

  # NumPy's operators would apply themselves to each element beside the rows.
  __array_ufunc__ = None

  def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
      "SparseRows hold some rows of a table and are no array; `rows.values` are"
      " these, `rows.to_dense()` is the whole table."
    )

  def _not_added(self, other: Any) -> NoReturn:
    raise TypeError(
      "SparseRows are added to SparseRows of the same table, and to an array on"
      f" their left, got {type(other).__name__}; parameters are updated by"
      " `zenjax.apply_updates(params, updates)`, and `rows.to_dense()` is an"
      " array."
    )

  def _not_scaled(self, other: Any = None) -> NoReturn:
    del other
    raise TypeError(
      "SparseRows take no arithmetic but `+`; scale them by"
      " `rows.with_values(rows.values * factor)`."
    )

  __sub__ = __rsub__ = _not_added
  __mul__ = __rmul__ = __truediv__ = __neg__ = _not_scaled


@jax.tree_util.register_pytree_with_keys_class
class SparseRows(NoArray):
  """Rows of a `[num_rows, D]` array; all others are zero.

  What `zenjax.value_and_grad` returns for a table that is only looked up, of
  whatever size, and `zen_sync(output="rows")` for a table that
  travels sparse. A pytree of two leaves: ids, in a dtype that admits no
  arithmetic, and values. A transform that scales or adds up all leaves
  therefore raises a TypeError, where it would silently change plain integers.
  Optax goes inside `zenjax.lazy_rows`.

  Attributes:
    indices: `[K] int32`; `num_rows`, and all else beyond the table, marks
      padding. Negative ones count from the end, as where JAX indexes. An index
      that stands twice means the sum of its rows. Integers of any dtype may be
      given; those that int32 cannot hold are beyond the table.
    values: `[K, D]`.
    num_rows: Rows of the whole table: static.

  Under `jax.vmap` each of a batch is a SparseRows of its own. Outside of it
  several lie in one, with more dimensions in front, as `jax.vmap` and
  `jax.lax.scan` stack them: `to_dense` and `combine` take that too, and all
  else that needs one table raises a ValueError.

  Raises:
    TypeError: `indices` are no integers.
    ValueError: Shapes do not fit, or `num_rows` does not fit int32.

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

  # `unique` says that no index occurs twice and that padding is zero. It is
  # static, and part of the pytree's structure, so that it passes `jit`.
  # So is `by_owner`, which marks the gradient of a sharded table.
  __slots__ = ("_ids", "values", "num_rows", "unique", "by_owner")

  def __init__(self, indices: Any, values: Any, num_rows: int):
    if not 0 <= num_rows < 2**31 - 1:
      raise ValueError(
        f"`num_rows` must be 0 to 2**31 - 2, got {num_rows!r}: indices are"
        " int32."
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
    ids = self._ids
    return unseal(ids) if is_sealed(ids) else ids

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the whole table, `(num_rows, D)`; of a stack, of all of them."""
    *stacked, _, width = self.values.shape
    return *stacked, self.num_rows, width

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    """Elements of the whole table."""
    return math.prod(self.shape)

  @property
  def dtype(self) -> Any:
    return self.values.dtype

  @property
  def capacity(self) -> int:
    """`K`, rows that there is room for."""
    return self.values.shape[-2]

  def to_dense(self) -> jax.Array:
    """The whole table, `[num_rows, D]`."""
    if self.ndim > 2:
      return jax.vmap(SparseRows.to_dense)(self)
    zeros = jnp.zeros(self.shape, self.values.dtype)
    return zeros.at[self.indices].add(self.values, mode="drop")

  def combine(self) -> "SparseRows":
    """The same with every index once; padding is zero.

    16-bit values are summed in float32. Indices ascend after it, and it costs a
    sort of `K` ids, unless every index stands once already, as in what
    `zen_sync` and `combine` return.
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
    """The same rows, marked as unique: no index occurs twice.

    Padding must be zero then.
    """
    return self._with(unique=unique)

  def as_by_owner(self) -> "SparseRows":
    """The same rows, marked as the gradient of a sharded table."""
    return self._with(by_owner=True)

  def with_values(self, values: Any) -> "SparseRows":
    """The same rows with other `values: [K, D']`."""
    values = jnp.asarray(values)
    _require_shapes(self._ids.shape, values.shape)
    return self._with(values=values)

  def _with(self, **changes: Any) -> "SparseRows":
    rows = copy.copy(self)
    for name, value in changes.items():
      setattr(rows, name, value)
    return rows

  def __add__(self, other: Any) -> "SparseRows":
    """Both, one behind the other: `K` is the sum of both.

    Raises:
      TypeError, ValueError: `other` is no SparseRows, or of another table.
    """
    if not isinstance(other, SparseRows):
      self._not_added(other)
    require_one("one that is added", self)
    return concatenated([self, other])

  def __radd__(self, table: Any) -> jax.Array:
    """`table + rows`, an array in the table's dtype.

    So `optax.apply_updates`, Flax's `TrainState.apply_gradients` and
    `nnx.Optimizer.update` take rows as they are.

    Raises:
      TypeError, ValueError: `table` is no array, or one of another shape.
    """
    if not isinstance(table, jax.Array | np.ndarray):
      self._not_added(table)
    require_one("one that is added", self)
    if self.by_owner:
      raise ValueError(
        "Gradients of a ShardedTable must not be added to its rows, which lie"
        " in the order of slots; update it by `zenjax.sharded_optimizer`."
      )
    if table.shape != self.shape:
      raise ValueError(
        "`array + SparseRows` must be of one shape, got an array of"
        f" {table.shape} and rows of {self.shape}; look up rows of the same"
        " table."
      )
    return added(jnp.asarray(table), self)

  @classmethod
  def in_place(cls, table: jax.Array) -> "SparseRows":
    """All rows of `table: [R, D]`, those of zeros as padding; no copy."""
    num_rows = table.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    nonzero = row_mask(table).nonzero
    rows = cls(jnp.where(nonzero, row, num_rows), table, num_rows)
    return rows.as_unique()

  @classmethod
  def from_dense(cls, table: jax.Array, capacity: int) -> "SparseRows":
    """The nonzero rows of `table: [R, D]`, the first `capacity` of them."""
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
    # Children may be anything: specs, shapes, None. Nothing is checked here.
    self = object.__new__(cls)
    self._ids, self.values = children
    self.num_rows, self.unique, self.by_owner = static
    return self


def _wide(rows: SparseRows) -> tuple[jax.Array, jax.Array]:
  """Ids in `[0, num_rows]`, the last for padding, and values to be summed.

  As everywhere in JAX, what is negative counts from the end. Values of padding
  may be anything, NaN included, and come out as zero.
  """
  ids, num_rows = rows.indices, rows.num_rows
  ids = jnp.where(ids < 0, ids + num_rows, ids)
  real = (ids >= 0) & (ids < num_rows)
  values = rows.values.astype(collectives.accumulator(rows.dtype))
  return jnp.where(real, ids, num_rows), jnp.where(real[:, None], values, 0)


def merged(rows: SparseRows) -> SparseRows:
  """Returns the same with every index once, in any order.

  More lookups than the table has rows become one row for each of the table's.
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
  """Returns `table: [R, D]` plus `rows`, in its dtype, in place if donated.

  Rows of a wider dtype are added in that one and rounded once.
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
  """All parts in one, in any order.

  Raises:
    ValueError: They are not of one table.
  """
  first = parts[0]
  for part in parts[1:]:
    if part.shape != first.shape:
      raise ValueError(
        "SparseRows that are added must be rows of one table: `num_rows` and"
        f" width must agree, got {first.shape} and {part.shape}."
      )
  if len(parts) == 1:
    return first
  # Of values that no parameter's type reaches, ids still tell the mesh.
  arrays = [x for part in parts for x in (part.values, part.indices)]
  spread = batch_layout.spread_of(arrays)
  parts = [filled_up(part, spread.devices) for part in parts]
  return SparseRows(
    batch_layout.joined([part.indices for part in parts], spread),
    batch_layout.joined([part.values for part in parts], spread),
    first.num_rows,
  )


def no_rows(table: Any, padding: int = 0) -> SparseRows:
  """Returns the gradient of a table that nothing looks up."""
  num_rows, width = math.prod(table.shape[:-1]), table.shape[-1]
  ids = jnp.full(padding, num_rows, jnp.int32)
  return SparseRows(ids, jnp.zeros((padding, width), table.dtype), num_rows)


def filled_up(rows: SparseRows, devices: int) -> SparseRows:
  """The same with as many rows for each of `devices`; the last are padding."""
  return resized(rows, rows.capacity + -rows.capacity % devices)


def resized(rows: SparseRows, capacity: int) -> SparseRows:
  """Returns the same with room for so many; what is cut off is padding."""
  if capacity == rows.capacity:
    return rows
  missing = max(0, capacity - rows.capacity)
  ids = jnp.pad(rows.indices, (0, missing), constant_values=rows.num_rows)
  values = jnp.pad(rows.values, ((0, missing), (0, 0)))
  cut = SparseRows(ids[:capacity], values[:capacity], rows.num_rows)
  return cut.as_unique(rows.unique)


def require_one(what: str, rows: SparseRows) -> None:
  """Raises ValueError for several SparseRows stacked in one."""
  if rows.ndim > 2:
    raise ValueError(
      f"SparseRows must be of one table, `values: [K, D]`, and {what} has"
      f" values of shape {rows.values.shape}: several in a stack, as jax.vmap"
      " and jax.lax.scan make them; put the scan into the loss and take its"
      " gradient once, use them inside jax.vmap, or give `.to_dense()`."
    )


def is_rows(node: Any) -> bool:
  """For `is_leaf=`."""
  return isinstance(node, SparseRows)


def _require_shapes(indices, values):
  if len(values) != 2 or indices != values[:1]:
    raise ValueError(
      "SparseRows takes `indices: [K]` and `values: [K, D]`, got"
      f" {indices} and {values}; reshape look-ups of several dimensions to one."
    )

"""`TopK`, `Threshold` and `RandomK`: what each device selects on its own."""

import abc
from collections.abc import Sequence
import dataclasses
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from zenjax._src.compress import element_exchange
from zenjax._src.compress import sparsifier
from zenjax._src.compress import thresholds
from zenjax._src.compress.compressor import in_dtype
from zenjax._src.compress.compressor import Reduced
from zenjax._src.compress.element_exchange import Window
from zenjax._src.compress.sparsifier import Sparsifier
from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core import indexing
from zenjax._src.core import wire
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message

MethodName = Literal["sampled", "exact"]

# A sample for a quantile has so many elements, and so many above the quantile
# that their number is right to a tenth.
_SAMPLES = 8192
_ABOVE = 128


class _ByLeaf(Sparsifier):
  """A sparsifier that selects a part of each leaf, but at least one number."""

  density: float

  @abc.abstractmethod
  def indices(self, x: jax.Array, k: int, key: jax.Array) -> jax.Array:
    """Selects distinct numbers of a leaf.

    Args:
      x: The leaf, `[N] float32`.
      k: At most so many are sent.
      key: A random key.

    Returns:
      `[k] int32`, padded with `N`.
    """

  @abc.abstractmethod
  def exchanged(
    self, x: jax.Array, index: jax.Array, context: Context
  ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Sums numbers over devices.

    Args:
      x: The vector of a device, `[S] float32`.
      index: The numbers to send: distinct, and `S` or more as padding.
      context: The devices to send to.

    Returns:
      Sums or means, `[S]`; what is left of the numbers at `index`; and stats.
    """

  def select(
    self,
    x: jax.Array,
    sizes: Sequence[int],
    memory: Any,
    key: jax.Array,
    context: Context,
  ) -> Reduced:
    size, start, chosen = x.shape[0], 0, []
    with jax.named_scope("zenjax/select"):
      for number, length in enumerate(sizes):
        leaf = lax.slice_in_dim(x, start, start + length)
        drawn = jax.random.fold_in(key, number)
        index = self.indices(leaf, count(self.density, length), drawn)
        chosen.append(jnp.where(index < length, index + start, size))
        start += length
      index = element_exchange.distinct(jnp.concatenate(chosen), size)
    with jax.named_scope("zenjax/exchange"):
      sums, left, stats = self.exchanged(x, index, context)
    ones = jnp.ones(index.shape, bool)
    return Reduced(
      sums=sums,
      # If there are more NaN and Inf than can be sent, the first ones tell.
      kept=jnp.where(lax.is_finite(x), indexing.put(x, index, left), 0),
      sent=indexing.put(jnp.zeros(x.shape, bool), index, ones),
      memory=memory,
      stats=stats,
    )


class _OwnSelection(_ByLeaf):
  """A sparsifier in which each device selects from all of its numbers.

  Indices and values are gathered, and added up in the order of ranks.
  """

  stats = ("density",)

  wire_dtype: Any

  def exchanged(
    self, x: jax.Array, index: jax.Array, context: Context
  ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    size, values = x.shape[0], indexing.take_or(x, index, 0)
    sent, left = in_dtype(values, self.wire_dtype or x.dtype)
    ((came, values),) = wire.send(
      [(index[None], sent[None])], collectives.all_gather, context.axes
    )

    def add(rank: jax.Array, total: jax.Array) -> jax.Array:
      more = indexing.take(values, rank).astype(total.dtype)
      return indexing.add(total, indexing.take(came, rank), more)

    # One device after the other: equal bits on all devices, in any order of
    # additions.
    nothing = compat.cast_like(jnp.zeros(x.shape, x.dtype), values)
    total = lax.fori_loop(0, context.devices, add, nothing)
    part = jnp.mean((came < size).astype(jnp.float32)) * index.shape[0] / size
    return context.scaled(total), left, (part,)

  def sent(self, sizes: Sequence[int], context: Context) -> list[Message]:
    numbers = sum(count(self.density, size) for size in sizes)
    words = numbers + wire.words_for(
      numbers, jnp.dtype(self.wire_dtype or jnp.float32)
    )
    return [Message("all_gather", context.axes, float(words))]


def count(density: float, size: int) -> int:
  """Returns how many numbers of a leaf are sent: at least one."""
  return max(1, int(density * size))


@dataclasses.dataclass(frozen=True, slots=True)
class TopK(_OwnSelection):
  """Sends the largest numbers of each leaf (Deep Gradient Compression).

  Each device sends `int(density * size)` numbers of a leaf of its own choice,
  but at least one, with their indices. With `all_reduce(.., momentum=0.9)` and
  a plain `optax.sgd` behind it, this is Deep Gradient Compression.

  Attributes:
    density: The part of a leaf that each device sends in a step, in (0, 1].
    method: `"sampled"` takes the numbers that reach a quantile of a sample,
      another one in each step; those that are too many wait. `"exact"` sorts,
      which takes much longer.
    wire_dtype: A dtype such as `jnp.bfloat16` to send values in. Rounding
      errors are kept, and so is what exceeds its largest number.

  Raises:
    ValueError: An argument is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> top = zenjax.compress.TopK(0.2, method="exact")
    >>> tx = zenjax.compress.all_reduce(top, "data", leaves=True)
    >>> grads = jnp.array([[4.0, 1, 0, 3, 0], [1, 1, 5, -4, 0]])
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> update, state = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    >>> update[0].tolist()
    [2.0, 0.0, 2.5, 0.0, 0.0]
    >>> state.residuals["leaf"].value[:, 0].tolist()
    [[0.0, 1.0, 0.0, 3.0, 0.0], [1.0, 1.0, 0.0, -4.0, 0.0]]

  References:
    Lin et al., [Deep Gradient Compression](https://arxiv.org/abs/1712.01887),
    ICLR 2018. Stich, Cordonnier and Jaggi, [Sparsified SGD with
    Memory](https://arxiv.org/abs/1809.07599), NeurIPS 2018.
  """

  density: float
  method: MethodName = "sampled"
  wire_dtype: Any = None

  def __post_init__(self):
    sparsifier.check_density(self.density)
    arguments.one_of("method", self.method, ["sampled", "exact"])
    _check_wire(self)

  def indices(self, x: jax.Array, k: int, key: jax.Array) -> jax.Array:
    size = x.shape[0]
    if k == size:
      return jnp.arange(k, dtype=jnp.int32)
    if self.method == "exact":
      return lax.top_k(jnp.abs(x), k)[1]
    drawn, first = jax.random.split(key)
    stride = max(1, min(size // _SAMPLES, k // _ABOVE))
    values, _ = sparsifier.sample(jnp.abs(x), stride, drawn)
    rank = max(1, round(k / size * values.shape[0]))
    bar = jnp.maximum(_largest(values, jnp.int32(rank)), thresholds.TINY)
    return _reaching(x, bar, k, first)


@dataclasses.dataclass(frozen=True, slots=True)
class Threshold(_OwnSelection):
  """Sends numbers that reach a threshold in magnitude.

  Use it if you know a threshold. As gradients change, so does the right one;
  `TopK` finds it in each step.

  Attributes:
    value: The threshold, at least 0.
    density: The largest part of a leaf that each device sends in a step, in
      (0, 1], but at least one number. Buffers have this size. If more numbers
      reach the threshold, some of them wait.
    wire_dtype: A dtype such as `jnp.bfloat16` to send values in. Rounding
      errors are kept.

  Raises:
    ValueError: An argument is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.compress.all_reduce(
    ...   zenjax.compress.Threshold(2.0, density=1.0), "data", leaves=True
    ... )
    >>> grads = jnp.array([[1.0, -5.0, 2.0, 0.0], [1.0, 1.0, 3.0, 0.0]])
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> update, _ = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    >>> update[0].tolist()
    [0.0, -2.5, 2.5, 0.0]
  """

  value: float
  density: float = 0.01
  wire_dtype: Any = None

  def __post_init__(self):
    sparsifier.check_density(self.density)
    if not 0 <= arguments.number("value", self.value) < np.inf:
      raise ValueError(
        f"`value` must be at least 0 and finite, got {self.value!r}."
        " `zenjax.compress.TopK(density)` finds a threshold."
      )
    _check_wire(self)

  def indices(self, x: jax.Array, k: int, key: jax.Array) -> jax.Array:
    return _reaching(x, jnp.float32(self.value), k, key)


@dataclasses.dataclass(frozen=True, slots=True)
class RandomK(_ByLeaf):
  """Sends numbers drawn at random, the same on all devices.

  Only values are sent: `int(density * size)` of each leaf, but at least one, by
  an all-reduce. Every number is equally likely. They are not scaled by `1 /
  density`, because what is left out is sent later.

  Attributes:
    density: The part of a leaf to send in a step, in (0, 1].

  Raises:
    ValueError: `density` is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.compress.all_reduce(
    ...   zenjax.compress.RandomK(0.2), "data", leaves=True
    ... )
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> step = jax.jit(jax.vmap(step, axis_name="data"))
    >>> int(step(jnp.ones((2, 1_000)))[0][0].sum())
    200

  References:
    Stich, Cordonnier and Jaggi, [Sparsified SGD with
    Memory](https://arxiv.org/abs/1809.07599), NeurIPS 2018.
  """

  density: float

  def __post_init__(self):
    sparsifier.check_density(self.density)

  def indices(self, x: jax.Array, k: int, key: jax.Array) -> jax.Array:
    return _drawn(key, k, x.shape[0])

  def exchanged(
    self, x: jax.Array, index: jax.Array, context: Context
  ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    values = indexing.take(x, index)
    # If any element is NaN or Inf, this element becomes NaN.
    bad = ~jnp.all(lax.is_finite(x))
    values = values.at[0].set(jnp.where(bad, jnp.nan, values[0]))
    sums = context.scaled(collectives.psum(values, context.axes))
    nothing = compat.cast_like(jnp.zeros(x.shape, x.dtype), sums)
    return indexing.put(nothing, index, sums), jnp.zeros_like(values), ()

  def sent(self, sizes: Sequence[int], context: Context) -> list[Message]:
    words = float(sum(count(self.density, size) for size in sizes))
    return [Message("all_reduce", context.axes, words)]


def _check_wire(compressor: Any) -> None:
  dtype = arguments.wire_dtype("wire_dtype", compressor.wire_dtype)
  object.__setattr__(compressor, "wire_dtype", dtype)


def _reaching(
  x: jax.Array, bar: jax.Array, k: int, key: jax.Array
) -> jax.Array:
  """Returns at most `k` indices of numbers that reach a bar.

  If there are more, those that come first after a random one. If there are NaN
  or Inf, these alone.
  """
  zero = jnp.int32(0)
  leaf = Window(zero, jnp.abs(x), jnp.ones(x.shape, bool))
  chosen = element_exchange.select(leaf, bar, 1, key)
  return chosen.indices(zero, k, x.shape[0])


def _drawn(key: jax.Array, k: int, size: int) -> jax.Array:
  """Draws one element of each of `k` equal runs, which begin anywhere.

  So all are distinct, and each is equally likely.
  """
  within, where = jax.random.split(key)
  length, longer = divmod(size, k)
  run = jnp.arange(k, dtype=jnp.int32)
  start = run * jnp.int32(length) + jnp.minimum(run, longer)
  more = length + (run < longer).astype(jnp.int32)
  index = start + jax.random.randint(within, (k,), 0, more, jnp.int32)
  # Rotated by `shift`, without a sum above 2^31.
  shift = jax.random.randint(where, (), 0, size, jnp.int32)
  end = size - shift
  return jnp.where(index < end, index + shift, index - end)


def _largest(values: jax.Array, rank: jax.Array) -> jax.Array:
  """Returns the `rank`-th largest of `values: [m] float32 >= 0`, from 1.

  It finds the number bit by bit, because bits are ordered as such numbers are,
  and a sort would take longer than the rest of the selection.
  """
  bits = lax.bitcast_convert_type(values, jnp.int32)

  def body(i, low):
    bit = jnp.left_shift(jnp.int32(1), jnp.int32(30) - i)
    enough = jnp.sum(bits >= (low | bit), dtype=jnp.int32) >= rank
    return jnp.where(enough, low | bit, low)

  start = compat.cast_like(jnp.int32(0), bits)
  found = lax.fori_loop(jnp.int32(0), jnp.int32(31), body, start)
  return lax.bitcast_convert_type(found, jnp.float32)

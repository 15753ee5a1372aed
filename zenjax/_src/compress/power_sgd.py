"""`PowerSGD`: matrices of low rank."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.compressor import Leaves
from zenjax._src.compress.compressor import left
from zenjax._src.compress.compressor import Reduced
from zenjax._src.compress.compressor import Shape
from zenjax._src.core import arguments
from zenjax._src.core import wire
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.sync import gradient_tree

# A column is taken for dependent if no more than this part of it is left.
_DEPENDENT = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class PowerSGD(Compressor):
  """Sends an approximation of low rank of each matrix.

  A leaf is a matrix `M: [a, b]` of its last dimension by all others. In each
  step the devices average `P = M Q` with the `Q` of the last step, make its
  columns orthonormal, and average `Q = M^T P`. The mean is then `P Q^T`. Errors
  are kept. Leaves that `rank` does not make smaller are averaged whole.

  Attributes:
    rank: Columns of `P` and `Q`, at least 1.
    seed: An integer in [0, 2**32) for the first `Q`.

  Raises:
    ValueError: `rank` is not a positive integer.

  Example:
    >>> import zenjax
    >>> str(zenjax.compress.PowerSGD(rank=2))
    'PowerSGD(2)'

  References:
    Vogels, Karimireddy and Jaggi, [PowerSGD](https://arxiv.org/abs/1905.13727),
    NeurIPS 2019.
  """

  rank: int = 4
  seed: int = 0

  def __post_init__(self):
    arguments.hash_seed(self.seed, "seed")
    if not arguments.is_integer(self.rank) or self.rank < 1:
      raise ValueError(
        f"`rank` must be a positive integer, got {self.rank!r}. Give 4."
      )

  def init(self, shapes: Mapping[str, Shape], context: Context) -> Any:
    """Returns the first `Q: [b, rank]` of each leaf that is not small."""
    del context
    memory, key = {}, jax.random.key(self.seed)
    for number, (name, shape) in enumerate(shapes.items()):
      if self._pays(shape):
        own, size = jax.random.fold_in(key, number), (shape[-1], self.rank)
        memory[name] = jax.random.normal(own, size, jnp.float32)
    return memory

  def reduce(
    self, leaves: Leaves, memory: Any, key: jax.Array, context: Context
  ) -> Reduced:
    del key
    leaves = {name: wire.constant(x) for name, x in leaves.items()}
    matrices = {
      name: x.reshape(-1, x.shape[-1])
      for name, x in leaves.items()
      if name in memory
    }
    whole = {name: x for name, x in leaves.items() if name not in memory}
    parts = {k: _product(m, memory[k]) for k, m in matrices.items()}
    bases = {k: _orthonormal(p) for k, p in _sums(parts, context).items()}
    own = {k: _product(m.T, bases[k]) for k, m in matrices.items()}
    sums = _sums(whole | own, context)
    kept = {k: jnp.zeros_like(x) for k, x in leaves.items()}
    new = {}
    for k, m in matrices.items():
      q, shape = sums[k], leaves[k].shape
      sums[k] = _product(bases[k], q.T).reshape(shape)
      kept[k] = left(m, _product(bases[k], own[k].T)).reshape(shape)
      # From a column of zeros no step would come back.
      lives = jnp.all(lax.is_finite(q)) & jnp.any(q != 0, axis=0)
      new[k] = jnp.where(lives[None], _of_size_one(q), memory[k])
    return Reduced(sums, kept, new)

  def messages(
    self, shapes: Sequence[Shape], context: Context
  ) -> list[Message]:
    axes = context.axes
    low = [shape for shape in shapes if self._pays(shape)]
    p = [self.rank * math.prod(shape[:-1]) for shape in low]
    q = [self.rank * shape[-1] for shape in low]
    whole = [math.prod(shape) for shape in shapes if not self._pays(shape)]
    words = sum(p), sum(whole) + sum(q)
    return [Message("all_reduce", axes, each) for each in words if each]

  def _pays(self, shape: Shape) -> bool:
    a, b = math.prod(shape[:-1]), shape[-1] if shape else 1
    return self.rank * (a + b) < a * b


def _sums(parts: Leaves, context: Context) -> dict[str, jax.Array]:
  """Adds up all arrays over devices, by one collective."""
  if not parts:
    return {}
  sums = gradient_tree.in_one_buffer([*parts.values()], context)
  return dict(zip(parts, sums))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  """`a @ b` in full float32: what is sent and what is kept must add up."""
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _of_size_one(x: jax.Array) -> jax.Array:
  """Scales columns, so that squares neither overflow nor vanish."""
  largest = jnp.max(jnp.abs(x), axis=0)
  return x / jnp.where(largest > 0, largest, jnp.ones_like(largest))[None]


def _orthonormal(p: jax.Array) -> jax.Array:
  """Makes the columns of `[a, rank]` orthonormal by Gram-Schmidt.

  A column that depends on those before it becomes zero: rounding errors are all
  that is left of it. `jnp.linalg.qr` calls a solver on GPUs, whose latency
  exceeds the latency of the exchange.
  """
  p = _of_size_one(p)
  columns: list[jax.Array] = []
  for i in range(p.shape[1]):
    column = p[:, i]
    least = _DEPENDENT * jnp.sqrt(jnp.sum(jnp.square(column)))
    for _ in range(2):  # Once is not enough if columns are nearly parallel.
      for other in columns:
        column -= jnp.sum(column * other) * other
    norm = jnp.sqrt(jnp.sum(jnp.square(column)))
    # NaN is not below, and stays.
    columns.append(
      jnp.where(norm <= least, jnp.zeros_like(column), column / norm)
    )
  return jnp.stack(columns, axis=1)

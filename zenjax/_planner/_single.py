"""Single collectives, as the schemes use them: what links are measured by."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zenjax import _collectives
from zenjax._schemes.base import Context
from zenjax._schemes.base import Message
from zenjax._schemes.base import received_bytes


def _all_to_all(x: jax.Array, axis: str, n: int) -> jax.Array:
  return _collectives.all_to_all(x.reshape(n, -1), (axis,))


def _all_gather(x: jax.Array, axis: str, n: int) -> jax.Array:
  del n
  return _collectives.all_gather(x, (axis,))


def _all_reduce(x: jax.Array, axis: str, n: int) -> jax.Array:
  del n
  return _collectives.psum(x, (axis,))


def _reduce_scatter(x: jax.Array, axis: str, n: int) -> jax.Array:
  del n
  return _collectives.sum_in_shards(x, (axis,))


def _collective_permute(x: jax.Array, axis: str, n: int) -> jax.Array:
  # In pairs, as recursive doubling does: over Gloo that takes twice the time
  # of a ring's shift.
  pairs = [(i, i ^ 1) for i in range(n) if i ^ 1 < n]
  return _collectives.permute(x, axis, pairs)


# Elements of a buffer that takes its latencies and no more.
_SMALL = 64


class Single(NamedTuple):
  """One collective and what its operand holds: bits, or numbers to sum."""

  apply: Callable[[jax.Array, str, int], jax.Array]
  dtype: DTypeLike


OPS: dict[str, Single] = {
  "all_to_all": Single(_all_to_all, jnp.uint32),
  "all_gather": Single(_all_gather, jnp.uint32),
  "all_reduce": Single(_all_reduce, jnp.float32),
  "reduce_scatter": Single(_reduce_scatter, jnp.float32),
  "collective_permute": Single(_collective_permute, jnp.uint32),
}


def received(op: str, words: int, n: int) -> float:
  """Bytes that a device of `n` receives if nothing is received twice."""
  context = Context(axes=("data",), sizes=(n,), mean=False)
  return float(received_bytes([Message(op, ("data",), words)], context))


def words_for(op: str, wanted: float, n: int) -> int:
  """Of 32 bits, in the operand of each device that receives about `wanted`."""
  return max(round(wanted / received(op, n, n)), 1) * n


def build(op: str, words: int, mesh: Mesh, axis: str) -> Callable[[], None]:
  """Compiles one collective along one axis, in all its groups at once.

  Args:
    op: A name in `OPS`.
    words: Of 32 bits, in the operand of each device; a multiple of the devices
      along `axis`.
    mesh: All of its devices take part.
    axis: Along which.

  Returns:
    What runs it once and waits for it.
  """
  return _runner(*lowered(op, words, mesh, axis))


def build_sums(buffers: int, mesh: Mesh, axis: str) -> Callable[[], None]:
  """As `build`: one sum of so many small buffers, as of a tree's leaves."""
  return _runner(*lowered_sums(buffers, mesh, axis))


def lowered_sums(
  buffers: int, mesh: Mesh, axis: str
) -> tuple[jax.stages.Lowered, jax.Array]:
  """The program of `build_sums`, and its operand."""

  def sums(x: jax.Array) -> jax.Array:
    parts = jnp.split(x, buffers)
    return jnp.concatenate([_collectives.psum(p, (axis,)) for p in parts])

  return _lowered(sums, _SMALL * buffers, jnp.float32, mesh)


def _runner(program: jax.stages.Lowered, x: jax.Array) -> Callable[[], None]:
  compiled = program.compile()

  def run():
    jax.block_until_ready(compiled(x))

  return run


def lowered(
  op: str, words: int, mesh: Mesh, axis: str
) -> tuple[jax.stages.Lowered, jax.Array]:
  """The program of `build`, and its operand."""
  single, n = OPS[op], mesh.shape[axis]
  return _lowered(lambda x: single.apply(x, axis, n), words, single.dtype, mesh)


def _lowered(
  apply: Callable[[jax.Array], jax.Array],
  words: int,
  dtype: DTypeLike,
  mesh: Mesh,
) -> tuple[jax.stages.Lowered, jax.Array]:
  """`apply` of `[words]` on each device, and what it is applied to."""
  names = mesh.axis_names
  split = NamedSharding(mesh, P(*names))
  shape = (*mesh.devices.shape, words)
  x = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=split)()

  def local(x: jax.Array) -> jax.Array:
    return apply(x.reshape(-1)).reshape(*(1 for _ in names), -1)

  mapped = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=P(*names),
    out_specs=P(*names),
    check_vma=False,
  )
  return jax.jit(mapped).lower(x), x

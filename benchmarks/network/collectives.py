"""Single collectives, as the schemes use them: what links are calibrated by."""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

AXIS = "data"


def _all_to_all(x, n):
  return lax.all_to_all(x.reshape(n, -1), AXIS, 0, 0, tiled=True)


def _all_gather(x, n):
  del n
  return lax.all_gather(x, AXIS, axis=0, tiled=False)


def _all_reduce(x, n):
  del n
  return lax.psum(x.astype(jnp.float32), AXIS)


def _reduce_scatter(x, n):
  del n
  return lax.psum_scatter(x.astype(jnp.float32), AXIS, tiled=True)


def _collective_permute(x, n):
  # In pairs, as recursive doubling does: over Gloo that takes twice the time
  # of a ring's shift.
  pairs = [(i, i ^ 1) if i ^ 1 < n else (i, i) for i in range(n)]
  return lax.ppermute(x, AXIS, pairs)


OPS: dict[str, Callable[..., jax.Array]] = {
  "all_to_all": _all_to_all,
  "all_gather": _all_gather,
  "all_reduce": _all_reduce,
  "reduce_scatter": _reduce_scatter,
  "collective_permute": _collective_permute,
}


def build(op: str, words: int, mesh: Mesh) -> Callable[[], None]:
  """Compiles one collective whose operand has `words` of 32 bits a device."""
  n = mesh.size
  words = -(-words // n) * n
  split = NamedSharding(mesh, P(AXIS))
  x = jax.make_array_from_process_local_data(
    split, np.zeros((1, words), np.uint32), (n, words)
  )
  mapped = jax.shard_map(
    lambda x: OPS[op](x[0], n)[None],
    mesh=mesh,
    in_specs=P(AXIS),
    out_specs=P(AXIS),
    check_vma=False,
  )
  compiled = jax.jit(mapped).lower(x).compile()

  def run():
    jax.block_until_ready(compiled(x))

  return run

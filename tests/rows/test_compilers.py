"""Programs of which XLA got the gradients wrong, by zenjax's way.

openxla/xla #49143: gradients of look-ups, added up over microbatches in a scan,
lost what devices had added in earlier turns, where a pass moved their sum out
of the loop (TPU v4, September 2026; right on CPUs). openxla/xla #42481:
gradients of a vocabulary leaked to rows that nobody looked up, where the
partitioner cut out a device's rows before it had summed those of all (H100, May
2026). Here such look-ups go through row gradients and arrays, and every number
is compared with `np.add.at`: cotangents are small integers over 16, so that
sums are exact in any order.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
from sharded_steps import mesh_of

import zenjax

VOCABULARY, WIDTH, MICROBATCHES = 96, 70, 2


def look_ups(examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Ids that repeat within a device, over devices and over microbatches."""
  rng = np.random.default_rng(0)
  ids = rng.zipf(1.3, (examples, length)) % (VOCABULARY // 2)
  ids[:, 0] = ids[:, -1] = 0
  cotangents = rng.integers(-8, 9, (examples, length, WIDTH)) / 16
  return ids.astype(np.int32), cotangents.astype(np.float32)


def gradient(ids: np.ndarray, cotangents: np.ndarray) -> np.ndarray:
  table = np.zeros((VOCABULARY, WIDTH))
  np.add.at(table, ids.reshape(-1), cotangents.reshape(-1, WIDTH))
  return table


def loss(table, ids, cotangents):
  return jnp.sum(jnp.take(table, ids, axis=0) * cotangents)


def microbatches(*arrays):
  return tuple([x.reshape(MICROBATCHES, -1, *x.shape[1:]) for x in arrays])


def synced(grads, axes) -> Any:
  tx = zenjax.zen_sync(axes, sparse=True, op="sum", output="dense")
  return tx.update(grads, tx.init(jnp.zeros((VOCABULARY, WIDTH))))[0]


def scan_of_losses(grad, table, ids, cotangents):
  """#49143: the loss turns over microbatches."""

  def total(table):
    turn = lambda sum_, part: (sum_ + loss(table, *part), None)
    return lax.scan(turn, jnp.zeros(()), microbatches(ids, cotangents))[0]

  return synced(grad(total)(table), "data")


def scan_of_gradients(grad, table, ids, cotangents):
  """#49143: gradients are added up."""

  def turn(sum_, part):
    grads = grad(loss)(table, *part)
    is_rows = isinstance(grads, zenjax.SparseRows)
    return sum_ + (grads.to_dense() if is_rows else grads), None

  parts = microbatches(ids, cotangents)
  return synced(lax.scan(turn, jnp.zeros_like(table), parts)[0], "data")


def parts_of_sequences(grad, table, ids, cotangents):
  """#42481: devices look up parts of a sequence, and keep parts of the rows.

  Summed first and cut then: row `i` of one part is not row `i` of another.
  """
  total = synced(grad(loss)(table, ids, cotangents), ("data", "model"))
  mine = lax.axis_index("model") * (VOCABULARY // 2)
  return lax.dynamic_slice_in_dim(total, mine, VOCABULARY // 2)


def automatic_axis(grad, table, ids, cotangents):
  """#42481 where the partitioner cuts: it owns "model", and rows of the table
  and parts of the sequence are spread over it."""
  return synced(grad(loss)(table, ids, cotangents), "data")


BOTH = ("data", "model")
ROWS = zenjax.rows.grad
PROGRAMS = {  # The step, gradients, a mesh, specs of the batch and the result.
  "losses": (scan_of_losses, jax.grad, (2, 1), P("data"), P()),
  "gradients": (scan_of_gradients, ROWS, (2, 1), P("data"), P()),
  "sequences": (parts_of_sequences, ROWS, (2, 2), P(*BOTH), P("model")),
  "automatic": (automatic_axis, ROWS, (2, 2), P("data"), P()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_exact(name):
  step, grad, shape, of_batch, of_result = PROGRAMS[name]
  automatic = name == "automatic"
  mesh = mesh_of(*shape, names=BOTH)
  mapped = jax.shard_map(
    lambda table, *batch: step(grad, table, *batch),
    mesh=mesh,
    in_specs=(P(), of_batch, of_batch),
    out_specs=of_result,
    axis_names={"data"} if automatic else set(BOTH),
    check_vma=False,
  )
  split = NamedSharding(mesh, P("model") if automatic else P())
  batch = NamedSharding(mesh, P(*BOTH) if automatic else of_batch)
  compiled = jax.jit(mapped, in_shardings=(split, batch, batch))
  ids, cotangents = look_ups(16, 8)
  got = compiled(jnp.zeros((VOCABULARY, WIDTH)), ids, cotangents)
  want = gradient(ids, cotangents)
  for shard in got.addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])

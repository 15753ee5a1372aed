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
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import runners

import zenjax

VOCABULARY, WIDTH, DEVICES, MICROBATCHES = 96, 70, 4, 2
ROWS_OR_ARRAYS = pytest.mark.parametrize("rows", [True, False])


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


def in_scan(table, ids, cotangents):
  """The loss of microbatches, one after the other."""
  parts = [x.reshape(MICROBATCHES, -1, *x.shape[1:]) for x in (ids, cotangents)]

  def turn(total, part):
    return total + loss(table, *part), None

  return lax.scan(turn, jnp.zeros(()), tuple(parts))[0]


def on_every_device(step, mesh, axes, *arguments) -> np.ndarray:
  """`step` of a device's part of the batch: the table on every device."""
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=P(axes),
    out_specs=P(),
    check_vma=False,
  )
  return runners.shards(jax.jit(mapped)(*arguments))


def synced(grads, axes) -> Any:
  tx = zenjax.zen_sync(axes, sparse=True, op="sum", output="dense")
  return tx.update(grads, tx.init(jnp.zeros((VOCABULARY, WIDTH))))[0]


@pytest.mark.usually("gradients-True", "loss-False")
@ROWS_OR_ARRAYS
@pytest.mark.parametrize(
  "where",
  [
    "loss",
    "gradients",
  ],
)
def test_scans_over_microbatches(where, rows):
  """#49143: what the scan turns over is the loss, gradients, or exchanges."""
  grad = zenjax.rows.grad if rows else jax.grad
  table = jnp.zeros((VOCABULARY, WIDTH))

  def step(ids, cotangents):
    if where == "loss":
      return synced(grad(in_scan)(table, ids, cotangents), "data")
    parts = [
      x.reshape(MICROBATCHES, -1, *x.shape[1:]) for x in (ids, cotangents)
    ]

    def turn(total, part):
      grads = grad(loss)(table, *part)
      if where == "exchanges":
        grads = synced(grads, "data")
      elif rows:
        grads = grads.to_dense()
      return total + grads, None

    total, _ = lax.scan(turn, jnp.zeros_like(table), tuple(parts))
    return total if where == "exchanges" else synced(total, "data")

  ids, cotangents = look_ups(16, 8)
  got = on_every_device(step, runners.mesh(DEVICES), "data", ids, cotangents)
  want = gradient(ids, cotangents)
  np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@pytest.mark.usually("True")
@ROWS_OR_ARRAYS
def test_sequences_split_over_a_second_axis(rows):
  """#42481: devices look up parts of a sequence, and keep parts of the rows.

  Summed first and cut then: row `i` of one part is not row `i` of another.
  """
  axes = ("data", "model")
  mesh = Mesh(np.asarray(jax.devices()[:DEVICES]).reshape(2, 2), axes)
  grad = zenjax.rows.grad if rows else jax.grad
  table = jnp.zeros((VOCABULARY, WIDTH))
  kept = VOCABULARY // 2

  def step(ids, cotangents):
    total = synced(grad(loss)(table, ids, cotangents), axes)
    mine = lax.axis_index("model") * kept
    return lax.dynamic_slice_in_dim(total, mine, kept)

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=P("data", "model"),
    out_specs=P("model"),
    check_vma=False,
  )
  ids, cotangents = look_ups(4, 8)
  got = np.asarray(jax.jit(mapped)(ids, cotangents))
  want = gradient(ids, cotangents)
  assert not want[kept:].any() and want[:kept].any()
  np.testing.assert_array_equal(got, want)


@pytest.mark.usually("True")
@ROWS_OR_ARRAYS
def test_vocabularies_that_xla_splits_over_an_automatic_axis(rows):
  """#42481 where the partitioner cuts: it owns "model", rows of the table and
  parts of the sequence lie along it, and zenjax sums over "data"."""
  mesh = Mesh(
    np.asarray(jax.devices()[:DEVICES]).reshape(2, 2),
    ("data", "model"),
    axis_types=(AxisType.Auto, AxisType.Auto),
  )
  grad = zenjax.rows.grad if rows else jax.grad

  def step(table, ids, cotangents):
    return synced(grad(loss)(table, ids, cotangents), "data")

  split = NamedSharding(mesh, P("model"))
  mapped = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), P("data"), P("data")),
      out_specs=P(),
      axis_names={"data"},
      check_vma=False,
    ),
    in_shardings=(split, *[NamedSharding(mesh, P("data", "model"))] * 2),
    out_shardings=split,
  )
  ids, cotangents = look_ups(4, 8)
  got = mapped(jnp.zeros((VOCABULARY, WIDTH)), ids, cotangents)
  want = gradient(ids, cotangents)
  for shard in got.addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])

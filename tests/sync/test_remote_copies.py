"""`exchange="remote_copies"`: the bits that collectives bring, no padding sent.

Run in a simulator of TPUs, which takes seconds a kernel: little tables. Steps
compiled for TPUs are in `test_ahead_of_time.py`.
"""

from typing import Any

import declaring
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import runners
from stablehlo import collectives
import steps

import zenjax
from zenjax.kernels import _dispatch

AXIS = runners.AXIS


def per_device(f, n):
  """`f` of what each device holds, `[n, ...]`; what each of them gets."""

  def body(x):
    got = f(jax.tree.map(lambda y: y[0], x))
    return jax.tree.map(lambda y: y[None], got)

  # Under check_vma the simulator fails on a kernel's arithmetic.
  return jax.jit(
    jax.shard_map(
      body,
      mesh=runners.mesh(n),
      in_specs=P(AXIS),
      out_specs=P(AXIS),
      check_vma=False,
    )
  )


def both_ways(f, n, x):
  """What `f(x, exchange)` gives by remote copies, and by collectives."""
  collectives = per_device(lambda x: f(x, "collectives"), n)(x)
  with _dispatch.forced("tpu", interpret=pltpu.InterpretParams()):
    copies = per_device(lambda x: f(x, "remote_copies"), n)(x)
  return jax.block_until_ready((copies, collectives))


def assert_same_bits(got, want):
  bits = lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}")
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(bits(a), bits(b))


def some_rows(seed, shape, density):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, np.float32)
  return np.where(rng.random((*shape[:-1], 1)) < density, x, np.float32(0))


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:`capacities` of leaf:UserWarning")
def test_two_tables_and_what_is_told_of_them():
  """Of two dtypes, in one exchange, for which all rows have room."""
  n, pins = 2, {"a": (32, 32), "b": (20, 20)}
  grads = {
    "a": jnp.asarray(some_rows(0, (n, 33, 8), 0.5)),
    "b": jnp.asarray(some_rows(1, (n, 20, 128), 0.3), jnp.bfloat16),
  }

  def f(x, exchange):
    tx = zenjax.zen_sync(
      AXIS,
      sparse=True,
      partition="hash",
      capacities=pins,
      tuning=zenjax.Tuning(exchange=exchange),
    )
    return tx.update(x, tx.init(x))

  with _dispatch.recording() as calls:
    (got, state), (want, padded) = both_ways(f, n, grads)
  assert {"push", "pull"} <= {call.name for call in calls if call.kernels}
  assert_same_bits(got, want)
  state, padded = jax.tree.map(lambda x: x[0], (state, padded))
  numbers, others = zenjax.stats(state), zenjax.stats(padded)
  for name, grad in grads.items():
    rows, width = grad.shape[1:]
    local = np.asarray(grad, np.float32).any(axis=2)
    # Half of a device's rows, half of the union, from one other device.
    row = width * grad.dtype.itemsize + 4
    sent = (local.sum() / n + local.any(axis=0).sum()) / 2 * row
    assert numbers[name]["wire_bytes"] == pytest.approx(sent)
    assert sent < others[name]["wire_bytes"] / 1.2
    assert numbers[name]["density"] == pytest.approx(local.mean())
    assert numbers[name]["rounds"] == 1 and rows == numbers[name]["num_rows"]


@pytest.mark.more
def test_rounds_for_what_does_not_fit():
  """Of look-ups, whose rows are split among four owners."""
  n, rows, width = 4, 1000, 6
  rng = np.random.default_rng(0)
  ids = jnp.asarray(rng.integers(0, rows + 1, (n, 16)), jnp.int32)
  values = jnp.asarray(some_rows(2, (n, 16, width), 1.0))

  def f(x, exchange):
    return zenjax.sparse_psum(
      zenjax.SparseRows(x[0], x[1], rows),
      AXIS,
      partition=2,
      capacities=(5, 12),
      tuning=zenjax.Tuning(exchange=exchange),
    ).to_dense()

  got, want = both_ways(f, n, (ids, values))
  assert_same_bits(got, want)
  total = np.zeros((rows + 1, width))
  np.add.at(total, np.asarray(ids).ravel(), np.asarray(values).reshape(-1, 6))
  np.testing.assert_allclose(got[0], total[:-1], rtol=1e-5, atol=1e-6)


# Sizes of a guess; slots; all rows, a bitmap of them; all that need no push
# but the first.
@pytest.mark.parametrize(
  ("partition", "pinned", "loops"),
  [
    ("hash", None, 2),
    (2, (3, 5), 2),
    ("hash", (256, 256), 0),
    ("columns", (1111, 1111), 2),
    ("columns", {"a": (2000, 2000), "b": (1111, 1111)}, 0),
  ],
)
def test_remote_copies_are_declared(partition, pinned, loops):
  """At most, that is: full buffers. No collective is beside them."""
  tables = {
    "a": jax.ShapeDtypeStruct((2000, 128), jnp.bfloat16),
    "b": jax.ShapeDtypeStruct((1111, 5), jnp.float32),
  }
  kwargs: dict[str, Any] = dict(
    partition=partition,
    capacities=pinned,
    tuning=zenjax.Tuning(exchange="remote_copies"),
  )
  seen = collectives(
    steps.lower_sync(tables, runners.mesh(8), platform="tpu", **kwargs)
  )
  declared = declaring.declare(tables, ("data",), (8,), **kwargs)
  copies = [f for f in seen if f.op == "remote_copy"]
  assert [f.words for f in copies if not f.inside] == [
    m.words for m in declared.first
  ]
  assert len(declared.first) == 2 and len(declared.loops) == loops
  assert [f.words for f in copies if f.inside] == [
    m.words for turn in declared.loops for m in turn
  ]
  rest = [f for f in seen if f.op != "remote_copy"]
  # Beside them only the dense path, in loops that turn once or never.
  assert all(f.op == "all_reduce" and f.inside for f in rest)
  assert len(rest) == len(declared.dense)


def test_one_loop_of_pulls_stands_alone():
  """Two around a kernel are more than a compiler for TPUs takes."""

  def sync(ids, values):
    rows = zenjax.SparseRows(ids, values, 100_000)
    return zenjax.sparse_psum(rows, "data", **kwargs)

  kwargs: dict[str, Any] = dict(
    partition="columns",
    capacities=(96, 100),
    tuning=zenjax.Tuning(exchange="remote_copies"),
  )
  step = jax.shard_map(
    sync, mesh=runners.mesh(8), in_specs=P("data"), out_specs=P()
  )
  args = (
    jax.ShapeDtypeStruct((8 * 96,), jnp.int32),
    jax.ShapeDtypeStruct((8 * 96, 16), jnp.float32),
  )
  lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("tpu",))
  inside = [f.inside for f in collectives(lowered)]
  assert inside == [(), (), ("stablehlo.while",)]

"""What the options of zen_sync change, and that nothing else changes."""

from typing import Any

import cases
from four_devices import F32
from four_devices import N
from four_devices import run_with
from four_devices import table
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners
import steps

import zenjax


@pytest.mark.usually("True")
@pytest.mark.parametrize("check_vma", [True, False])
def test_sum(check_vma):
  rng = np.random.default_rng(0)
  params = {"t": jnp.zeros((90, 6)), "w": jnp.zeros((3, 3))}
  tx = zenjax.zen_sync("data", sparse={"t": True, "w": False}, op="sum")
  trainer = steps.Trainer(tx, params, runners.mesh(N), check_vma=check_vma)
  stack = {"t": table(rng, 90, 6), "w": table(rng, 3, 3, 1.0)}
  got = trainer(stack)
  oracle.check(got["t"], stack["t"], "sum")
  oracle.check(got["w"], stack["w"], "sum")


@pytest.mark.usually("1")
@pytest.mark.parametrize("seed", [1, 2**31 - 1])
def test_hash_seeds(seed):
  run = run_with("vmap", partition="hash", tuning=zenjax.Tuning(hash_seed=seed))
  for name, stack in cases.every_case(N, 157, 3, F32):
    oracle.check(run(stack), stack, label=name)


@pytest.mark.usually("bfloat16-shard*")
@pytest.mark.parametrize(
  ("wire_dtype", "runner", "partition"),
  [
    (jnp.bfloat16, "vmap", "hash"),
    (jnp.bfloat16, "shard_map_vma_replicated", "columns"),
    (jnp.bfloat16, "pmap", "hash"),
  ],
)
def test_wire_dtype_rounds_rows_and_nothing_else(wire_dtype, runner, partition):
  rng = np.random.default_rng(0)
  run = run_with(runner, wire_dtype=wire_dtype, partition=partition)
  for density in (0.02, 0.3, 1.0):
    stack = table(rng, 120, 8, density)
    oracle.check(run(stack), stack, wire_dtype=wire_dtype)
  exact = rng.integers(-8, 9, (N, 120, 8)).astype(F32)
  oracle.check(run(exact), exact)


def test_wire_dtype_keeps_the_sum_in_float32():
  """256 + 1 + 1 + 1 in bfloat16 is 256 when added one by one."""
  stack = np.zeros((N, 64, 2), np.float32)
  stack[:, 5] = 1.0
  stack[0, 5] = 256.0
  run = run_with("vmap", f=zenjax.sparse_psum, wire_dtype=jnp.bfloat16)
  # The sum, 259, may be rounded once on its way back: to 258 or 260.
  assert set(run(stack)[:, 5].ravel().tolist()) <= {258.0, 259.0, 260.0}


@pytest.mark.usually("hash")
@pytest.mark.parametrize("partition", ["hash", "columns"])
def test_float64(partition):
  with jax.enable_x64(True):
    run = run_with("vmap", partition=partition)
    for name, stack in cases.every_case(N, 70, 5, np.dtype(np.float64)):
      oracle.check(run(stack), stack, label=name)


@pytest.mark.usually("hash-vmap", "columns-shard*")
@pytest.mark.parametrize(
  ("partition", "runner"),
  [
    ("auto", "shard_map_vma_replicated"),
    ("hash", "pmap"),
    ("hash", "vmap"),
    ("columns", "shard_map_replicated"),
  ],
)
def test_rows(partition, runner):
  """The union's rows, each once; padding has the index one past the last."""
  rows, width = 150, 6
  run = run_with(runner, output="rows", partition=partition)
  for name, stack in cases.every_case(N, rows, width, F32):
    got = run(stack)
    assert got.num_rows == rows
    np.testing.assert_array_equal(
      got.indices, np.broadcast_to(got.indices[:1], got.indices.shape)
    )
    dense = np.zeros_like(stack)
    for device in range(N):
      indices = np.asarray(got.indices[device])
      real = indices < rows
      assert (indices[~real] == rows).all(), name
      assert len(set(indices[real].tolist())) == real.sum(), name
      dense[device, indices[real]] = got.values[device][real]
    oracle.check(dense, stack, label=name)


@pytest.mark.parametrize(
  "options, rows, scheme",
  [
    ({}, False, "all_gather"),
    ({"partition": "columns"}, False, "zen/2"),
    ({"capacities": (8, 16)}, False, "zen/"),
    ({}, True, "zen/"),
  ],
  ids=["arrays", "owners asked for", "pinned", "rows beside it"],
)
def test_between_two_devices_arrays_have_no_owners(options, rows, scheme):
  tx = zenjax.zen_sync("data", sparse=True, op="sum", **options)
  rng = np.random.default_rng(0)
  stack = table(rng, 900, 4)[:2]

  def step(grad, ids):
    grads: Any = {"a": grad}
    if rows:
      values = jnp.ones((ids.size, 2))
      grads["b"] = zenjax.SparseRows(ids, values, 600)
    synced: Any
    synced, state = tx.update(grads, tx.init(grads))
    return synced["a"], state

  ids = jnp.arange(10).reshape(2, 5)
  got, state = jax.jit(jax.vmap(step, axis_name="data"))(stack, ids)
  oracle.check(np.asarray(got), stack, "sum")
  report = zenjax.report(jax.tree.map(lambda x: x[0], state))
  (line,) = [x for x in report.splitlines() if x.startswith("a ")]
  assert f" {scheme}" in line


def test_first_nonzero_rows_of_a_table():
  dense = jnp.zeros((9, 2)).at[jnp.array([1, 4, 8])].set(3.0)
  rows = zenjax.SparseRows.from_dense(dense, 4)
  assert rows.indices.tolist() == [1, 4, 8, 9]
  np.testing.assert_array_equal(rows.to_dense(), dense)
  assert zenjax.SparseRows.from_dense(dense, 2).indices.tolist() == [1, 4]

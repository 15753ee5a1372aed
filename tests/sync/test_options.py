"""What the options of zen_sync change, and what it counts."""

import cases
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


def test_wire_dtype_rounds_rows_and_nothing_else():
  rng = np.random.default_rng(0)
  run = run_with(
    "shard_map_vma_replicated", wire_dtype=jnp.bfloat16, partition="columns"
  )
  for density in (0.02, 0.3, 1.0):
    stack = table(rng, 120, 8, density)
    oracle.check(run(stack), stack, wire_dtype=jnp.bfloat16)
  exact = rng.integers(-8, 9, (N, 120, 8)).astype(np.float32)
  oracle.check(run(exact), exact)


def test_wire_dtype_keeps_the_sum_in_float32():
  """256 + 1 + 1 + 1 in bfloat16 is 256 when added one by one."""
  stack = np.zeros((N, 64, 2), np.float32)
  stack[:, 5] = 1.0
  stack[0, 5] = 256.0
  run = run_with("vmap", f=zenjax.sparse_psum, wire_dtype=jnp.bfloat16)
  # The sum, 259, may be rounded once on its way back: to 258 or 260.
  assert set(run(stack)[:, 5].ravel().tolist()) <= {258.0, 259.0, 260.0}


def test_float64():
  with jax.enable_x64(True):
    run = run_with("vmap")
    for name, stack in cases.every_case(N, 70, 5, np.dtype(np.float64)):
      oracle.check(run(stack), stack, label=name)


def test_rows_come_out_each_once():
  """Also with another hash. Padding has the index one past the last."""
  rows, width = 150, 6
  run = run_with("shard_map_replicated", output="rows", hash_seed=2**31 - 1)
  for name, stack in cases.every_case(N, rows, width, cases.FLOAT32):
    got = run(stack)
    assert got.num_rows == rows
    np.testing.assert_array_equal(got.indices, got.indices[:1].repeat(N, 0))
    real = got.indices[0] < rows
    ids, padding = got.indices[0, real], got.indices[0, ~real]
    assert (padding == rows).all() and len(np.unique(ids)) == len(ids), name
    dense = np.zeros_like(stack)
    dense[:, ids] = got.values[:, real]
    oracle.check(dense, stack, label=name)


@pytest.mark.parametrize("partition", ["hash", "columns"])
def test_statistics_are_what_numpy_counts(partition):
  rows, width = 200, 16
  tx = zenjax.zen_sync("data", sparse=True, partition=partition)
  trainer = steps.Trainer(tx, {"t": jnp.zeros((rows, width))}, runners.mesh(N))
  for seed, density in enumerate((0.02, 0.1, 1.0)):
    stack = table(np.random.default_rng(seed), rows, width, density)
    trainer({"t": stack})
    mask = oracle.nonzero_rows(stack)
    (numbers,) = zenjax.stats(trainer.state).values()
    local, union = mask.mean(), mask.any(axis=0).mean()
    assert numbers["num_rows"] == rows
    assert numbers["width"] == width
    assert numbers["went_dense"] == (density == 1)
    np.testing.assert_allclose(numbers["density"], local, rtol=1e-5)
    np.testing.assert_allclose(numbers["union_density"], union, rtol=1e-5)
    np.testing.assert_allclose(numbers["growth"], union / local, rtol=1e-5)
    assert 1.0 <= numbers["push_imbalance"] <= N + 1e-5
    assert 1.0 <= numbers["pull_imbalance"] <= N + 1e-5
    dense = 2 * (N - 1) / N * rows * width * 4
    np.testing.assert_allclose(numbers["dense_bytes"], dense, rtol=1e-5)
    ideal = (N - 1) / N * (local + union) * rows * width * 4
    assert numbers["wire_bytes"] >= ideal * (1 - 1e-5)

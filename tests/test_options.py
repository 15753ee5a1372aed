"""What the options of zen_sync change, and that nothing else changes."""

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners
import steps

import zenjax

N = 4
F32 = np.dtype(np.float32)


def table(rng, rows, width, density=0.1, dtype=F32, n=N):
  x = cases.normal(rng, n, rows, width, np.dtype(dtype))
  count = max(1, round(density * rows))
  return cases.keep(x, [rng.permutation(rows)[:count] for _ in range(n)])


def run_with(runner, n=N, f=zenjax.sparse_pmean, **options):
  return runners.RUNNERS[runner](lambda x, axis: f(x, axis, **options), n)


# --- unit -------------------------------------------------------------------


@pytest.mark.parametrize(
  ("unit", "rows", "width", "runner", "partition"),
  [
    ("element", 40, 6, "vmap", "hash"),
    ("element", 40, 6, "shard_map_vma_replicated", "auto"),
    (4, 50, 12, "vmap", "columns"),
    (4, 50, 12, "shard_map_vma_replicated", "hash"),
    (3, 7, 9, "pmap", "auto"),
    (256, 9, 512, "shard_map_replicated", "columns"),
    (256, 9, 512, "vmap", "hash"),
  ],
)
def test_units(unit, rows, width, runner, partition):
  run = run_with(runner, unit=unit, partition=partition)
  for name, stack in cases.every_case(N, rows, width, F32):
    oracle.check(run(stack), stack, label=name)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_top_k_elements_of_a_vector(dtype):
  """Sparsified gradients: single elements of a leaf of one dimension."""
  rng = np.random.default_rng(0)
  tx = zenjax.zen_sync("data", sparse=True, unit="element")
  params = {"w": jnp.zeros(1000, dtype)}
  state = tx.init(params)
  run = runners.RUNNERS["vmap"](lambda g, _: tx.update(g, state)[0], N)
  x = cases.normal(rng, N, 1, 1000, dtype)[:, 0]
  x = np.where(rng.random(x.shape) < 0.02, x, np.zeros((), dtype))
  oracle.check(run({"w": x})["w"], x)


@pytest.mark.parametrize("shape", [(), (40,), (2, 3, 4)])
def test_one_array_of_any_rank(shape):
  run = run_with("vmap")
  stack = np.random.default_rng(0).standard_normal((N, *shape)).astype(F32)
  oracle.check(run(stack), stack)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_leaves_of_no_elements(shape):
  """As `lax.pmean` takes them, alone and beside a table."""
  rng = np.random.default_rng(0)
  tx = zenjax.zen_sync("data", sparse=True)
  stack = {"none": np.zeros((N, *shape), F32), "t": table(rng, 70, 3)}
  state = tx.init(jax.tree.map(lambda x: x[0], stack))
  run = runners.RUNNERS["vmap"](lambda g, _: tx.update(g, state)[0], N)
  got = run(stack)
  oracle.check(got["t"], stack["t"])
  assert got["none"].shape == (N, *shape)


# --- leaves -----------------------------------------------------------------

LEAVES = {
  "wide": ((200, 64), np.float32),
  "narrow": ((1000, 1), np.float16),
  "deep": ((3, 4, 5, 7), np.dtype(cases.BFLOAT16)),
  "one": ((1, 9), np.float32),
}


@pytest.mark.parametrize(
  ("partition", "runner"),
  [
    ("auto", "shard_map_vma_replicated"),
    (2, "pmap"),
  ],
)
def test_many_leaves_in_one_exchange(partition, runner):
  """Widths, dtypes and ranks all differ; each leaf is right on its own."""
  rng = np.random.default_rng(3)
  tx = zenjax.zen_sync("data", sparse=True, partition=partition)
  params = {k: jnp.zeros(s, d) for k, (s, d) in LEAVES.items()}
  state = tx.init(params)
  run = runners.RUNNERS[runner](lambda g, _: tx.update(g, state)[0], N)
  for density in (0.0, 0.03, 0.4, 1.0):
    stack = {}
    for key, (shape, dtype) in LEAVES.items():
      rows = int(np.prod(shape[:-1]))
      x = cases.normal(rng, N, rows, shape[-1], np.dtype(dtype))
      ids = [rng.permutation(rows)[: round(density * rows)] for _ in range(N)]
      stack[key] = cases.keep(x, ids).reshape(N, *shape)
    got = run(stack)
    for key, local in stack.items():
      oracle.check(got[key], local, label=f"{key} at {density}")


def test_row_zero_of_every_table():
  """Tables share one id space, or every row 0 would meet on one owner."""
  shapes = {f"t{i}": (50 + i, 4) for i in range(3)}
  tx = zenjax.zen_sync("data", sparse=True)
  state = tx.init({k: jnp.zeros(s) for k, s in shapes.items()})
  run = runners.RUNNERS["vmap"](lambda g, _: tx.update(g, state)[0], N)
  stack = {k: np.zeros((N, *s), np.float32) for k, s in shapes.items()}
  for x in stack.values():
    x[:, 0] = np.arange(1, N + 1, dtype=np.float32)[:, None]
  got = run(stack)
  for key, local in stack.items():
    oracle.check(got[key], local, label=key)


def test_capacities_by_the_names_of_the_report():
  """Pinning one table changes its rounds, not its values."""
  params = {"a": {"embedding": jnp.zeros((500, 3))}, "b": jnp.zeros((400, 5))}
  rng = np.random.default_rng(0)
  stack = {
    "a": {"embedding": table(rng, 500, 3, 0.05)},
    "b": table(rng, 400, 5, 0.05),
  }
  rounds = {}
  state: Any = zenjax.zen_sync("data", sparse=True).init(params)
  names = sorted(state.leaves)
  for capacities in ({names[0]: (1, 2)}, {names[0]: (10, 30)}):
    tx = zenjax.zen_sync("data", sparse=True, capacities=capacities)
    trainer = steps.Trainer(tx, params, runners.mesh(N))
    got = trainer(stack)
    oracle.check(got["a"]["embedding"], stack["a"]["embedding"])
    oracle.check(got["b"], stack["b"])
    numbers = zenjax.stats(trainer.state)[names[0]]
    rounds[capacities[names[0]]] = numbers["rounds"]
    assert numbers["overflow_rows"] == 0 or numbers["rounds"] > 1
  assert rounds[10, 30] == 1 < rounds[1, 2]


# --- which leaves -----------------------------------------------------------


@pytest.mark.parametrize(
  "sparse",
  [
    None,
    True,
    False,
    {"a": True, "b": False},
    {"a": {"embedding": False}, "b": True},
    lambda name, leaf: leaf.ndim == 2 and "a" in name,
  ],
)
def test_choosing_leaves_never_changes_the_result(sparse):
  rng = np.random.default_rng(0)
  tx = zenjax.zen_sync("data", sparse=sparse)
  shapes = {
    "a": {"embedding": (400, 8)},
    "b": {"kernel": (8, 8), "scale": ()},
  }
  params = jax.tree.map(
    jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple)
  )
  stack = jax.tree.map(
    lambda p: rng.standard_normal((N, *p.shape)).astype(F32), params
  )
  state = tx.init(params)
  run = runners.RUNNERS["vmap"](lambda g, _: tx.update(g, state)[0], N)
  for a, b in zip(
    jax.tree.leaves(run(stack)), jax.tree.leaves(stack), strict=True
  ):
    oracle.check(a, b)


@pytest.mark.parametrize(
  ("shape", "dtype", "sparse"),
  [
    ((520, 32), jnp.float32, True),
    ((8192, 2), jnp.float32, True),
    ((512, 128), jnp.float32, False),  # a down-projection, [4 d, d]
    ((513, 128), jnp.float32, True),
    ((511, 33), jnp.float32, False),  # too few rows
    ((512, 31), jnp.float32, False),  # under 64 KiB
    ((1024, 32), jnp.bfloat16, True),
    ((65536,), jnp.float32, False),
    ((2, 5000, 8), jnp.float32, False),
    ((5000, 8), jnp.int32, False),
  ],
)
def test_leaves_that_are_sparse_by_default(shape, dtype, sparse):
  """The rule in README, at its borders."""
  leaf = jax.ShapeDtypeStruct(shape, dtype)
  state: Any = jax.eval_shape(zenjax.zen_sync("data").init, {"x": leaf})
  assert list(state.leaves) == ["x"] * sparse


def test_leaves_by_the_names_of_the_report():
  params = {"token_embed": {"w": jnp.zeros((9, 2))}, "head": jnp.zeros((9, 2))}
  tx = zenjax.zen_sync("data", sparse=lambda name, leaf: "embed" in name)
  state: Any = tx.init(params)
  assert list(state.leaves) == ["token_embed.w"]


# --- op, hash_seed, wire_dtype ----------------------------------------------


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


@pytest.mark.parametrize("seed", [1, 2**31 - 1])
def test_hash_seeds(seed):
  run = run_with("vmap", partition="hash", hash_seed=seed)
  for name, stack in cases.every_case(N, 157, 3, F32):
    oracle.check(run(stack), stack, label=name)


@pytest.mark.parametrize(
  ("wire_dtype", "runner", "partition"),
  [
    (jnp.bfloat16, "vmap", "hash"),
    (jnp.bfloat16, "shard_map_vma_replicated", "columns"),
    (jnp.float16, "vmap", "columns"),
    (jnp.float16, "pmap", "hash"),
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


@pytest.mark.parametrize("partition", ["hash", "columns"])
def test_float64(partition):
  with jax.enable_x64(True):
    run = run_with("vmap", partition=partition)
    for name, stack in cases.every_case(N, 70, 5, np.dtype(np.float64)):
      oracle.check(run(stack), stack, label=name)


# --- output="rows" ----------------------------------------------------------


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


def test_first_nonzero_rows_of_a_table():
  dense = jnp.zeros((9, 2)).at[jnp.array([1, 4, 8])].set(3.0)
  rows = zenjax.SparseRows.from_dense(dense, 4)
  assert rows.indices.tolist() == [1, 4, 8, 9]
  np.testing.assert_array_equal(rows.to_dense(), dense)
  assert zenjax.SparseRows.from_dense(dense, 2).indices.tolist() == [1, 4]


# --- on_overflow="carry" ----------------------------------------------------


@pytest.mark.parametrize(
  ("partition", "check_vma"),
  [("hash", True), ("hash", False), ("columns", True)],
)
def test_carry_delays_rows_and_loses_none(partition, check_vma):
  """n * averaged updates + residuals = all gradients so far; then it drains."""
  rows, width = 64, 4
  tx = zenjax.zen_sync(
    "data",
    sparse=True,
    on_overflow="carry",
    partition=partition,
    capacities=(2, 6),
  )
  params = {"t": jnp.zeros((rows, width))}
  trainer = steps.Trainer(tx, params, runners.mesh(N), check_vma=check_vma)
  rng = np.random.default_rng(0)
  given = np.zeros((rows, width))
  updated = np.zeros((rows, width))
  carried = []
  for step in range(80):
    stack = table(rng, rows, width, 0.5)
    stack = stack if step < 4 else np.zeros_like(stack)
    given += stack.astype(np.float64).sum(axis=0)
    got = trainer({"t": stack})["t"]
    # No table travels dense under carry, so none is remembered as dense.
    assert "t" in zenjax.advise(trainer.state)
    oracle.check_replicas(got)
    updated += N * got[0].astype(np.float64)
    (residual,) = trainer.per_device()
    residual = residual.astype(np.float64).reshape(N, rows, width)
    np.testing.assert_allclose(
      updated + residual.sum(axis=0), given, rtol=1e-5, atol=1e-5
    )
    carried.append(float(np.abs(residual).sum()))
  trainer.check_replicas()
  assert max(carried) > 0, "nothing overflowed, so nothing was tested"
  assert carried[-1] == 0.0


def test_carry_without_overflow_is_exact():
  tx = zenjax.zen_sync(
    "data", sparse=True, on_overflow="carry", capacities=(64, 64)
  )
  trainer = steps.Trainer(tx, {"t": jnp.zeros((64, 4))}, runners.mesh(N))
  for seed in range(3):
    stack = table(np.random.default_rng(seed), 64, 4, 0.3)
    oracle.check(trainer({"t": stack})["t"], stack)


# --- statistics -------------------------------------------------------------


@pytest.mark.parametrize("partition", ["hash", "columns"])
def test_statistics_are_what_numpy_counts(partition):
  rows, width = 200, 16
  tx = zenjax.zen_sync("data", sparse=True, partition=partition)
  trainer = steps.Trainer(tx, {"t": jnp.zeros((rows, width))}, runners.mesh(N))
  for seed, density in enumerate((0.02, 0.1)):
    stack = table(np.random.default_rng(seed), rows, width, density)
    trainer({"t": stack})
    mask = oracle.nonzero_rows(stack)
    (numbers,) = zenjax.stats(trainer.state).values()
    local, union = mask.mean(), mask.any(axis=0).mean()
    assert numbers["num_rows"] == rows
    assert numbers["width"] == width
    np.testing.assert_allclose(numbers["density"], local, rtol=1e-5)
    np.testing.assert_allclose(numbers["union_density"], union, rtol=1e-5)
    np.testing.assert_allclose(numbers["growth"], union / local, rtol=1e-5)
    assert 1.0 <= numbers["push_imbalance"] <= N + 1e-5
    assert 1.0 <= numbers["pull_imbalance"] <= N + 1e-5
    dense = 2 * (N - 1) / N * rows * width * 4
    np.testing.assert_allclose(numbers["dense_bytes"], dense, rtol=1e-5)
    ideal = (N - 1) / N * (local + union) * rows * width * 4
    assert numbers["wire_bytes"] >= ideal * (1 - 1e-5)
  assert "t" in zenjax.report(trainer.state)


@pytest.mark.parametrize(
  ("capacities", "withheld"),
  [((1, 20), True), ((20, 24), True), ((40, 40), False)],
  ids=["push", "pull", "fits"],
)
def test_report_claims_no_saving_where_rows_wait(capacities, withheld):
  """Bytes that were not sent yet are not saved."""
  tx = zenjax.zen_sync(
    "data",
    sparse=True,
    on_overflow="carry",
    partition="columns",
    capacities=capacities,
  )
  trainer = steps.Trainer(tx, {"t": jnp.zeros((200, 16))}, runners.mesh(N))
  trainer({"t": table(np.random.default_rng(0), 200, 16, 0.05)})
  (residual,) = trainer.per_device()
  assert residual.any() == withheld
  (numbers,) = zenjax.stats(trainer.state).values()
  assert numbers["withheld"] == withheld
  assert np.isnan(numbers["growth"]) == withheld
  shown = zenjax.report(trainer.state)
  assert ("rows wait" in shown) == withheld
  assert ("x fewer" in shown) == (not withheld)

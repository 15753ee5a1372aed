"""SparseRows: its arithmetic, and that others' arithmetic cannot corrupt it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused

import zenjax
from zenjax import SparseRows


def drawn(seed=0, count=7, num_rows=5, width=3, dtype=jnp.float32):
  """Duplicates, and padding of which the values are not zero."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, num_rows + 1, count)
  values = rng.integers(-4, 5, (count, width))
  return SparseRows(jnp.array(ids), jnp.array(values, dtype), num_rows)


@pytest.mark.parametrize("seed", range(5))
def test_combine_sums_every_row_once(seed):
  rows = drawn(seed)
  want = np.zeros((6, 3))
  np.add.at(want, np.asarray(rows.indices), np.asarray(rows.values))
  want = want[:5]
  got = jax.jit(SparseRows.combine)(rows)
  ids = got.indices.tolist()
  real = [i for i in ids if i < 5]
  assert real == sorted(set(rows.indices.tolist()) - {5})
  assert ids[len(real) :] == [5] * (7 - len(real))
  np.testing.assert_array_equal(got.values[: len(real)], want[real])
  assert not np.any(got.values[len(real) :])
  np.testing.assert_array_equal(rows.to_dense(), want)


def test_padding_may_hold_anything():
  rows = SparseRows(jnp.array([2, 0]), jnp.array([[jnp.nan], [1.0]]), 2)
  assert rows.combine().values.tolist() == [[1.0], [0.0]]
  assert rows.to_dense().tolist() == [[1.0], [0.0]]
  assert float(zenjax.global_norm(rows)) == 1.0


def test_16_bit_rows_are_summed_in_float32():
  """256 + 1 is 256 in bfloat16: summed there, a thousand ones would be lost."""
  ones = jnp.ones((1024, 1), jnp.bfloat16)
  rows = SparseRows(jnp.zeros(1024, jnp.int32), ones, 3).combine()
  assert rows.values[0, 0] == 1024


def test_that_ids_are_unique_is_known_behind_every_border():
  """It is static, so `combine` sorts once; sums of both kinds are rows."""
  rows, unique = drawn(), drawn().combine()
  sorts = lambda x: str(jax.make_jaxpr(SparseRows.combine)(x)).count("sort[")
  assert (sorts(rows), sorts(unique)) == (1, 0)
  assert sorts(jax.jit(lambda x: x)(unique)) == 0
  assert sorts(jax.tree.map(jnp.asarray, unique)) == 0
  assert sorts(unique + rows) == 1
  np.testing.assert_array_equal((unique + rows).to_dense(), 2 * rows.to_dense())


@pytest.mark.usefixtures("as_optax_computes")
def test_optax_may_skip_a_step_of_rows():
  """Both branches of its `lax.cond` return one structure."""
  lazy: Any = zenjax.lazy_rows(optax.adam(0.1))
  table = jnp.ones((5, 3))
  for rows in (drawn(), drawn().combine()):
    want, _ = jax.jit(lazy.update)(rows, lazy.init(table), table)
    for tx in (
      optax.apply_if_finite(lazy, 3),
      optax.transforms.conditionally_transform(
        lazy, lambda step, **_: jnp.less(step, 1)
      ),
    ):
      update, _ = jax.jit(tx.update)(rows, tx.init(table), table)
      np.testing.assert_allclose(update.to_dense(), want.to_dense(), rtol=1e-6)


def test_dense_and_back():
  table = jnp.array([[0.0], [2.0], [0.0], [0.0], [5.0]])
  rows = SparseRows.from_dense(table, 3)
  assert rows.indices.tolist() == [1, 4, 5]
  assert rows.to_dense().tolist() == table.tolist()
  assert (rows.shape, rows.capacity, rows.dtype) == ((5, 1), 3, jnp.float32)


def test_sum_of_two():
  a, b = drawn(1), drawn(2, count=4)
  both = a + b
  assert both.capacity == 11
  np.testing.assert_array_equal(both.to_dense(), a.to_dense() + b.to_dense())


ALL: Any = TypeError, ValueError
UPDATES = "zenjax.apply_updates(params, updates)"
SCALES = "rows.with_values(rows.values * factor)"
INSIDE = "inside zenjax.lazy_rows"
CLIP = "clips with clip_norm="
ADD = "add SparseRows with `+`"
NORM = "zenjax.global_norm"


def step(tx, table, rows):
  return tx.update(rows, tx.init(table), table)


CURES = {
  "another table + rows": (lambda t, g: t[1:] + g, "must have the shape"),
  "number + rows": (lambda t, g: 1.0 + g, UPDATES),
  "rows + table": (lambda t, g: g + t, UPDATES),
  "table - rows": (lambda t, g: t - g, UPDATES),
  "array of NumPy": (lambda t, g: np.ones((5, 3)) - g, UPDATES),
  "rows * 2": (lambda t, g: g * 2, SCALES),
  "number of NumPy": (lambda t, g: np.float32(2) * g, SCALES),
  "number of JAX": (lambda t, g: t[0, 0] * g, SCALES),
  "-rows": (lambda t, g: -g, SCALES),
  "np.asarray": (lambda t, g: np.asarray(g), "rows.to_dense()"),
  "jnp.sum": (lambda t, g: jnp.sum(g), ".to_dense()"),
  "leaves": (lambda t, g: jax.tree.map(lambda x: x * x, g), INSIDE),
  "sum of leaves": (lambda t, g: jax.tree.map(jnp.add, g, g), ADD),
  "sum of trees": (lambda t, g: optax.tree.add(g, g), ADD),
  "norm": (lambda t, g: optax.tree.norm(g), NORM),
  "optax.sgd": (lambda t, g: step(optax.sgd(0.1), t, g), INSIDE),
  "optax.clip": (lambda t, g: step(optax.clip(1.0), t, g), CLIP),
  "clip by norm": (
    lambda t, g: step(optax.clip_by_global_norm(1.0), t, g),
    CLIP,
  ),
  "decay": (lambda t, g: step(optax.add_decayed_weights(0.1), t, g), INSIDE),
  "optax.adam": (lambda t, g: step(optax.adam(0.1), t, g), INSIDE),
  "MultiSteps": (
    lambda t, g: step(optax.MultiSteps(optax.sgd(0.1), 2), t, g),
    "convert with .to_dense()",
  ),
}


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("name", CURES)
def test_errors_name_the_cure(name):
  """With plain integers all of these would change which rows are trained."""
  wrong, cure = CURES[name]
  # Outside of jit the error of `jax.Array.real` is JAX's own.
  runs = (jax.jit(wrong), wrong)[: 1 if "norm" in name else 2]
  for run in runs:
    with refused(ALL, cure):
      run(jnp.ones((5, 3)), drawn())


ZEROS = {
  "zeros_like": lambda rows: jax.tree.map(jnp.zeros_like, rows),
  "full_like": lambda rows: jax.tree.map(lambda x: jnp.full_like(x, 0), rows),
  "optax": optax.tree.zeros_like,
  "ones_like": lambda rows: jax.tree.map(jnp.ones_like, rows),
}


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("of_rows", [jnp.float32, jnp.bfloat16])
def test_a_table_plus_rows_is_rounded_once(dtype, of_rows):
  """Duplicates add up, padding is nothing; by optax's own update too."""
  rng = np.random.default_rng(0)
  ids = np.array([3, 1, 3, 5, -1, 1, 9])
  values = jnp.asarray(rng.standard_normal((7, 4)), of_rows)
  table = jnp.asarray(rng.standard_normal((5, 4)), dtype)
  rows = SparseRows(ids, values, 5)
  want = np.asarray(table, np.float64)
  for at, row in zip(ids.tolist(), np.asarray(values, np.float64)):
    if at < 5:
      want[at] += row
  # Sums of a table no wider than its rows are rounded as JAX adds.
  ulps = 1 if jnp.promote_types(dtype, of_rows) == dtype else 0.5
  ulps += 0.01  # of float32, in which wider sums are
  bound = ulps * float(jnp.finfo(dtype).eps) * np.maximum(1, np.abs(want) * 2)
  update: Any = optax.apply_updates
  totals: list[Any] = [
    table + rows,
    np.asarray(table) + rows,
    update({"t": table}, {"t": rows})["t"],
    jax.jit(lambda t, r: t + r)(table, rows),
    zenjax.apply_updates(table, rows),
  ]
  for total in totals:
    assert total.dtype == dtype
    assert np.all(np.abs(np.asarray(total, np.float64) - want) <= bound)


@pytest.mark.usefixtures("as_optax_computes")
@pytest.mark.parametrize("name", ZEROS)
def test_zeros_that_others_make_are_no_row(name):
  """Row 0 would be one that was touched."""
  rows = SparseRows(jnp.array([0, 3]), jnp.ones((2, 3)), 5)
  zeros = jax.jit(ZEROS[name])(rows)
  assert zeros.combine().indices.tolist() == [5, 5]
  np.testing.assert_array_equal(zeros.to_dense(), 0)
  np.testing.assert_array_equal((rows + zeros).to_dense(), rows.to_dense())
  lazy: Any = zenjax.lazy_rows(optax.adam(0.1))
  table = jnp.ones((5, 3))
  _, state = lazy.update(rows, lazy.init(table), table)
  update, _ = lazy.update(zeros, state, table)
  np.testing.assert_array_equal(zenjax.apply_updates(table, update), table)


@pytest.mark.usefixtures("as_optax_computes")
def test_zero_nans_keeps_ids():
  values = jnp.array([[1.0], [jnp.nan]])
  rows = SparseRows(jnp.array([4, 0]), values, 5)
  tx: Any = optax.zero_nans()
  update, _ = tx.update(rows, tx.init(rows))
  assert update.indices.tolist() == [4, 0]
  assert update.values.tolist() == [[1.0], [0.0]]


@pytest.mark.usefixtures("as_optax_computes")
def test_tables_without_rows():
  table, rows = jnp.ones((0, 3)), SparseRows([0], jnp.ones((1, 3)), 0)
  tx: Any = zenjax.lazy_rows(optax.adam(0.1))
  update, _ = tx.update(rows, tx.init(table), table)
  assert zenjax.apply_updates(table, update).shape == (0, 3)
  assert rows.to_dense().shape == (0, 3)
  assert SparseRows.from_dense(table, 2).indices.tolist() == [0, 0]
  assert float(zenjax.global_norm(rows)) == 0.0


def test_it_is_a_pytree_like_any_other():
  rows = drawn()
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), rows)
  mapped = jax.vmap(SparseRows.combine)(stacked)
  assert mapped.indices.shape == (2, 7)
  _, scanned = jax.lax.scan(lambda c, x: (c, x.combine()), 0, stacked)
  np.testing.assert_array_equal(scanned.indices, mapped.indices)
  shapes = jax.eval_shape(SparseRows.combine, rows)
  assert shapes.values.shape == (7, 3) and "of 5" in repr(shapes)
  paths = jax.tree_util.tree_flatten_with_path(rows)[0]
  assert [jax.tree_util.keystr(p) for p, _ in paths] == [".indices", ".values"]


IDS, ONES = jnp.arange(2), jnp.ones((2, 1))
REFUSED = {
  "ids of floats": (lambda: SparseRows(jnp.ones(2), ONES, 3), "integers"),
  "a vector": (lambda: SparseRows(IDS, jnp.ones(2), 3), "[K, D]"),
  "more values": (
    lambda: SparseRows(IDS, jnp.ones((3, 1)), 3),
    "(2,) and (3, 1)",
  ),
  "many rows": (lambda: SparseRows(IDS, ONES, 2**31), "`num_rows` must be"),
  "sum of two tables": (
    lambda: drawn() + drawn(num_rows=6),
    "of the same table, got shapes",
  ),
  "sum of two widths": (
    lambda: drawn() + drawn(width=2),
    "of the same table, got shapes",
  ),
  "no norm": (
    lambda: zenjax.rows.clip_by_global_norm(0.0),
    "`max_norm` must be positive",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
  call, words = REFUSED[name]
  with refused(TypeError if "integers" in words else ValueError, words):
    call()


def test_norm_and_clipping_are_those_of_the_dense_tree():
  rows = drawn(3)
  tree = {"table": rows, "bias": jnp.array([3.0, 4.0])}
  dense = {"table": rows.to_dense(), "bias": tree["bias"]}
  np.testing.assert_allclose(
    zenjax.global_norm(tree), optax.tree.norm(dense), rtol=1e-6
  )
  for most in (0.5, 1e6):
    clip, theirs = (
      zenjax.rows.clip_by_global_norm(most),
      optax.clip_by_global_norm(most),
    )
    got, _ = jax.jit(clip.update)(tree, clip.init(tree))
    want: Any = theirs.update(dense, theirs.init(dense))[0]
    np.testing.assert_allclose(
      got["table"].to_dense(), want["table"], rtol=1e-6
    )
    np.testing.assert_allclose(got["bias"], want["bias"], rtol=1e-6)

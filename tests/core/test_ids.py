"""Ids of any dtype mean the row that they name, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused
from refusals import trace

import zenjax
from zenjax import packed
from zenjax import SparseRows

R = 5
FAR = [2**32 + 1, 2**31, 2**63 - 1, -(2**32), -R - 1, R]
DTYPES = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]


def within(dtype, ids):
  info = np.iinfo(dtype)
  return np.array([i for i in ids if info.min <= i <= info.max], dtype)


def on_rows(ids) -> np.ndarray:
  return np.asarray(SparseRows(ids, np.ones((len(ids), 1)), R).to_dense()[:, 0])


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_id_out_of_range_is_another_row(dtype, x64):
  far, near = within(dtype, FAR), within(dtype, [4, -1, -R])
  count = np.zeros(R)
  np.add.at(count, near.astype(int), 1)
  with jax.enable_x64(x64):
    for given in (near, near.tolist(), jnp.asarray(near)):
      np.testing.assert_array_equal(on_rows(given), count)
    np.testing.assert_array_equal(on_rows(far), 0)
    np.testing.assert_array_equal(on_rows(far.tolist()), 0)
    if x64 or far.dtype.itemsize <= 4:
      np.testing.assert_array_equal(on_rows(jnp.asarray(far)), 0)


def test_ids_may_be_traced_one_by_one():
  of = jax.jit(lambda i, j: SparseRows([i, j], jnp.ones((2, 1)), R).to_dense())
  assert of(1, 4)[:, 0].tolist() == [0, 1, 0, 0, 1]


def test_packed_tables_read_nan_out_of_range():
  table = packed.pack(jnp.ones((300, 4)))
  ids = np.array([2**32 + 1, 7])
  found = packed.take(table, ids, (300, 4))
  assert np.isnan(found[0]).all() and found[1].tolist() == [1.0] * 4


MANY = 9  # Rows, more than are looked up.


@pytest.mark.parametrize("at", [MANY, MANY + 3, -MANY - 2, -1, 2])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_a_row_that_is_set_out_of_range(at, mode):
  """Nothing is written; what look-ups out of range read is no row of it."""
  ids = jnp.array([2, MANY - 1, MANY, MANY + 3, -MANY - 2])

  def loss(table):
    table = table.at[at].set(9.0, mode=mode)
    rows = jnp.take(table, ids, axis=0, mode="fill", fill_value=0)
    return jnp.sum(rows * jnp.arange(1.0, 6.0)[:, None])

  table = jnp.arange(1.0, 1.0 + MANY)[:, None]
  value, rows = zenjax.value_and_grad(loss)(table)
  want, gradient = jax.value_and_grad(loss)(table)
  assert isinstance(rows, SparseRows)
  np.testing.assert_array_equal(value, want)
  np.testing.assert_array_equal(rows.to_dense(), gradient)


def stacked() -> SparseRows:
  ids, values = jnp.array([[0, 2, 0], [1, 1, R]]), jnp.ones((2, 3, 2))
  return jax.vmap(lambda i, v: SparseRows(i, v, R))(ids, values)


def test_a_stack_of_rows_is_a_stack_of_tables():
  rows = stacked()
  want = np.zeros((2, R, 2))
  want[0, [0, 2]], want[1, 1] = [[2, 2], [1, 1]], 2
  assert (rows.shape, rows.ndim, rows.size) == (want.shape, 3, want.size)
  assert rows.capacity == 3
  np.testing.assert_array_equal(rows.to_dense(), want)
  np.testing.assert_array_equal(rows.combine().to_dense(), want)
  norm = zenjax.global_norm(rows)
  np.testing.assert_allclose(norm, np.linalg.norm(want), rtol=1e-6)


SGD = zenjax.lazy_rows(optax.sgd(1.0))
STACK = jnp.zeros((2, R, 2))


@pytest.mark.parametrize(
  "use",
  [
    lambda rows: rows + rows,
    lambda rows: SGD.update(rows, SGD.init(STACK)),
    lambda rows: SGD.update(rows, SGD.init(STACK), STACK),
    lambda rows: zenjax.apply_updates(STACK, rows),
    lambda rows: trace(
      lambda _: zenjax.zen_sync("data").update(
        rows, zenjax.zen_sync("data").init(STACK)
      )
    ),
    lambda rows: trace(lambda _: zenjax.sparse_psum(rows, "data")),
  ],
  ids=["+", "lazy_rows", "with params", "apply_updates", "zen_sync", "psum"],
)
def test_a_stack_of_rows_is_no_gradient_of_one_table(use):
  with refused(
    ValueError, "SparseRows ... is a stack ... (2, 3, 2) ... .to_dense()"
  ):
    use(stacked())

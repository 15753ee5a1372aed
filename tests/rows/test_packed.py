"""Packed tables beside the same tables plain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps

import zenjax
from zenjax import packed

# 8 rows beside each other; 12 with columns free; one, with and without; 128.
WIDTHS = (16, 10, 100, 128, 1)
ROWS = 300  # fills the last packed row for none of them that hold several
# 16 to 31 lie in two packed rows of 16 columns; duplicates; both ends.
IDS = np.array([17, 16, 17, 31, 299, 0, -1, -300], np.int32)
OUT_OF_RANGE = np.array([300, 303, -301, 3, 2**31 - 1, 0, -(2**31), 17])
OUT_OF_RANGE = OUT_OF_RANGE.astype(np.int32)


def table(width):
  rng = np.random.default_rng(width)
  return jnp.array(rng.standard_normal((ROWS, width)), jnp.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_packs_and_unpacks(width):
  plain = table(width)
  stored = packed.pack(plain)
  assert stored.shape == packed.packed_shape(plain.shape)
  assert stored.shape == (-(-ROWS // (128 // width)), 128)
  np.testing.assert_array_equal(packed.unpack(stored, plain.shape), plain)
  assert np.count_nonzero(stored) == np.count_nonzero(plain)


@pytest.mark.parametrize(
  ("width", "dtype"),
  [(16, jnp.float32), (10, jnp.bfloat16), (128, jnp.int8)],
)
def test_takes_what_the_plain_table_gives(width, dtype):
  values = 10 * np.array(table(width))
  values[0] = -0.0
  plain = jnp.asarray(values).astype(dtype)

  @jax.jit
  def run(plain, every):
    stored = packed.pack(plain)
    got = [packed.take(stored, ids, plain.shape) for ids in every]
    return got, [jnp.take(plain, ids, axis=0) for ids in every]

  small = np.array([255, 3], np.uint8)  # They reach all rows, too.
  others = IDS.reshape(2, 4), IDS[4], IDS.view("u4"), small
  every = (IDS, OUT_OF_RANGE, *others)
  for got, want in zip(*run(plain, every), strict=True):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_what_lies_beside_a_row_does_not_matter():
  plain = table(16).at[1].set(jnp.nan).at[2].set(jnp.inf)
  ids = jnp.array([0, 3])
  loss = lambda t: jnp.sum(packed.take(t, ids, plain.shape) ** 2)
  value, grads = jax.jit(zenjax.value_and_grad(loss))(packed.pack(plain))
  np.testing.assert_allclose(value, jnp.sum(plain[ids] ** 2), rtol=1e-6)
  assert np.isfinite(grads.to_dense()).all()


def loss(rows):
  """In which every element counts differently, and NaN does not."""
  weights = jnp.arange(1.0, 1 + rows.size).reshape(rows.shape)
  return jnp.sum(jnp.where(jnp.isnan(rows), 0, jnp.sin(rows)) * weights)


@pytest.mark.parametrize("width", [16, 10, 100])
def test_gradients_are_rows_and_those_of_the_plain_table(width):
  plain = table(width)

  @jax.jit
  def run(plain, ids):
    want = jax.grad(lambda t: loss(jnp.take(t, ids, axis=0)))(plain)
    look_up = lambda t: packed.take(t, ids, plain.shape)
    got = zenjax.rows.grad(lambda t: loss(look_up(t)))(packed.pack(plain))
    assert isinstance(got, zenjax.SparseRows) and got.capacity == len(ids)
    return got.to_dense(), packed.pack(want)

  for ids in (IDS, OUT_OF_RANGE):
    got, want = run(plain, ids)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def train(tx, grad, params, look_up):
  """Parameters after ten steps; ids that are often in one packed row."""
  rng = np.random.default_rng(0)
  state = tx.init(params)

  @jax.jit
  def step(params, state, ids):
    grads = grad(lambda p: loss(look_up(p, ids)))(params)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  for ids in rng.integers(0, 60, (10, 24), np.int32):
    params, state = step(params, state, ids)
  return params


def test_lazy_rows_are_exact_though_neighbours_are_touched():
  """Trained on a packed table, and on the same as it is."""
  adagrad, plain = optax.adagrad(0.1), table(16)
  with jax.numpy_dtype_promotion("standard"):
    want = train(adagrad, jax.grad, plain, lambda t, ids: t[ids])
    look_up = functools.partial(packed.take, shape=plain.shape)
    tx, stored = zenjax.lazy_rows(adagrad), packed.pack(plain)
    got = train(tx, zenjax.rows.grad, stored, look_up)
  got = packed.unpack(got, plain.shape)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  assert np.any(got != plain)


def test_lazy_adam_moves_the_neighbours():
  """As the docstring has it: as dense Adam would, not as LazyAdam."""
  tx = steps.lenient(zenjax.lazy_rows(optax.adam(0.1)))
  params = packed.pack(jnp.ones((ROWS, 16)))
  state = tx.init(params)
  look_up = lambda t, row: jnp.sum(packed.take(t, row, (ROWS, 16)))
  before = params

  @jax.jit
  def step(params, state, row):
    grads = zenjax.rows.grad(look_up)(params, row)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  for row in (17, 16):
    before = params
    params, state = step(params, state, jnp.array([row]))
  moved = np.any(
    np.asarray(packed.unpack(params - before, (ROWS, 16))) != 0, axis=1
  )
  assert np.flatnonzero(moved).tolist() == [16, 17]


@pytest.mark.parametrize("shape", [(ROWS, 0), (ROWS, 129), (ROWS,), (2, 3, 4)])
def test_refuses_tables_that_do_not_fit(shape):
  with pytest.raises(ValueError, match=f"128 columns, got shape .{shape[0]},"):
    packed.packed_shape(shape)


def test_refuses_what_is_not_packed():
  plain = table(16)
  for read in (packed.unpack, lambda t, s: packed.take(t, IDS, s)):
    with pytest.raises(ValueError, match=r"\(38, 128\) .* got \(300, 16\)"):
      read(plain, plain.shape)
  with pytest.raises(TypeError, match="`ids` must be integers, got float32"):
    packed.take(packed.pack(plain), jnp.ones(3), plain.shape)

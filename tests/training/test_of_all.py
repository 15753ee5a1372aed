"""Norms and weighted means of all devices, from inside a step of one."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
from refusals import refused
import runners

import zenjax

N = 4
ROWS, WIDTH = 600, 32  # travels sparse by default


def gradients(dtype=np.float32):
  rng = np.random.default_rng(0)
  table = rng.normal(size=(N, ROWS, WIDTH)) * (rng.random((N, ROWS, 1)) < 0.05)
  tree = {
    "table": table,
    "bias": rng.normal(size=(N, 7)),
    "scale": table[:, 0, 0],
  }
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def norm_of_mean(stack):
  leaves = jax.tree.leaves(stack)
  means = [np.asarray(x, np.float64).mean(0) for x in leaves]
  return np.sqrt(sum((x**2).sum() for x in means))


def test_norm_is_that_of_the_mean_on_every_device():
  """The result of `zen_sync` has the same norm, bit for bit."""
  tx = zenjax.zen_sync("data")

  def both(tree, axis):
    synced, _ = tx.update(tree, tx.init(tree))
    return zenjax.global_norm(tree, axis), zenjax.global_norm(synced)

  run = runners.RUNNERS["shard_map_vma_replicated"](both, N)
  before, after = run(gradients())
  assert len(set(before.tolist())) == 1
  np.testing.assert_array_equal(after, before)
  np.testing.assert_allclose(before[0], norm_of_mean(gradients()), rtol=1e-6)
  # Norms of the devices, and their mean, are others.
  stack = jax.tree.map(np.asarray, gradients())
  own = lambda i: jax.tree.map(lambda x: x[i : i + 1], stack)
  each = [norm_of_mean(own(i)) for i in range(N)]
  assert abs(before[0] / np.mean(each) - 1) > 0.2


def test_norm_adds_up_an_id_that_stands_twice():
  ids, values = jnp.array([3, 1, 3, 7]), jnp.array([[1.0], [2.0], [3.0], [9.0]])
  rows = zenjax.SparseRows(ids, values, num_rows=7)  # 7 is padding
  np.testing.assert_allclose(zenjax.global_norm(rows), np.hypot(4.0, 2.0))


def on_two_axes(f, n):
  """As `runners.RUNNERS`, of `f` on a grid."""
  run = lambda x: f(x, ("host", "device"))
  for axis in ("device", "host"):
    run = jax.vmap(run, axis_name=axis)
  grid = lambda x: x.reshape(2, n // 2, *x.shape[1:])
  flat = lambda x: np.asarray(x).reshape(n, *x.shape[2:])
  jitted = jax.jit(run)
  return lambda stack: jax.tree.map(flat, jitted(jax.tree.map(grid, stack)))


def test_norm_of_rows_over_two_axes():
  """Rows of one index meet twice, on a device and between them."""
  rng = np.random.default_rng(1)
  ids = rng.integers(0, 41, (N, 8)).astype(np.int32)  # 40 is padding
  values = rng.normal(size=(N, 8, 3)).astype(np.float32)

  def norm(local, axes):
    ids, values = local
    rows = zenjax.SparseRows(ids, values, 40)
    return zenjax.global_norm({"t": rows, "b": values[0]}, axes)

  got = on_two_axes(norm, N)((ids, values))
  dense = np.zeros((N, 41, 3))
  np.add.at(dense, (np.arange(N)[:, None], ids), values)
  want = norm_of_mean((dense[:, :40], values[:, 0]))
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_norm_of_a_gradient_that_autodiff_has_summed():
  mapped = jax.shard_map(
    lambda w: zenjax.global_norm(w, "data"),
    mesh=runners.mesh(N),
    in_specs=P(),
    out_specs=P(),
  )
  with refused(ValueError, "`updates`", "zenjax.unreduced"):
    jax.eval_shape(mapped, jnp.zeros(8))


# Lengths of 8 windows on 4 devices: one has nothing but padding.
LENGTHS = np.array([5, 1, 0, 0, 2, 5, 1, 0])
MASK = np.arange(5) < LENGTHS[:, None]  # [8, 5]
_rng = np.random.default_rng(2)
X = _rng.normal(size=(8, 5, 3)).astype(np.float32)
W = _rng.normal(size=3).astype(np.float32)
SCALE = np.float32(0.3)


def losses(w, x):
  return jnp.sum(jnp.tanh(x * w[None, None]), -1) ** 2


def weights_of(v, mask, x):
  """Those that parameters make, zero where the mask is."""
  return mask * jnp.exp(v * x[..., 0])


def whole(w, v, weighted):
  """Mean and gradients of the unsharded program, in float64."""
  with jax.enable_x64(True):
    x, mask = jnp.asarray(X, jnp.float64), jnp.asarray(MASK, jnp.float64)

    def mean(w, v):
      weights = weights_of(v, mask, x) if weighted else mask
      return jnp.sum(weights * losses(w, x)) / jnp.sum(weights)

    args = jnp.asarray(w, jnp.float64), jnp.asarray(v, jnp.float64)
    value, grads = jax.value_and_grad(mean, (0, 1))(*args)
    return jax.tree.map(np.asarray, (value, grads))


WAYS = runners.RUNNERS | {"two axes": on_two_axes}


@pytest.mark.parametrize(
  "way",
  ["vmap", "pmap", "shard_map_replicated", "shard_map_vma_shards", "two axes"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_shares_are_the_mean_of_all(way, weighted):
  """The loss, and its gradients by parameters and by weights."""

  def step(local, axes):
    x, mask = local

    def share(args):
      w, v = args
      weights = weights_of(v, mask.astype(jnp.float32), x) if weighted else mask
      return zenjax.weighted_mean(losses(w, x), weights, axes)

    args = zenjax.unreduced((jnp.asarray(W), jnp.asarray(SCALE)), axes)
    out = jax.value_and_grad(share)(args)
    return jax.tree.map(lambda x: lax.pmean(x, axes), out)

  parts = X.reshape(N, 2, 5, 3), MASK.reshape(N, 2, 5)
  value, grads = WAYS[way](step, N)(parts)
  want, (by_w, by_v) = whole(W, SCALE, weighted)
  for device in range(N):
    np.testing.assert_allclose(value[device], want, rtol=1e-5)
    np.testing.assert_allclose(grads[0][device], by_w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads[1][device], by_v, rtol=1e-4, atol=1e-6)
  # The mean of the devices' ratios is another number.
  own = np.asarray(losses(W, X)).reshape(N, -1), MASK.reshape(N, -1)
  ratios = (own[0] * own[1]).sum(1) / np.maximum(own[1].sum(1), 1)
  assert abs(ratios.mean() / want - 1) > 0.1


@pytest.mark.parametrize(
  "dtype", [jnp.bool_, jnp.int8, jnp.int32, jnp.bfloat16]
)
def test_masks_of_any_kind(dtype):
  values, mask = np.full((2, 300), 1.0), np.arange(600).reshape(2, 300) > 100
  share = lambda v, m: zenjax.weighted_mean(v, m, "data")
  got = jax.vmap(share, axis_name="data")(
    jnp.asarray(values, jnp.bfloat16), jnp.asarray(mask, dtype)
  )
  # In 16 bits 499 ones are fewer.
  assert got.dtype == jnp.float32
  assert float(got.mean()) == 1.0


def test_padding_may_hold_anything_and_be_all_there_is():
  values = jnp.array([[1.0, jnp.nan], [jnp.inf, 3.0]])
  share = lambda v, m: zenjax.weighted_mean(v, m, "data")
  take = jax.jit(jax.vmap(jax.value_and_grad(share), axis_name="data"))
  got, grads = take(values, jnp.array([[1, 0], [0, 1]]))
  assert float(got.mean()) == 2.0
  assert grads.tolist() == [[1.0, 0.0], [0.0, 1.0]]
  got, grads = take(values, jnp.zeros((2, 2)))
  assert not np.any(got) and not np.any(grads)
  # What counts is told.
  assert np.isnan(take(values, jnp.ones((2, 2)))[0].mean())


def test_what_weighted_mean_refuses():
  x = jnp.zeros((N, 4, 4))
  share = lambda v, w: zenjax.weighted_mean(v, w, "data")
  mapped = jax.vmap(share, axis_name="data")
  with refused(ValueError, "`weights`", "(4,)", "(4, 4)", "broadcast_to"):
    mapped(x, x[:, 0])
  imaginary = x.astype(complex)
  for args, name in (((imaginary, x), "values"), ((x, imaginary), "weights")):
    with refused(TypeError, f"`{name}`", "complex64"):
      mapped(*args)
  with refused(NameError, "unbound axis", "data"):
    share(x, x)

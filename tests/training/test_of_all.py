"""Norms and weighted means of all devices, from inside a step of one."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from refusals import names
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


def test_norm_of_rows_over_two_axes():
  """Rows of one index meet twice, on a device and between them."""
  rng = np.random.default_rng(1)
  ids = jnp.asarray(rng.integers(0, 41, (2, 2, 8)))  # 40 is padding
  values = jnp.asarray(rng.normal(size=(2, 2, 8, 3)), jnp.float32)
  axes = ("host", "device")

  def norm(ids, values):
    rows = zenjax.SparseRows(ids, values, 40)
    return zenjax.global_norm({"t": rows, "b": values[0]}, axes)

  norm = jax.vmap(jax.vmap(norm, axis_name="device"), axis_name="host")
  got = np.asarray(jax.jit(norm)(ids, values))
  dense = np.zeros((2, 2, 41, 3))
  for at in np.ndindex(2, 2, 8):
    dense[at[:2]][ids[at]] += np.asarray(values[at], np.float64)
  stack = dense[:, :, :40].reshape(4, 40, 3), values[:, :, 0].reshape(4, 3)
  np.testing.assert_allclose(got, norm_of_mean(stack), rtol=1e-6)


def test_norm_of_a_gradient_that_autodiff_has_summed():
  mapped = jax.shard_map(
    lambda w: zenjax.global_norm(w, "data"),
    mesh=runners.mesh(N),
    in_specs=P(),
    out_specs=P(),
  )
  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped, jnp.zeros(8))
  names(error, "`updates`", "zenjax.unreduced")


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


def sharded(kind, weighted, dtype=np.float32, axes="data"):
  """`(mean of shares, mean of their gradients)` on each device."""

  def step(x, mask):
    def share(args):
      w, v = args
      weights = weights_of(v, mask.astype(dtype), x) if weighted else mask
      return zenjax.weighted_mean(losses(w, x), weights, axes)

    args = jnp.asarray(W, dtype), jnp.asarray(SCALE, dtype)
    if kind == "vma":
      args = zenjax.unreduced(args, axes)
    out = jax.value_and_grad(share)(args)
    return jax.tree.map(lambda x: lax.pmean(x, axes), out)

  parts = X.astype(dtype).reshape(N, 2, 5, 3), MASK.reshape(N, 2, 5)
  if kind == "pmap":
    out = jax.pmap(step, "data", devices=jax.devices()[:N])(*parts)
  elif kind == "vmap":
    out = jax.jit(jax.vmap(step, axis_name="data"))(*parts)
  else:
    shape = (2, 2) if isinstance(axes, tuple) else (N,)
    names = axes if isinstance(axes, tuple) else (axes,)
    out = jax.jit(
      jax.shard_map(
        step,
        mesh=Mesh(np.array(jax.devices()[:N]).reshape(shape), names),
        in_specs=P(axes),
        out_specs=P(),
        check_vma=kind == "vma",
      )
    )(X.astype(dtype), MASK)
    return jax.tree.map(np.asarray, out)
  return jax.tree.map(lambda x: np.asarray(x)[0], out)


@pytest.mark.parametrize(
  ("kind", "axes"),
  [
    ("vmap", "data"),
    ("pmap", "data"),
    ("vma", "data"),
    ("no vma", "data"),
    ("vma", ("host", "device")),
  ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_shares_are_the_mean_of_all(kind, axes, weighted):
  """The loss, and its gradients by parameters and by weights."""
  value, grads = sharded(kind, weighted, axes=axes)
  want, (by_w, by_v) = whole(W, SCALE, weighted)
  np.testing.assert_allclose(value, want, rtol=1e-5)
  np.testing.assert_allclose(grads[0], by_w, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(grads[1], by_v, rtol=1e-4, atol=1e-6)
  # The mean of the devices' ratios is another number.
  own = np.asarray(losses(W, X)).reshape(N, -1), MASK.reshape(N, -1)
  ratios = (own[0] * own[1]).sum(1) / np.maximum(own[1].sum(1), 1)
  assert abs(ratios.mean() / want - 1) > 0.1


def test_in_a_step_of_data_parallel():
  """Two lines; what comes out is what one device makes of the whole batch."""
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(1.0))

  def step(state, x, mask):
    w, state = state
    share = lambda w: zenjax.weighted_mean(losses(w, x), mask, "data")
    loss, grads = jax.value_and_grad(share)(w)
    updates, state = tx.update(grads, state)
    return (optax.apply_updates(w, updates), state), loss

  w = jnp.asarray(W)
  state = w, zenjax.init_state(tx, w, runners.mesh(N), "data")
  step = jax.jit(zenjax.data_parallel(step, runners.mesh(N), "data"))
  (after, _), loss = step(state, X, MASK)
  want, (by_w, _) = whole(W, SCALE, False)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  np.testing.assert_allclose(after, W - by_w, rtol=1e-4)


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
  with pytest.raises(ValueError) as error:
    mapped(x, x[:, 0])
  names(error, "`weights`", "(4,)", "(4, 4)", "broadcast_to")
  imaginary = x.astype(complex)
  for args, name in (((imaginary, x), "values"), ((x, imaginary), "weights")):
    with pytest.raises(TypeError) as error:
      mapped(*args)
    names(error, f"`{name}`", "complex64")
  with pytest.raises(NameError) as error:
    share(x, x)
  names(error, "unbound axis", "data")

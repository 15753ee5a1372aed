"""`per_device`: a transformation of local values, by its model in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import local_models as models
import numpy as np
import optax
import pytest
import refusals
import runners
import steps

import zenjax
from zenjax import compress

pytestmark = pytest.mark.usefixtures("as_optax_computes")

W = np.random.default_rng(1).standard_normal((3, 2)).astype(np.float32)
MOMENTUM = zenjax.per_device(optax.trace(0.9), "data")


def chained(sync=None, first=MOMENTUM) -> Any:
  sync = sync or zenjax.zen_sync("data")
  return optax.chain(first, sync, optax.sgd(0.02))


def trained(tx, data, check_vma=True):
  mesh = runners.mesh(data.x.shape[1])
  trainer = steps.Trainer(tx, jnp.asarray(W), mesh, check_vma=check_vma)
  for r in range(len(data.x)):
    train(trainer, data.one(r))
  return trainer.params, trainer.state


def train(trainer, batches):
  """One step, with a batch of each device."""
  w = np.asarray(trainer.params)
  each = [models.gradient(w, batches.one(i, 0)) for i in range(len(batches.x))]
  trainer(np.stack(each).astype(np.float32))


@pytest.mark.parametrize(("n", "check_vma"), [(1, True), (4, False), (4, True)])
def test_momentum_of_each_device_is_its_model(n, check_vma):
  data = models.problem(30, n, 1)
  params, state = trained(chained(), data, check_vma)
  want, traces = models.momentum_of_each(W.astype(np.float64), data, 0.02, 0.9)
  np.testing.assert_allclose(params, want, atol=5e-6)
  np.testing.assert_allclose(state[0].value.trace, traces, atol=5e-5)


def test_compressed_momentum():
  data = models.problem(60, 4, 1)
  int4 = compress.all_reduce(compress.LowBit(4, block=32), "data", leaves=True)
  params, _ = trained(chained(int4), data)
  want, _ = models.momentum_of_each(W.astype(np.float64), data, 0.02, 0.9)
  np.testing.assert_allclose(params, want, atol=0.03)


def once(tree, axis):
  tx: Any = zenjax.per_device(
    optax.chain(optax.trace(0.9), optax.scale(2)), axis
  )
  _, state = tx.update(tree, tx.init(tree))
  return zenjax.sparse_pmean(tx.update(tree, state)[0]["w"], axis)


@pytest.mark.parametrize("runner", ["vmap", "pmap"])
def test_vmap_and_pmap_give_the_same(runner):
  g = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
  out = runners.RUNNERS[runner](once, 4)({"w": g})
  for device in range(4):
    np.testing.assert_allclose(out[device], 3.8 * g.mean(axis=0), atol=1e-5)


def test_several_axes():
  axes = ("host", "device")
  mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), axes)
  tx = optax.chain(
    zenjax.per_device(optax.trace(0.9), axes),
    zenjax.delayed(zenjax.zen_sync(axes), axes),
  )
  g = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
  state = zenjax.init_state(tx, W, mesh, axes)
  specs = zenjax.state_specs(state, axes)
  step = jax.shard_map(
    lambda g, state: tx.update(g[0], state),
    mesh=mesh,
    in_specs=(P(axes), specs),
    out_specs=(P(), specs),
  )
  for scale in (0, 1, 1.9):
    update, state = jax.jit(step)(g, state)
    np.testing.assert_allclose(update, scale * g.mean(axis=0), atol=1e-5)


def test_the_state_of_another_dtype_and_a_key():
  """Integers and random keys are the first device's."""
  tx = zenjax.per_device(optax.add_noise(0.1, 0.5, jax.random.key(0)), "data")
  state = zenjax.init_state(tx, W, runners.mesh(2), "data")
  moved = zenjax.from_checkpoint(
    zenjax.to_checkpoint(state), runners.mesh(4), "data"
  )
  assert [x.shape[:1] for x in jax.tree.leaves(moved)] == [(4,)] * 2


def test_complex_momentum_keeps_its_mean():
  w = jnp.ones(3, jnp.complex64)
  state = zenjax.init_state(MOMENTUM, w, runners.mesh(2), "data")
  trace = jnp.array([[1j] * 3, [3j] * 3], jnp.complex64)
  state = state._replace(value=state.value._replace(trace=trace))
  moved = zenjax.from_checkpoint(state, runners.mesh(1), "data")
  np.testing.assert_array_equal(moved.value.trace, [[2j] * 3])


def test_plain_jit():
  mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  tx = chained()

  def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w))

  with jax.set_mesh(mesh):
    w = jax.device_put(jnp.ones((3, 2)), jax.P())
    state = zenjax.init_state(tx, w, mesh, "data")
    x = jax.device_put(np.arange(24.0).reshape(8, 3) / 24, jax.P("data"))

    @jax.jit
    def step(w, state, x):
      grads = jax.grad(loss)(zenjax.unreduced(w, "data"), x)
      # `value` is for others in the chain, such as `reduce_on_plateau`.
      return tx.update(grads, state, w, value=jnp.sum(x))

    _, state = step(w, state, x)
    update, state = step(w, state, x)
    want = jax.jit(jax.grad(loss))(w, x)
  np.testing.assert_allclose(update, -0.02 * 1.9 * want, rtol=1e-5)
  traces = np.asarray(state[0].value.trace)
  np.testing.assert_allclose(traces.sum(axis=0), 1.9 * want, rtol=1e-5)
  assert np.abs(traces[0] - traces[1]).max() > 1e-3


@pytest.mark.parametrize("old, new", [(4, 1), (3, 2), (2, 3)])
def test_on_other_devices(old, new):
  tx = chained(first=zenjax.per_device(optax.scale_by_adam(), "data"))
  params, state = trained(tx, models.problem(5, old, 1))
  saved = zenjax.to_checkpoint(state)
  mesh = runners.mesh(new)
  moved = zenjax.from_checkpoint(saved, mesh, "data")
  before, after = saved[0].value, moved[0].value
  assert after.count.tolist() == [5] * new
  for name in ("mu", "nu"):
    x, y = (np.asarray(getattr(s, name)) for s in (before, after))
    assert y.shape == (new, 3, 2)
    # Every device has moments of the usual size.
    assert (y >= x.min(axis=0) - 1e-6).all()
    assert (y <= x.max(axis=0) + 1e-6).all()
    np.testing.assert_allclose(
      y.mean(axis=0), x.mean(axis=0), rtol=1e-5, atol=1e-7
    )
  trainer = steps.Trainer(tx, np.asarray(params), mesh)
  trainer.state = moved
  train(trainer, models.problem(1, new, 1).one(0))
  assert np.isfinite(trainer.params).all()


def test_a_state_without_arrays_moves():
  tx = chained(first=zenjax.per_device(optax.scale(2), "data"))
  _, state = trained(tx, models.problem(1, 2, 1))
  mesh = runners.mesh(4)
  state = zenjax.from_checkpoint(zenjax.to_checkpoint(state), mesh, "data")
  step = lambda state, g: tx.update(g[0], state)[::-1]
  step = zenjax.data_parallel(step, mesh, "data", aux_specs="same")
  jax.eval_shape(step, state, jnp.ones((4, 3, 2)))


def updated(grads, tx=MOMENTUM):
  return refusals.trace(lambda _: tx.update(grads, tx.init(W)))


def exchange_inside(sync):
  return lambda: updated(W, zenjax.per_device(sync, "data"))


def summed_gradients():
  tx, mesh = chained(), runners.mesh(2)
  state = zenjax.init_state(tx, W, mesh, "data")
  specs = P(), zenjax.state_specs(state, "data")
  step = jax.shard_map(tx.update, mesh=mesh, in_specs=specs, out_specs=specs)
  jax.eval_shape(step, W, state)


TABLE = {"t": jnp.zeros((4096, 8))}
ROWS = zenjax.SparseRows(jnp.zeros(2, jnp.int32), jnp.zeros((2, 4)), 40)
REFUSED = {
  "row gradients": (
    lambda: updated(ROWS),
    TypeError,
    "per_device ... SparseRows",
  ),
  "other gradients": (
    lambda: updated(W[:2]),
    ValueError,
    "`state` of per_device ... zenjax.init_state",
  ),
  "init outside": (
    lambda: MOMENTUM.init(W),
    ValueError,
    "`per_device` ... zenjax.init_state",
  ),
  "a sharded table": (
    lambda: zenjax.init_state(
      MOMENTUM,
      zenjax.tables.shard(TABLE, runners.mesh(2), "data"),
      runners.mesh(2),
      "data",
    ),
    ValueError,
    "`params` of per_device ... 't' ... zenjax.sharded_optimizer",
  ),
  "a synchronization": (
    exchange_inside(zenjax.zen_sync("data")),
    ValueError,
    "`per_device` ... synchronizes",
  ),
  "a compressor": (
    exchange_inside(compress.all_reduce(compress.LowBit(8), "data")),
    ValueError,
    "`per_device` ... synchronizes",
  ),
  "summed gradients": (summed_gradients, ValueError, "zenjax.unreduced"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
  call, kind, words = REFUSED[case]
  with refusals.refused(kind, words):
    call()

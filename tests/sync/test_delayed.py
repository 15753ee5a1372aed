"""`delayed`: models in NumPy, what depends on what, checkpoints, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import local_models as models
import numpy as np
import optax
import pytest
import refusals
import runners
import steps

import zenjax
from zenjax import compress
from zenjax._src.core import jaxprs

pytestmark = pytest.mark.usefixtures("as_optax_computes")

W = np.random.default_rng(1).standard_normal((3, 2)).astype(np.float32)
SYNCS: dict[str, Any] = {
  "zen_sync": lambda **how: zenjax.zen_sync("data", sparse=True, **how),
  "dense": lambda **how: zenjax.zen_sync("data", **how),
  "top_k": lambda **how: compress.all_reduce(
    compress.TopK(1.0), "data", leaves=True, **how
  ),
  "int4": lambda **how: compress.all_reduce(
    compress.LowBit(4, block=32), "data", leaves=True, **how
  ),
}


def chained(sync, rate=0.05):
  return optax.chain(zenjax.delayed(sync, "data"), optax.sgd(rate))


def trained(tx, data, mesh, state=None):
  def step(state, batch):
    params, opt_state = state
    batch = jax.tree.map(lambda x: x[0, 0], batch)
    loss, grads = jax.value_and_grad(models.loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  state = state or (jnp.asarray(W), zenjax.init_state(tx, W, mesh, "data"))
  params = []
  for r in range(len(data.x)):
    state, _ = run(state, data.one(r))
    params.append(np.asarray(state[0]))
  return params[0], state


@pytest.mark.parametrize(
  ("sync", "n", "op"),
  [
    ("zen_sync", 4, "mean"),
    ("zen_sync", 1, "sum"),
    ("dense", 2, "sum"),
    ("top_k", 2, "mean"),
    pytest.param("top_k", 4, "sum", marks=pytest.mark.more),
    pytest.param("zen_sync", 2, "sum", marks=pytest.mark.more),
  ],
)
def test_it_is_its_model(sync, n, op):
  data = models.problem(50, n, 1)
  tx = chained(SYNCS[sync](op=op))
  first, (params, state) = trained(tx, data, runners.mesh(n))
  np.testing.assert_array_equal(first, W)
  want, saved = models.delayed_sgd(
    W.astype(np.float64), data, 0.05, op == "mean"
  )
  np.testing.assert_allclose(params, want, atol=2e-6)
  np.testing.assert_allclose(state[0].saved.value, saved, atol=2e-6)


def test_compressed_gradients_are_delayed_too():
  data = models.problem(50, 4, 1)
  tx = chained(SYNCS["int4"]())
  _, (params, state) = trained(tx, data, runners.mesh(4))
  want, _ = models.delayed_sgd(W.astype(np.float64), data, 0.05)
  assert np.abs(params - W).max() > 0.5
  np.testing.assert_allclose(params, want, atol=0.03)
  assert zenjax.stats(state)["compressed"]["leaves"] == 1


@pytest.mark.parametrize("sync", SYNCS)
def test_no_exchange_depends_on_the_gradient_of_the_step(sync):
  """Without the new gradient, all collectives are left."""

  def traced(tx):
    def step(g, state):
      update, state = tx.update(g, state)
      return (update, getattr(state, "inner", state)), state

    def given(g):
      return jax.tree.map(lambda x: x[0], g), tx.init(g[0])

    axis: Any = dict(axis_env=[("data", 4)])
    shapes = jax.make_jaxpr(given, return_shape=True, **axis)
    _, (g, state) = shapes(jnp.ones((1, *W.shape)))
    program, out = jax.make_jaxpr(step, return_shape=True, **axis)(g, state)
    number = len(jax.tree.leaves(out[0]))
    outputs = [i < number for i in range(len(program.out_avals))]
    needed, used = jaxprs.needed(program, outputs)
    sent = lambda x: sorted(steps.collectives(jaxprs.opened(x)[0]))
    return sent(needed), sent(program), used[0]

  needed, found, depends = traced(zenjax.delayed(SYNCS[sync](), "data"))
  assert found and needed == found and not depends
  needed, found, depends = traced(SYNCS[sync]())
  assert needed == found and depends


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("old, new", [(4, 2), (2, 4), (3, 2)])
def test_no_gradient_is_lost_on_other_devices(op, old, new):
  tx = chained(SYNCS["dense"](op=op))
  _, (params, state) = trained(tx, models.problem(5, old, 1), runners.mesh(old))
  waits = np.asarray(state[0].saved.value)
  saved = zenjax.to_checkpoint(state)
  moved = zenjax.from_checkpoint(saved, runners.mesh(new), "data")
  combine = np.mean if op == "mean" else np.sum
  want = W * 0 + combine(waits, axis=0)
  np.testing.assert_allclose(
    combine(moved[0].saved.value, axis=0), want, atol=1e-6
  )
  _, (after, _) = trained(
    tx,
    models.problem(1, new, 1),
    runners.mesh(new),
    (jnp.asarray(np.asarray(params)), moved),
  )
  np.testing.assert_allclose(after, params - 0.05 * want, atol=1e-6)


def test_accumulated_gradients_move_by_like():
  inner: Any = optax.MultiSteps(zenjax.zen_sync("data"), 3)
  tx = zenjax.delayed(inner, "data")
  _, (_, state) = trained(tx, models.problem(2, 4, 1), runners.mesh(4))
  like = zenjax.init_state(tx, W, runners.mesh(2), "data")
  saved = zenjax.to_checkpoint(state)
  moved = zenjax.from_checkpoint(saved, runners.mesh(2), "data", like=like)
  mean = lambda x: np.asarray(x).reshape(-1, *W.shape).mean(axis=0)
  want = mean(saved.inner.acc_grads)
  assert np.abs(want).max() > 0
  np.testing.assert_allclose(mean(moved.inner.acc_grads), want, atol=1e-6)


def test_updates_keep_the_dtype_of_gradients():
  """bfloat16 gradients of float32 parameters are sent in bfloat16."""
  tx: Any = zenjax.delayed(zenjax.zen_sync("data"), "data")
  step = lambda g: tx.update(g.astype(jnp.bfloat16), tx.init(g))
  update, state = jax.vmap(step, axis_name="data")(jnp.ones((2, 3)))
  assert update.dtype == jnp.bfloat16
  assert state.saved.value.dtype == jnp.float32


def twice(tree, axis):
  tx = zenjax.delayed(zenjax.zen_sync(axis), axis)
  zero, state = tx.update(tree, tx.init(tree))
  return zero, tx.update(jax.tree.map(jnp.zeros_like, tree), state)[0]


@pytest.mark.parametrize("runner", runners.RUNNERS)
def test_every_mapping_gives_the_same(runner):
  g = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
  zero, mean = runners.RUNNERS[runner](twice, 4)({"w": g})
  np.testing.assert_array_equal(zero["w"], np.zeros((4, 3, 2)))
  for device in range(4):
    np.testing.assert_allclose(mean["w"][device], g.mean(axis=0), atol=1e-6)


def test_plain_jit():
  """Each device saves its part of unreduced arrays."""
  mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  tx = chained(SYNCS["dense"](), 1.0)

  def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w))

  with jax.set_mesh(mesh):
    w = jax.device_put(jnp.ones((3, 2)), jax.P())
    state = zenjax.init_state(tx, w, mesh, "data")
    x = jax.device_put(np.arange(24.0).reshape(8, 3) / 24, jax.P("data"))

    @jax.jit
    def step(w, state, x):
      grads = jax.grad(loss)(zenjax.unreduced(w, "data"), x)
      return tx.update(grads, state, w)

    first, state = step(w, state, x)
    second, state = step(w, state, x * 0)
    want = jax.jit(jax.grad(loss))(w, x)
  np.testing.assert_array_equal(first, np.zeros((3, 2)))
  np.testing.assert_allclose(second, -want, rtol=1e-5)


def test_multi_steps_around_it():
  data = models.problem(8, 2, 1)
  tx = optax.MultiSteps(chained(SYNCS["dense"]()), 2)
  _, (params, _) = trained(tx, data, runners.mesh(2))
  w, old = W.astype(np.float64), 0.0
  for r in range(0, 8, 2):
    each = [
      models.gradient(w, data.one(r + k, i, 0))
      for k in range(2)
      for i in range(2)
    ]
    w, old = w - 0.05 * old, np.mean(each, axis=0)
  np.testing.assert_allclose(params, w, atol=1e-6)


ROWS = zenjax.SparseRows(jnp.zeros(2, jnp.int32), jnp.zeros((2, 4)), 40)


def updated(grads, state_of=None):
  tx = zenjax.delayed(zenjax.zen_sync("data"), "data")

  def step(_):
    like = jax.tree.map(
      lambda x: jnp.zeros(x.shape), state_of or grads, is_leaf=_is_rows
    )
    return tx.update(grads, tx.init(like))

  return refusals.trace(step)


def _is_rows(x):
  return isinstance(x, zenjax.SparseRows)


REFUSED = {
  "row gradients": (
    lambda: updated({"table": ROWS}),
    TypeError,
    "'table' ... SparseRows ... jax.value_and_grad",
  ),
  "init outside": (
    lambda: zenjax.delayed(zenjax.zen_sync("data"), "data").init(W),
    ValueError,
    "`delayed` ... zenjax.init_state",
  ),
  "other gradients": (
    lambda: updated({"w": W}, {"w": W[:2]}),
    ValueError,
    "`state` of delayed ... (1, 2, 2) ... (1, 3, 2) ... zenjax.init_state",
  ),
  "no axis": (
    lambda: zenjax.delayed(zenjax.zen_sync("data"), ()),
    ValueError,
    "`axis_name`",
  ),
  "a chain that never synchronizes": (
    lambda: trained(
      chained(optax.identity()), models.problem(1, 2, 1), runners.mesh(2)
    ),
    ValueError,
    "synchronizes nothing",
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
  call, kind, words = REFUSED[case]
  with refusals.refused(kind, words):
    call()

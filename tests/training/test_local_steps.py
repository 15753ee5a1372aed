"""`local_steps`: NumPy models of DiLoCo, mappings, checkpoints, refusals."""

import functools
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

import zenjax

pytestmark = pytest.mark.usefixtures("as_optax_computes")

W = np.random.default_rng(1).standard_normal((3, 2)).astype(np.float32)


def pieces(inner, outer, every, op=None):
  local = zenjax.local_steps(models.loss, inner, every, "data")
  return local, optax.chain(zenjax.zen_sync("data", op=op), outer)


def stepper(local, outer):
  def step(state, batches):
    params, inner_state, outer_state = state
    (loss, grads), inner_state = local(params, inner_state, batches)
    updates, outer_state = outer.update(grads, outer_state, params)
    params = optax.apply_updates(params, updates)
    return (params, inner_state, outer_state), loss

  return step


def made(local, outer, mesh, params=W):
  place = lambda tx: zenjax.init_state(tx, params, mesh, "data")
  return jnp.asarray(params), place(local), place(outer)


def by_data_parallel(local, outer, n):
  mesh = runners.mesh(n)
  step = zenjax.data_parallel(
    stepper(local, outer), mesh, "data", aux_specs="mean"
  )
  joined = lambda b: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), b)
  step = jax.jit(step, donate_argnums=0)
  return made(local, outer, mesh), lambda state, b: step(state, joined(b))


def by_shard_map(local, outer, n, check_vma):
  mesh = runners.mesh(n)
  state = made(local, outer, mesh)
  specs = zenjax.state_specs(state, "data")

  def step(state, batches):
    batches = jax.tree.map(lambda x: x[0], batches)
    state, loss = stepper(local, outer)(state, batches)
    return state, jax.lax.pmean(loss, "data")

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(specs, P("data")),
    out_specs=(specs, P()),
    check_vma=check_vma,
  )
  return state, jax.jit(mapped)


def by_pmap(local, outer, n):
  init = lambda w: (w, local.init(w), outer.init(w))
  pmap = functools.partial(
    jax.pmap, axis_name="data", devices=jax.devices()[:n]
  )
  state = pmap(init)(np.stack([W] * n))

  def step(state, batches):
    state, loss = stepper(local, outer)(state, batches)
    return state, jax.lax.pmean(loss, "data")

  return state, pmap(step)


WAYS = {
  "data_parallel": by_data_parallel,
  "pmap": by_pmap,
  "shard_map": functools.partial(by_shard_map, check_vma=False),
  "check_vma": functools.partial(by_shard_map, check_vma=True),
}


def trained(way, local, outer, data):
  state, step = WAYS[way](local, outer, data.x.shape[1])
  losses = []
  for r in range(len(data.x)):
    state, loss = step(state, data.one(r))
    losses.append(np.asarray(loss).reshape(-1)[0])
  return state, losses


@pytest.mark.parametrize(
  ("way", "n", "every"),
  [("data_parallel", 1, 3), ("data_parallel", 4, 1)]
  + [(way, 4, 3) for way in WAYS],
)
def test_diloco_is_its_model(way, n, every):
  data = models.problem(20, n, every)
  local, outer = pieces(
    optax.adamw(0.02), optax.sgd(0.7, momentum=0.9, nesterov=True), every
  )
  (params, inner, _), losses = trained(way, local, outer, data)
  want, of_devices, optimizers = models.diloco(
    W.astype(np.float64),
    data,
    lambda: models.AdamW(0.02),
    models.Sgd(0.7, 0.9, True),
  )
  params = np.asarray(params)
  np.testing.assert_allclose(
    params[0] if way == "pmap" else params, want, atol=2e-5
  )
  np.testing.assert_allclose(losses, of_devices.mean(axis=1), rtol=1e-4)
  adam = inner.value[0]
  nu = np.asarray(adam.nu).reshape(n, 3, 2)
  np.testing.assert_allclose(nu, [x.nu for x in optimizers], rtol=1e-3)
  assert np.asarray(adam.count).reshape(-1).tolist() == [20 * every] * n


def test_nothing_is_sent_before_the_round_is_over():
  local, _ = pieces(optax.adamw(0.1), optax.sgd(1.0), 4)
  data = models.problem(1, 1, 4).one(0, 0)
  program = jax.make_jaxpr(
    lambda w, b: local(w, local.init(w), b), axis_env=[("data", 4)]
  )(W, data)
  assert "psum" not in str(program) and "all_" not in str(program)


def test_multi_steps_inside_and_outside_move_by_like():
  inner = optax.MultiSteps(optax.sgd(0.1), 2)
  outer = optax.MultiSteps(optax.chain(zenjax.zen_sync("data")), 3)
  local, _ = pieces(inner, optax.identity(), 3)
  state, _ = trained("data_parallel", local, outer, models.problem(1, 4, 3))
  saved = zenjax.to_checkpoint(state)
  like = made(local, outer, runners.mesh(2))
  moved = zenjax.from_checkpoint(saved, runners.mesh(2), "data", like=like)
  mean = lambda x: np.asarray(x).reshape(-1, *W.shape).mean(axis=0)
  want = mean(saved[2].acc_grads)
  np.testing.assert_allclose(mean(moved[2].acc_grads), want, atol=1e-6)


def test_check_step_compares_copies():
  def build(mesh):
    local, outer = pieces(optax.adam(0.1), optax.sgd(1.0), 2)
    split = lambda x: x.reshape(2, -1, *x.shape[1:])
    one_round = stepper(local, outer)
    step = zenjax.data_parallel(
      lambda state, x: one_round(state, jax.tree.map(split, x)), mesh, "data"
    )

    def checked(params, opt_state, *batch):
      (params, *opt_state), loss = step((params, *opt_state), *batch)
      return params, tuple(opt_state), loss

    params, *opt_state = made(local, outer, mesh)
    return jax.jit(checked), params, tuple(opt_state)

  x, y = (x[0].reshape(20, -1) for x in models.problem(1, 2, 2))
  batch = (models.Problem(x, y),)
  assert zenjax.check_step(build, runners.mesh(2), batch).ok


def test_the_pseudo_gradient_has_the_dtype_of_parameters():
  local = zenjax.local_steps(
    lambda w, x: jnp.sum((w["a"].astype(jnp.float32) + w["b"] - x) ** 2),
    optax.adam(0.1),
    3,
    "data",
  )
  params = {"a": jnp.zeros(4, jnp.bfloat16), "b": jnp.zeros(4)}

  def one(x):
    (loss, grads), state = local(params, local.init(params), x)
    return loss, grads, state

  loss, grads, _ = jax.vmap(one, axis_name="data")(jnp.ones((2, 3, 4)))
  assert grads["a"].dtype == jnp.bfloat16 and grads["b"].dtype == jnp.float32
  assert loss.shape == (2,)


def local_of(every: Any = 2, inner=None):
  return pieces(inner or optax.adam(0.1), optax.sgd(1.0), every)[0]


def in_vmap(local, batches: Any = None, state: Any = None):
  run = lambda b: local(W, state or local.init(W), b)
  if batches is None:
    batches = models.problem(1, 2, 2).one(0)
  return jax.eval_shape(jax.vmap(run, axis_name="data"), batches)


def one_round(made_for=2, outer=None):
  """On two devices, with a state for some number of them."""
  local, mean = pieces(optax.adam(0.1), optax.sgd(1.0), 2)
  outer = outer or mean
  state = made(local, outer, runners.mesh(made_for))
  _, step = by_data_parallel(local, outer, 2)
  step(state, models.problem(1, 2, 2).one(0))


TABLE = {"t": jnp.zeros((4096, 8))}
ANY: Any = abs
SGD: Any = optax.sgd
REFUSED = {
  "every in words": (lambda: local_of("8"), ValueError, "`every` ... '8'"),
  "no step": (lambda: local_of(0), ValueError, "`every` ... 0"),
  "another dimension": (
    lambda: in_vmap(local_of(4), models.problem(1, 2, 3).one(0)),
    ValueError,
    "`batches` ... [4, ...] ... (3, 5, 3) ... x.reshape(4, -1",
  ),
  "one number for all steps": (
    lambda: in_vmap(local_of(4), jnp.zeros(2)),
    ValueError,
    "`batches` ... [4, ...] ... jax.random.split(key, every)",
  ),
  "init outside": (
    lambda: local_of().init(W),
    ValueError,
    "`local_steps` ... zenjax.init_state",
  ),
  "plain jit": (
    lambda: jax.jit(local_of())(
      W, zenjax.init_state(local_of(), W, runners.mesh(2), "data"), ()
    ),
    NameError,
    "plain jit ... zenjax.data_parallel",
  ),
  "a state of the inner optimizer": (
    lambda: in_vmap(local_of(inner=SGD(0.1)), state=SGD(0.1).init(W)),
    TypeError,
    "`inner_state` ... zenjax.init_state(local, params, mesh, ('data',))",
  ),
  "a state of other devices": (
    lambda: one_round(made_for=4),
    ValueError,
    "2 devices ... zenjax.from_checkpoint(",
  ),
  "no optimizer": (
    lambda: zenjax.local_steps(ANY, SGD, 2, "data"),
    TypeError,
    "`inner` must be an optax optimizer",
  ),
  "an inner exchange": (
    lambda: in_vmap(
      local_of(inner=optax.chain(zenjax.zen_sync("data"), SGD(0.1)))
    ),
    ValueError,
    "`local_steps` ... synchronizes",
  ),
  "no outer exchange": (
    lambda: one_round(outer=SGD(1.0)),
    ValueError,
    "synchronizes nothing",
  ),
  "a sharded table": (
    lambda: zenjax.init_state(
      local_of(),
      zenjax.tables.shard(TABLE, runners.mesh(2), "data"),
      runners.mesh(2),
      "data",
    ),
    ValueError,
    "'t' ... Keep it replicated",
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
  call, kind, words = REFUSED[case]
  with refusals.refused(kind, words):
    call()

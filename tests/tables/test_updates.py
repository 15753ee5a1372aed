"""Updates of sharded tables are added, as any of optax: zero is nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax

R, D, B = 603, 4, 16
rng = np.random.default_rng(0)


def drawn() -> dict[str, np.ndarray]:
  table = rng.normal(size=(R, D)).astype(np.float32)
  return {"t": table, "w": np.ones(D, np.float32)}


FIRST, OTHER = drawn(), drawn()
IDS = [rng.integers(0, 50, B).astype(np.int32) for _ in range(2)]


def loss(params, ids):
  return jnp.mean((params["t"][ids] @ params["w"] - 1) ** 2)


# Programs of a user: `(gradients, tx, parameters, others, ids, more ids)`.


def two_updates(grads, tx, params, others, a, b):
  state = tx.init(params)
  one, state = tx.update(grads(params, a), state, params)
  two, state = tx.update(grads(params, b), state, params)
  return optax.apply_updates(optax.apply_updates(params, one), two)


def other_parameters(grads, tx, params, others, a, b):
  updates, _ = tx.update(grads(params, a), tx.init(params), params)
  return optax.apply_updates(others, updates)


def master_weights(grads, tx, params, others, a, b):
  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  updates, _ = tx.update(grads(low, a), tx.init(low), low)
  return optax.apply_updates(params, updates)


def skipped(grads, tx, params, others, a, b):
  updates, _ = tx.update(grads(params, a), tx.init(params), params)
  ok = params["w"].sum() < 0
  keep = lambda x: jnp.where(ok, x, jnp.zeros_like(x))
  return optax.apply_updates(params, jax.tree.map(keep, updates))


def frozen(grads, tx, params, others, a, b):
  none = optax.masked(optax.set_to_zero(), {"t": True, "w": False})
  tx = optax.chain(tx, none)
  updates, _ = tx.update(grads(params, a), tx.init(params), params)
  return optax.apply_updates(params, updates)


def schedule_free(grads, tx, params, others, a, b):
  tx = optax.contrib.schedule_free(tx, 0.5)
  state = tx.init(params)
  for ids in (a, b, a):
    updates, state = tx.update(grads(params, ids), state, params)
    params = optax.apply_updates(params, updates)
  return params


PROGRAMS = [
  two_updates,
  other_parameters,
  master_weights,
  skipped,
  frozen,
  schedule_free,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_updates_are_those_of_optax(program):
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("data",), auto, devices=jax.devices()[:4])
  shard = lambda x: zenjax.tables.shard(
    x, mesh, "data", tables={"t": True, "w": False}
  )
  owners = zenjax.sharded_optimizer(optax.sgd(0.5), "data", mesh=mesh)
  found: list[Any] = []
  for take, tx, put in (
    (jax.value_and_grad, optax.sgd(0.5), lambda x: x),
    (zenjax.value_and_grad, owners, shard),
  ):
    grads = lambda *args, take=take: take(loss)(*args)[1]
    run = jax.jit(lambda *x, g=grads, tx=tx: program(g, tx, *x))
    split = jax.device_put(IDS, jax.NamedSharding(mesh, jax.P("data")))
    with jax.numpy_dtype_promotion("standard"):  # Of master weights.
      out = run(put(jax.tree.map(jnp.asarray, FIRST)), put(OTHER), *split)
    found.append(zenjax.tables.unshard(out))
  for leaf, value in found[0].items():
    np.testing.assert_allclose(found[1][leaf], value, rtol=1e-4, atol=1e-5)
  assert not np.array_equal(found[0]["w"], FIRST["w"]) or program is skipped


def test_an_update_takes_no_arithmetic_but_that():
  mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
  tx = zenjax.sharded_optimizer(optax.sgd(0.5), "data", mesh=mesh)
  params = zenjax.tables.shard(
    FIRST, mesh, "data", tables=dict(t=True, w=False)
  )

  def updates_of(params):
    grads = zenjax.value_and_grad(loss)(params, IDS[0])[1]
    return tx.update(grads, tx.init(params), params)[0]

  for change in (
    lambda u: jax.tree.map(lambda x: 0.5 * x, u),
    lambda u: jax.tree.map(jnp.add, u, u),
    optax.tree.norm,
    lambda u: u["t"].value * 2.0,
    lambda u: u["t"].value + u["t"].value,
  ):
    with pytest.raises(TypeError):
      jax.eval_shape(lambda p, f=change: f(updates_of(p)), params)

"""Updates of sharded tables are added, as any of optax: zero is nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runners
from sharded_steps import close
from sharded_steps import split

import zenjax

R, D, B = 603, 4, 16
rng = np.random.default_rng(0)


def drawn() -> dict[str, np.ndarray]:
  table = rng.normal(size=(R, D)).astype(np.float32)
  return {"t": table, "w": np.ones(D, np.float32)}


FIRST, OTHER = drawn(), drawn()
IDS = [rng.integers(0, 50, B).astype(np.int32) for _ in range(2)]
MESH = runners.mesh(2)
OWNERS = zenjax.sharded_optimizer(optax.sgd(0.5), "data", mesh=MESH)


def shard(params):
  tables = {"t": True, "w": False}
  return zenjax.tables.shard(params, MESH, "data", tables=tables)


def loss(params, ids):
  return jnp.mean((params["t"][ids] @ params["w"] - 1) ** 2)


def programs(grads, tx, params, others, a, b):
  """Parameters after programs of a user; most begin with one update."""
  one, state = tx.update(grads(params, a), tx.init(params), params)
  once = optax.apply_updates(params, one)
  yield (
    "two updates",
    optax.apply_updates(once, tx.update(grads(params, b), state, params)[0]),
  )
  yield "other parameters", optax.apply_updates(others, one)

  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  updates, _ = tx.update(grads(low, a), tx.init(low), low)
  yield "master weights", optax.apply_updates(params, updates)

  ok = params["w"].sum() < 0
  keep = lambda x: jnp.where(ok, x, jnp.zeros_like(x))
  yield "skipped", optax.apply_updates(params, jax.tree.map(keep, one))

  none = optax.masked(optax.set_to_zero(), {"t": True, "w": False})
  updates, _ = none.update(one, none.init(params), params)
  yield "frozen", optax.apply_updates(params, updates)

  tx = optax.contrib.schedule_free(tx, 0.5)
  state, free = tx.init(params), params
  for ids in (a, b):
    updates, state = tx.update(grads(free, ids), state, free)
    free = optax.apply_updates(free, updates)
  yield "schedule-free", free


def test_programs_of_updates_are_those_of_optax():
  def run(value_and_grad, tx, *given):
    grads = lambda *args: value_and_grad(loss)(*args)[1]
    run = jax.jit(lambda *x: dict(programs(grads, tx, *x)))
    with jax.numpy_dtype_promotion("standard"):  # Of master weights.
      return zenjax.tables.unshard(run(*given))

  want = run(jax.value_and_grad, optax.sgd(0.5), FIRST, OTHER, *IDS)
  given = shard(FIRST), shard(OTHER), *split(IDS, MESH)
  got = run(zenjax.value_and_grad, OWNERS, *given)
  assert got.keys() == want.keys() and len(want) == 6
  for name, params in want.items():
    close(got[name], params, rtol=1e-4, atol=1e-5, name=name)
    assert not np.array_equal(params["w"], FIRST["w"]) or name == "skipped"


def test_an_update_takes_no_arithmetic_but_that():
  def updates_of(params):
    grads = zenjax.value_and_grad(loss)(params, IDS[0])[1]
    return OWNERS.update(grads, OWNERS.init(params), params)[0]

  for change in (
    lambda u: jax.tree.map(lambda x: 0.5 * x, u),
    lambda u: jax.tree.map(jnp.add, u, u),
    optax.tree.norm,
    lambda u: u["t"].value * 2.0,
    lambda u: u["t"].value + u["t"].value,
  ):
    with pytest.raises(TypeError):
      jax.eval_shape(lambda p, f=change: f(updates_of(p)), shard(FIRST))

"""States that are used on other devices, or by others, than they are for."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from refusals import refused
import runners

import zenjax
from zenjax import compress

pytestmark = pytest.mark.usefixtures("as_optax_computes")

PARAMS = {"dense": jnp.zeros((3, 3)), "table": jnp.zeros((128, 4))}
TABLES = lambda name, _: name == "table"


def owners(**options):
  inner = options.pop("inner", optax.adam(0.1))
  return zenjax.sharded_optimizer(inner, "data", sparse=TABLES, **options)


TRANSFORMS: dict[str, Any] = {
  "momentum": compress.all_reduce(
    compress.TopK(0.1), "data", leaves=True, momentum=0.9
  ),
  "micro": compress.all_reduce(compress.MiCRO(0.1), "data", leaves=True),
  "sharded_optimizer": owners(),
  "per_device": optax.chain(
    zenjax.per_device(optax.trace(0.9), "data"), zenjax.zen_sync("data")
  ),
}


def traced(tx, state, n, *, by, params=PARAMS, donate=False):
  """Traces a step on `n` devices; nothing is compiled."""

  def update(grads, state):
    return tx.update(jax.tree.map(lambda g: g[0], grads), state, params)

  mesh = runners.mesh(n)
  grads = jax.tree.map(lambda x: jnp.ones((n, *x.shape)), params)
  if by == "data_parallel":
    step = lambda state, grads: (update(grads, state[1]), ())
    step = zenjax.data_parallel(step, mesh, "data")
    step = jax.jit(step, donate_argnums=0 if donate else ())
    return jax.eval_shape(step, (params, state), grads)
  specs = zenjax.state_specs(state, "data")
  if by == "specs that say it is equal":
    specs = jax.tree.map(lambda _: P(), specs, is_leaf=lambda x: x == P("data"))
  mapped = jax.shard_map(
    update,
    mesh=mesh,
    in_specs=(P("data"), specs),
    out_specs=(P(), specs),
    check_vma=by == "shard_map",
  )
  return jax.eval_shape(jax.jit(mapped), grads, state)


def made(tx, n, params=PARAMS):
  return zenjax.init_state(tx, params, runners.mesh(n), "data")


@pytest.mark.parametrize("kind", ["sharded_optimizer", "micro", "per_device"])
def test_another_number_of_devices(kind):
  """Each count is named, and what moves the state; where that is, it runs."""
  tx = TRANSFORMS[kind]
  states = {n: made(tx, n) for n in (3, 4)}
  remedy = "zenjax.from_checkpoint("
  for had, n, donate in ((4, 2, True), (4, 8, False), (3, 1, True)):
    words = f"used on {n} devices", f"made for {had}", remedy
    with refused(ValueError, *words):
      traced(tx, states[had], n, by="data_parallel", donate=donate)
  # A device then has the parts of several.
  for had, n in ((4, 2), (3, 1)):
    for state in (states[had], jax.tree.map(np.asarray, states[had])):
      with refused(ValueError, f"{n} devices", "made for", remedy):
        traced(tx, state, n, by="shard_map")
  for n in (1, 2):
    state = zenjax.from_checkpoint(states[4], runners.mesh(n), "data")
    traced(tx, state, n, by="shard_map")
    traced(tx, state, n, by="data_parallel")


@pytest.mark.parametrize("kind", ["micro", "sharded_optimizer"])
def test_states_of_mapped_devices_that_are_cut(kind):
  """As of `pmap`, where a state has a dimension of devices in front."""
  tx = TRANSFORMS[kind]
  step = jax.vmap(lambda g, s: tx.update(g, s, PARAMS), axis_name="data")
  stack = lambda n: jax.tree.map(lambda x: jnp.ones((n, *x.shape)), PARAMS)
  init = lambda _: tx.init(PARAMS)
  state = jax.vmap(init, axis_name="data")(jnp.zeros(4))
  jax.eval_shape(step, stack(4), state)
  with refused(ValueError, "2 devices", "made for", "zenjax.from_checkpoint("):
    jax.eval_shape(step, stack(2), jax.tree.map(lambda x: x[:2], state))


@pytest.mark.parametrize("kind", ["momentum", "sharded_optimizer"])
def test_parts_that_are_not_split(kind):
  tx = TRANSFORMS[kind]
  with refused(ValueError, "`state`", "zenjax.state_specs"):
    traced(tx, made(tx, 4), 4, by="specs that say it is equal")


def test_a_state_in_the_order_of_rows():
  tx = owners()
  saved = zenjax.to_checkpoint(made(tx, 4))
  for by in ("shard_map", "data_parallel"):
    with refused(ValueError, "order of rows", "zenjax.from_checkpoint(saved"):
      traced(tx, saved, 1, by=by)


def test_other_owners_on_as_many_devices():
  """Which `like` makes those of the state, but of tables there must be all."""
  tx, other = owners(), owners(hash_seed=1)
  all_of = zenjax.sharded_optimizer(optax.adam(0.1), "data", sparse=True)
  state = made(tx, 4)
  for wanted, words in (
    (other, ("hash_seed",)),
    (all_of, ("`state`", "sparse leaves ['table']")),
  ):
    with refused(ValueError, *words):
      traced(wanted, state, 4, by="shard_map")
  like = made(other, 2)
  moved = zenjax.from_checkpoint(state, runners.mesh(2), "data", like=like)
  assert jax.tree.structure(moved) == jax.tree.structure(like)
  traced(other, moved, 2, by="shard_map")


def test_another_shape_of_a_table():
  tx, other = owners(), PARAMS | {"table": jnp.zeros((127, 4))}
  words = "`state` ... the tables of this step ... sharded_optimizer"
  with refused(ValueError, words):
    traced(tx, made(tx, 4), 4, by="shard_map", params=other)


def test_what_keeps_nothing_of_tables_is_of_any_number_of_devices():
  tx = owners(inner=optax.sgd(0.1))
  state = made(tx, 4)
  updates, _ = traced(tx, state, 2, by="shard_map")
  assert [x.shape for x in jax.tree.leaves(updates)] == [(3, 3), (128, 4)]
  (_, new), _ = traced(tx, state, 2, by="data_parallel")
  assert jax.tree.structure(new) == jax.tree.structure(state)


def test_no_two_leaves_of_a_state_share_an_array():
  """A step that donates its state would fail."""
  params = PARAMS | {"other": jnp.zeros((128, 4))}
  is_table = lambda name, _: name != "dense"
  adam, mesh = optax.adam(0.1), runners.mesh(4)
  rows = optax.chain(zenjax.zen_sync("data", sparse=is_table), adam)
  states = [made(tx, 4, params) for tx in (rows, *TRANSFORMS.values())]
  states += [
    rows.init(params),
    zenjax.tables.shard(
      params, mesh, "data", tables=is_table, opt_state=adam.init(params)
    ),
  ]
  for state in states:
    parts = [x.addressable_shards[0].data for x in jax.tree.leaves(state)]
    held = [x.unsafe_buffer_pointer() for x in parts if x.size]
    assert len(set(held)) == len(held)

"""States that are saved, and go on with another number of devices."""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused
import runners
from sharded_steps import remembers

import zenjax
from zenjax import compress

pytestmark = pytest.mark.usefixtures("as_optax_computes")

PARAMS = {"big": jnp.zeros(32_768), "kernel": jnp.zeros(400)}
# By leaf, what sends a part of it, and keeps the rest.
LABELS = dict(big="exdyna", kernel="top_k")


def sparsifiers() -> Any:
  """A sparsifier with and one without momentum, each for its own leaf."""
  top_k = compress.TopK(0.05)
  kinds: Any = {
    "exdyna": compress.all_reduce(compress.ExDyna(0.01), "data"),
    "top_k": compress.all_reduce(top_k, "data", leaves=True, momentum=0.5),
  }
  return optax.multi_transform(kinds, LABELS)


def parts_that_wait(state) -> list[Any]:
  nodes = [state.inner_states[x].inner_state for x in ("exdyna", "top_k")]
  return jax.tree.leaves([(x.residuals, x.momenta) for x in nodes])


def test_what_waits_has_the_same_weight_on_other_devices():
  """From four devices to three and four again, by way of the host.

  `compress/test_contract.py` shows that nothing of it is lost.
  """
  tx, rng = sparsifiers(), np.random.default_rng(0)
  state: Any = zenjax.init_state(tx, PARAMS, runners.mesh(4), "data")
  wait = {id(x) for x in parts_that_wait(state)}
  assert len(wait) == 3
  draw = lambda x: rng.laplace(size=x.shape).astype(x.dtype)
  state = jax.tree.map(lambda x: draw(x) if id(x) in wait else x, state)
  weights = [x.mean(axis=0) for x in parts_that_wait(state)]
  for n in (3, 4):
    mesh, saved = runners.mesh(n), zenjax.to_checkpoint(state)
    state = zenjax.from_checkpoint(saved, mesh, "data")
    same = zenjax.from_checkpoint(state, mesh, "data")
    jax.tree.map(np.testing.assert_array_equal, same, state)
    for x, weight in zip(parts_that_wait(state), weights, strict=True):
      assert len(x) == n
      np.testing.assert_allclose(
        np.mean(x, axis=0), weight, rtol=1e-4, atol=1e-5
      )
    step = lambda state, gradients: tx.update(gradients, state, PARAMS)[::-1]
    step = zenjax.data_parallel(step, mesh, "data", aux_specs="same")
    stack = {name: jnp.ones(n * x.size) for name, x in PARAMS.items()}
    jax.eval_shape(step, state, stack)


# Every element says where it belongs, and no row is one of padding.
PLACED = {
  "bf16": jnp.arange(1, 101, dtype=jnp.bfloat16).reshape(50, 2),
  "deep": 1.0 + jnp.arange(600.0).reshape(5, 30, 4),
  "dense": 1.0 + jnp.arange(6.0),
  "long": 1.0 + jnp.arange(128.0 * 3).reshape(128, 3),
  "table": 1.0 + jnp.arange(37.0 * 9).reshape(37, 9),
}
INNER = {
  "by label": optax.multi_transform(
    {
      "a": optax.chain(remembers(), optax.adam(0.1)),
      "b": optax.sgd(0.1),
      "c": optax.masked(remembers(), lambda p: jax.tree.map(jnp.ndim, p)),
    },
    dict(bf16="b", deep="a", dense="a", long="c", table="a"),
  ),
  "remembers": remembers(),
}


def owners(inner, **options):
  return zenjax.sharded_optimizer(
    inner, "data", sparse=lambda name, _: name != "dense", **options
  )


def equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
  ("inner", "old", "new"), [("remembers", 3, 1), ("by label", 2, 4)]
)
def test_what_moves_is_what_is_made_there(inner, old, new):
  """Of every row, from owners to owners and by the form to save."""
  tx = owners(INNER[inner], hash_seed=5)
  here, there = (
    zenjax.init_state(tx, PLACED, runners.mesh(n), "data") for n in (old, new)
  )
  rows = zenjax.tables.unshard
  saved = zenjax.to_checkpoint(here)
  for form in (saved, here):
    moved = zenjax.from_checkpoint(form, runners.mesh(new), "data")
    assert jax.tree.structure(moved) == jax.tree.structure(there)
    equal(rows(moved), rows(there))
    jax.tree.map(
      lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim) or 1 / 0,
      moved,
      there,
    )
    again = zenjax.to_checkpoint(moved)
    assert jax.tree.structure(again) == jax.tree.structure(saved)
  if inner == "remembers":
    equal(rows(here).trace, PLACED)


def accumulating(tx, n, mini_step, values):
  """A state on `n` devices that has accumulated `values: [n, ..]`."""
  tx = optax.MultiSteps(tx, 4)
  params = {"table": jnp.zeros((5, 2)), "w": jnp.zeros(3)}
  state = zenjax.init_state(tx, params, runners.mesh(n), "data")
  accumulated = {k: v.reshape(-1, *v.shape[2:]) for k, v in values.items()}
  return state._replace(
    mini_step=jnp.asarray(mini_step, jnp.int32), acc_grads=accumulated
  )


def local(n):
  rng = np.random.default_rng(n)
  draw = lambda *shape: rng.laplace(size=(n, *shape)).astype(np.float32)
  return {"table": draw(5, 2), "w": draw(3)}


MICRO = compress.MiCRO(0.2)
SYNCS: dict[str, Any] = {
  "mean": zenjax.zen_sync("data", sparse=True),
  "sum": zenjax.zen_sync("data", sparse=True, op="sum"),
  "owners": zenjax.sharded_optimizer(optax.adam(0.1), "data", sparse=True),
  "micro": compress.all_reduce(MICRO, "data", leaves=True),
  "micro sum": compress.all_reduce(MICRO, "data", leaves=True, op="sum"),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_gradients_that_multi_steps_accumulates(sync):
  """What an update would be of them is kept."""
  tx = optax.chain(SYNCS[sync], optax.sgd(0.1))
  values = local(4)
  state = accumulating(tx, 4, 3, values)
  like = accumulating(tx, 2, 0, local(2))
  for n in (2, 3, 8, 4):
    # `zen_sync` says so after its first update.
    given = like if n == 2 else None
    if sync in ("mean", "sum") and n != 2:
      sync_state, *rest = state.inner_opt_state
      leaves = {
        name: dataclasses.replace(leaf, sizes=leaf.sizes.at[2].set(4))
        for name, leaf in sync_state.leaves.items()
      }
      inner = (sync_state.replace(leaves=leaves), *rest)
      state = state._replace(inner_opt_state=inner)
    moved = zenjax.from_checkpoint(state, runners.mesh(n), "data", like=given)
    assert int(moved.mini_step) == 3
    for name, old in values.items():
      new = np.asarray(moved.acc_grads[name]).reshape(n, *old.shape[1:])
      scale = 1.0 if "sum" in sync else n / 4
      np.testing.assert_allclose(
        new.sum(axis=0), old.sum(axis=0) * scale, rtol=1e-5, atol=1e-6
      )


def test_gradients_that_were_averaged_before_they_are_accumulated():
  """They are equal on all devices, and stay as they are."""
  tx = zenjax.zen_sync("data", sparse=True)
  params = {"w": jnp.zeros(3)}
  tx = optax.chain(
    tx, optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()
  )
  state = zenjax.init_state(tx, params, runners.mesh(4), "data")
  mean = np.array([1.0, 2.0, 4.0], np.float32)
  steps = state[1]._replace(acc_grads={"w": mean}, mini_step=jnp.int32(2))
  moved = zenjax.from_checkpoint((state[0], steps), runners.mesh(3), "data")
  assert moved[1].acc_grads["w"].tolist() == mean.tolist()


def test_accumulated_gradients_that_their_dtype_cannot_hold():
  params = {"w": jnp.zeros(3, jnp.float16)}
  tx = optax.MultiSteps(zenjax.zen_sync("data", sparse=True), 4)
  one, two = (
    zenjax.init_state(tx, params, runners.mesh(n), "data") for n in (1, 2)
  )

  def moved(value):
    full = one._replace(acc_grads={"w": np.full(3, value, np.float16)})
    return zenjax.from_checkpoint(full, runners.mesh(2), "data", like=two)

  with pytest.raises(ValueError, match="float16.*overflow"):
    moved(60_000)
  # What is no number waits as it is.
  assert np.isinf(moved(np.inf).acc_grads["w"]).sum() == 3


def test_accumulated_gradients_of_which_nothing_is_known():
  tx = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  host = accumulating(tx, 4, 3, local(4))
  mesh = runners.mesh(2)
  with refused(ValueError, "`like`", "zenjax.init_state", "MultiSteps"):
    zenjax.from_checkpoint(host, mesh, "data")
  like = accumulating(tx, 2, 0, local(2))
  nothing = jax.tree.map(np.zeros_like, local(4))
  state = accumulating(tx, 4, 0, nothing)
  moved = zenjax.from_checkpoint(state, mesh, "data", like=like)
  assert moved.acc_grads["table"].shape == (10, 2)
  assert not np.any(moved.acc_grads["table"])


def test_placed_gradients_tell_of_how_many_devices_they_are():
  tx: Any = optax.MultiSteps(optax.chain(zenjax.zen_sync("data")), 2)
  params = {"w": jnp.zeros((8, 2))}
  state = zenjax.init_state(tx, params, runners.mesh(4), "data")
  moved = zenjax.from_checkpoint(state, runners.mesh(2), "data")
  assert moved.acc_grads["w"].shape == (16, 2)


def test_like_of_other_transformations():
  tx = optax.chain(SYNCS["micro"], optax.sgd(0.1))
  state = zenjax.init_state(tx, {"w": jnp.zeros(30)}, runners.mesh(4), "data")
  with refused(ValueError, "`like`", "for the same `tx`"):
    zenjax.from_checkpoint(state, runners.mesh(2), "data", like=())


@pytest.mark.parametrize(
  "tx",
  [
    optax.chain(zenjax.zen_sync("data"), optax.adagrad(0.1)),
    zenjax.sharded_optimizer(optax.adagrad(0.1), "data", mesh=runners.mesh(4)),
  ],
  ids=["zen_sync", "sharded_optimizer"],
)
def test_the_state_of_an_nnx_optimizer_moves(tx):
  """There each array of a state is inside of a variable."""
  net = nnx.Embed(4096, 8, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
  saved = zenjax.to_checkpoint(optimizer.opt_state)
  optimizer.opt_state = zenjax.from_checkpoint(saved, runners.mesh(2), "data")
  _, state = nnx.split(optimizer)
  nnx.update(optimizer, state)
  assert zenjax.stats(optimizer.opt_state) == {}

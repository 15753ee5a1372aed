"""Gradients must reach a sum over devices as each device took them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax import SparseRows

pytestmark = [
  pytest.mark.each_jax,
  pytest.mark.usefixtures("as_optax_computes"),
]

PARAMS = {"table": jnp.ones((600, 32)), "bias": jnp.ones(3)}
SYNC = zenjax.zen_sync("data")
AFTER = optax.scale(-1.0)

# In what a `ValueError` must hold.
REFUSED = {
  "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), SYNC),
  "scale_by_adam": optax.chain(optax.scale_by_adam(), SYNC, AFTER),
  "last": optax.chain(optax.adam(0.1), SYNC),
  "clip": optax.chain(optax.clip(1.0), SYNC),
  "zero_nans": optax.chain(optax.zero_nans(), SYNC),
  "nested": optax.chain(optax.chain(optax.scale(2.0), optax.clip(1.0)), SYNC),
  "outer": optax.chain(optax.clip(1.0), optax.chain(AFTER, SYNC), AFTER),
  "masked": optax.chain(
    optax.clip(1.0), optax.masked(SYNC, {"table": True, "bias": False})
  ),
  "named": optax.named_chain(("a", optax.clip(1.0)), ("b", SYNC)),
  "trace": optax.chain(optax.trace(0.9), SYNC),
  "owners": optax.chain(
    optax.clip(1.0), zenjax.sharded_optimizer(optax.sgd(0.1), "data")
  ),
  "apply_if_finite": optax.apply_if_finite(optax.chain(SYNC, AFTER), 3),
  "skip_not_finite": optax.MultiSteps(
    optax.chain(SYNC, AFTER), 2, should_skip_update_fn=optax.skip_not_finite
  ).gradient_transformation(),
  "owners not finite": optax.apply_if_finite(
    zenjax.sharded_optimizer(optax.sgd(0.1), "data"), 3
  ),
  "sparsifier": optax.chain(
    optax.clip(1.0), zenjax.sparsify.micro("data", 0.1)
  ),
  "sparsifier not finite": optax.apply_if_finite(
    optax.chain(zenjax.sparsify.micro("data", 0.1), AFTER), 3
  ),
  "sum": optax.chain(
    optax.add_decayed_weights(0.1), zenjax.zen_sync("data", op="sum")
  ),
}
MESSAGES = {
  "last": "stands after `scale_by_adam`",
  "nested": "stands after `clip`",
  "outer": "stands after `clip`",
  "masked": "stands after `clip`",
  "named": "stands after `clip`",
  "trace": "stands after `trace`, which keeps a state",
  "owners": r"`clip` inside: `zenjax.sharded_optimizer\(optax.chain\(",
  "apply_if_finite": "must not stand inside `optax.apply_if_finite`",
  "skip_not_finite": "should_skip_update_fn=skip_not_finite",
  "owners not finite": r"zenjax.sharded_optimizer\(optax.apply_if_finite\(",
  "sparsifier": "`micro` must be given",
  "sparsifier not finite": "`micro` must not stand inside",
  "sum": "which a sum counts once for each",
}
TAKEN = {
  "decay": optax.add_decayed_weights(0.1),
  "scale": optax.scale(0.5),
  "schedule": optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 5)),
  "centralize": optax.centralize(),
  "freeze": optax.masked(optax.set_to_zero(), {"table": False, "bias": True}),
  "rate": optax.inject_hyperparams(optax.scale)(0.5),
  "nothing": optax.identity(),
  "barrier": optax.stateless(lambda x, _: jax.lax.optimization_barrier(x)),
}


def updates_of(tx, grads):
  """Of two devices, by `vmap` with an axis name."""
  make = lambda _: tx.init(PARAMS)
  state = jax.vmap(make, axis_name="data")(jnp.arange(2))
  both = lambda g, s: tx.update(g, s, PARAMS)[0]
  return jax.eval_shape(jax.vmap(both, axis_name="data"), grads, state)


def gradients():
  return jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_must_not_come_before_is_named(name):
  message = MESSAGES.get(name, f"stands after `{name}`, which is not linear")
  with pytest.raises(ValueError, match=message):
    updates_of(REFUSED[name], gradients())


def test_rows_are_not_clipped_before():
  tx = optax.chain(zenjax.rows.clip_by_global_norm(1.0), SYNC)
  rows = SparseRows(jnp.zeros(4, jnp.int32), jnp.ones((4, 32)), 600)
  both = jax.tree.map(lambda x: jnp.stack([x, x]), rows)
  with pytest.raises(ValueError, match="stands after `clip_by_global_norm`"):
    updates_of(tx, {"table": both, "bias": jnp.ones((2, 3))})


@pytest.mark.usually("decay", "centralize", "nothing")
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_linear_may_come_before(name):
  """It gives what it gives after."""
  grads = gradients()

  def trained(tx):
    state = tx.init(PARAMS)
    both = lambda g: tx.update(g, state, PARAMS)[0]
    return jax.jit(jax.vmap(both, axis_name="data"))(grads)

  got = trained(optax.chain(TAKEN[name], SYNC))
  want = trained(optax.chain(SYNC, TAKEN[name]))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want
  )


def test_sums_and_sparsifiers_of_some_leaves_come_before():
  table = {"table": True, "bias": False}
  rest = {"table": False, "bias": True}
  both = optax.chain(optax.masked(SYNC, table), optax.masked(SYNC, rest), AFTER)
  shapes = jax.tree.map(jnp.shape, gradients())
  assert jax.tree.map(jnp.shape, updates_of(both, gradients())) == shapes
  keep = zenjax.sparsify.error_feedback(zenjax.sparsify.top_k(0.01), "data")
  unit = zenjax.zen_sync("data", unit="element")
  some = optax.chain(optax.masked(keep, table), unit)
  assert jax.tree.map(jnp.shape, updates_of(some, gradients())) == shapes


def test_sums_over_two_axes_and_sparsifiers_come_before():
  tx = optax.chain(zenjax.zen_sync("model"), SYNC)
  state = jax.eval_shape(tx.init, PARAMS)
  both = lambda g, s: tx.update(g, s, PARAMS)[0]
  for axis in ("data", "model"):
    both = jax.vmap(both, in_axes=(0, None), axis_name=axis)
  grads = jax.tree.map(lambda x: jnp.ones((2, 2, *x.shape)), PARAMS)
  made = jax.eval_shape(both, grads, state)
  assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, grads)
  keep = zenjax.sparsify.error_feedback(zenjax.sparsify.top_k(0.01), "data")
  tx = optax.chain(keep, zenjax.zen_sync("data", unit="element"), AFTER)
  updates_of(tx, gradients())

"""What `error_feedback` and its selections refuse, and in which words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import names
import runners

import zenjax

# What types forbid is asked of it too.
API: Any = zenjax.sparsify
TOP = zenjax.sparsify.top_k(0.5)
TOP_ONE = zenjax.sparsify.top_k(1, sparse=True)
TOP_ALL = zenjax.sparsify.top_k(0.5, sparse=True)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: API.top_k(0), ["`density`", "(0, 1]", "0"]),
    (lambda: API.top_k(1.5), ["`density`", "(0, 1]", "1.5"]),
    (
      lambda: API.top_k(float("nan"), method="sampled"),
      ["`density`", "nan"],
    ),
    (
      lambda: API.top_k(lambda _: 0.1),
      ["`density`", "'exact'", "'sampled'"],
    ),
    (
      lambda: API.top_k(0.1, method="sort"),
      ["`method`", "'exact'", "'sort'"],
    ),
    (lambda: API.random_k("1%"), ["`density`", "'1%'"]),
    (lambda: API.random_k(lambda _: 0.1), ["`density`", "(0, 1]"]),
    (lambda: API.random_k(0.1, seed=-1), ["`seed`", "-1"]),
    (lambda: API.random_k(0.1, apart=3), ["`axis_name`", "3"]),
    (lambda: API.threshold(-1.0), ["`value`", "-1.0", "top_k"]),
    (lambda: API.threshold(np.inf), ["`value`", "inf"]),
    (lambda: API.error_feedback(TOP, ()), ["`axis_name`"]),
    (
      lambda: API.error_feedback(TOP, "data", momentum=1.0),
      ["`momentum`", "[0, 1)", "1.0"],
    ),
    (
      lambda: API.error_feedback(TOP, "data", clip_norm=0.0),
      ["`clip_norm`", "positive", "0.0"],
    ),
    (
      lambda: API.error_feedback(TOP, "data", nesterov=True),
      ["`nesterov`", "`momentum`"],
    ),
    (
      lambda: API.error_feedback(TOP, "data", wire_dtype=jnp.float8_e5m2),
      ["`wire_dtype`", "bfloat16", "float8_e5m2"],
    ),
  ],
)
def test_arguments_out_of_range(make, words):
  with pytest.raises(ValueError) as error:
    make()
  names(error, *words)


def test_a_percentage_given_as_a_density():
  with pytest.warns(UserWarning, match=r"`density` of top_k is 1.*give 0\.01"):
    TOP_ONE.init(jnp.zeros(20_000))


def test_around_something_else():
  with pytest.raises(TypeError) as error:
    zenjax.sparsify.error_feedback(optax.sgd(0.1), "data")
  names(error, "`inner`", "zenjax.sparsify.top_k", "GradientTransformation")


def trace(tx, gradient, state=None, n=2):
  """Traces a step; nothing is compiled."""

  def step(gradient):
    return tx.update(gradient, state or tx.init(gradient))

  stack = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), gradient
  )
  return jax.eval_shape(jax.vmap(step, axis_name="data"), stack)


def test_states_of_others():
  tx = zenjax.sparsify.error_feedback(
    zenjax.sparsify.top_k(0.5, sparse=True), "data"
  )
  with pytest.raises(ValueError) as error:
    tx.init(jnp.zeros(8))
  words = "zenjax.init_state(tx, params, mesh, 'data')", "`TrainState("
  names(error, "`error_feedback`", *words)
  made = zenjax.init_state(tx, {"w": jnp.zeros(8)}, runners.mesh(2), "data")
  for gradient, state, words in [
    (jnp.zeros(8), made, ["leaf 'w'", "(2, 8)", "state_specs"]),
    (jnp.zeros(9), made, ["leaf 'w'", "(1, 9)"]),
    (jnp.zeros(8), made._replace(leaves={}), ["leaf 'w'", "nothing"]),
  ]:
    with pytest.raises(ValueError) as error:
      trace(tx, {"w": gradient}, state)
    names(error, "`state`", "zenjax.init_state", *words)


def test_a_state_without_the_momentum_that_is_asked_for():
  made = zenjax.init_state(
    zenjax.sparsify.error_feedback(TOP_ALL, "data"),
    jnp.zeros(8),
    runners.mesh(1),
    "data",
  )
  tx = zenjax.sparsify.error_feedback(TOP_ALL, "data", momentum=0.9)
  with pytest.raises(ValueError) as error:
    trace(tx, jnp.zeros(8), made, n=1)
  names(error, "`state`", "zenjax.init_state", "momentum", "(1, 8)")


def test_numbers_of_numpy_are_densities():
  gradient = jnp.array([1.0, -5.0, 2.0, 0.0])
  tx = API.top_k(np.float32(0.25), sparse=True)
  update, _ = tx.update(gradient, tx.init(gradient))
  assert np.asarray(update).tolist() == [0, -5, 0, 0]


def test_statistics_of_no_sparsifier():
  with pytest.raises(ValueError) as error:
    zenjax.stats((optax.EmptyState(),))
  names(error, "`state`", "`zen_sync`", "tuple", "error_feedback")


def test_gradients_that_multi_steps_accumulates():
  tx = optax.MultiSteps(optax.chain(EF(), ZEN()), 2)
  state = zenjax.init_state(tx, jnp.zeros(33_000), runners.mesh(2), "data")
  leaf = state.inner_opt_state[0].leaves["leaf"]
  shapes = [x.shape for x in (leaf.residual, leaf.selected, leaf.wanted)]
  assert shapes == [(2, 33_000), (2,), ()]
  assert state.acc_grads.shape == (66_000,)


def test_rows_that_are_to_be_selected_from():
  rows = zenjax.SparseRows(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3)), 4)
  tx: Any = zenjax.sparsify.top_k(0.5, sparse=True)
  with pytest.raises(TypeError) as error:
    tx.update({"t": rows}, tx.init({"t": jnp.zeros((4, 3))}))
  names(error, "`updates`", "SparseRows", "'t'", "`sparse`")


EF = lambda axis="data": zenjax.sparsify.error_feedback(
  zenjax.sparsify.top_k(0.1), axis
)
ZEN = lambda axis="data": zenjax.zen_sync(axis, unit="element")


def made(*transforms, axes=("data",)):
  devices = np.array(jax.devices()[: 2 ** len(axes)])
  mesh = jax.sharding.Mesh(devices.reshape([2] * len(axes)), axes)
  params = {"a": jnp.zeros(33_000), "b": jnp.zeros((3, 3))}
  return zenjax.init_state(optax.chain(*transforms), params, mesh, axes)


@pytest.mark.parametrize(
  ("transforms", "axes"),
  [
    ((EF(), ZEN(), optax.sgd(0.1)), ("data",)),
    # Between two axes: inside a host first.
    ((ZEN("device"), EF("host"), ZEN("host")), ("host", "device")),
  ],
)
def test_each_device_has_a_residual(transforms, axes):
  state = made(*transforms, axes=axes)
  sizes = [x.shape for x in jax.tree.leaves(state)]
  assert any(s[1:] == (33_000,) and s[0] > 1 for s in sizes if s), sizes

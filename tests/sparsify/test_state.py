"""Sparsifiers' states: what is told of them, saved, accumulated around them."""

import functools
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import optax
import pytest
from refusals import names
import runners
import sparsifier_models as models

import zenjax

N = 4
SIZE = 1_000
STEPS = 6


def draws(steps: int = STEPS) -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.laplace(size=(steps, N, SIZE)).astype(np.float32)


def stepper(tx, mesh, axes: Any = "data"):
  """`(state, gradients [N, SIZE]) -> (update, state)` on the mesh."""

  def step(state, gradients):
    _, state = state
    return tx.update(gradients[0], state), ()

  mapped = jax.jit(zenjax.data_parallel(step, mesh, axes))
  return lambda state, g: mapped((jnp.zeros(SIZE), state), g)[0]


def made(tx, mesh, axes: Any = "data"):
  return zenjax.init_state(tx, jnp.zeros(SIZE), mesh, axes)


@pytest.fixture(scope="module")
def after():
  """The state after some steps of `micro`, and what each selected at most."""
  tx, mesh = zenjax.sparsify.micro("data", 0.05, capacity=8), runners.mesh(N)
  state, most = made(tx, mesh), []
  step = stepper(tx, mesh)
  for gradients in draws():
    _, state = step(state, gradients)
    most.append(int(state.counts.max()))
  return state, most


def test_before_the_first_step_there_is_nothing_to_tell():
  state = made(zenjax.sparsify.micro("data", 0.05), runners.mesh(N))
  assert zenjax.report((state,)) == "sparsifier: no step was taken yet."
  assert zenjax.stats((state,)) == {}


def test_several_sparsifiers_are_told_apart():
  each = [zenjax.sparsify.micro("data", density) for density in (0.25, 0.5)]
  tx = optax.multi_transform(dict(enumerate(each)), {"a": 0, "b": 1})
  params = {"a": jnp.zeros(8), "b": jnp.zeros(8)}

  def step(gradients):
    return tx.update(gradients, tx.init(gradients))[1]

  state = jax.jit(jax.vmap(step, axis_name="data"))(
    jax.tree.map(lambda x: jnp.arange(16.0).reshape(2, 8), params)
  )
  told = zenjax.stats(jax.tree.map(lambda x: x[0], state))
  wanted = {name: stats["density_wanted"] for name, stats in told.items()}
  assert wanted == {"sparsifier": 0.25, "sparsifier 2": 0.5}


def test_a_sparsifier_of_no_leaf():
  tx = zenjax.sparsify.micro("data", 0.5)
  with pytest.raises(ValueError) as error:
    jax.vmap(lambda _: tx.init({}), axis_name="data")(jnp.zeros(2))
  names(error, "`params`", "micro", "optax.partition")


def test_stats_of_the_last_step(after):
  state, most = after
  stats = zenjax.stats((state, optax.EmptyState()))["sparsifier"]
  count = int(state.counts.sum())
  assert stats["density_wanted"] == pytest.approx(0.05)
  assert stats["density"] == pytest.approx(count / SIZE)
  assert stats["build_up"] == pytest.approx(count / 50)
  assert stats["imbalance"] == pytest.approx(N * most[-1] / count)
  assert stats["rounds"] == -(-most[-1] // 8) and stats["devices"] == N
  assert stats["dense_bytes"] == 2 * 3 / 4 * SIZE * 4
  assert stats["steps"] == STEPS
  # The second largest of six would hold no more than four of five.
  assert stats["capacity"] == max(most)


def test_what_is_pinned_holds_the_usual_selection(after):
  """Nine of ten steps, of the last 64 alone."""
  state, _ = after
  needs = np.arange(64, dtype=np.int32)[::-1]
  old = state._replace(step=np.int32(1_000), fullest=needs)
  assert zenjax.stats(old)["sparsifier"]["capacity"] == 57


def test_report_shows_every_number(after):
  state, most = after
  title, headings, row, *legend = zenjax.report(state).splitlines()
  assert title == f"sparsifier after {STEPS} steps on {N} devices"
  assert headings.split()[:3] == ["wanted", "density", "threshold"]
  cells = row.split()
  assert cells[:2] == ["sparsifier", "5.000%"]
  assert cells[2] == f"{float(state.stats.density):.3%}"
  assert cells[-1] == str(max(most)) and "fewer" in cells
  assert "`capacity=`" in " ".join(legend)


@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
def test_a_tuple_of_axes(wire):
  """Ranks count from the slowest axis on, as everywhere."""
  devices = np.array(jax.devices()[:N]).reshape(2, 2)
  axes = ("host", "device")
  mesh = jax.sharding.Mesh(devices, axes)
  options: dict[str, Any] = dict(start=2.0, wire_dtype=wire)
  float32: Any = np.float32
  tx = zenjax.sparsify.micro(
    axes, 0.05, controller="paper", capacity=9, **options
  )
  model = models.Micro(SIZE, N, 0.05, threshold_dtype=float32, **options)
  step, state = stepper(tx, mesh, axes), made(tx, mesh, axes)
  for gradients in np.round(draws() * 2**10) / np.float32(2**10):
    update, state = step(state, gradients)
    want = model.step(gradients)
    np.testing.assert_array_equal(state.residual, want["residuals"])
    np.testing.assert_allclose(update, want["updates"], atol=1e-6)


def test_inside_multi_steps():
  """Means of local gradients go in; no gradient is lost."""
  tx, mesh = zenjax.sparsify.micro("data", 0.05), runners.mesh(N)
  often: Any = optax.MultiSteps(tx, every_k_schedule=2)
  step, state = stepper(often, mesh), made(often, mesh)
  total = np.zeros(SIZE)
  for t, gradients in enumerate(draws()):
    with jax.numpy_dtype_promotion("standard"):  # As optax computes.
      update, state = step(state, gradients)
    assert bool(np.any(update)) == (t % 2 == 1)
    total += N * np.asarray(update, np.float64)
  residual = np.asarray(state.inner_opt_state.residual, np.float64)
  kept = residual.sum(axis=0)
  want = draws().sum(axis=(0, 1), dtype=np.float64) / 2
  np.testing.assert_allclose(total + kept, want, atol=1e-5)
  assert zenjax.stats(state)["sparsifier"]["steps"] == STEPS / 2


@pytest.mark.parametrize(
  "make", [zenjax.sparsify.micro, zenjax.sparsify.exdyna]
)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(make):
  size = 32_768 if make is zenjax.sparsify.exdyna else SIZE
  tx, mesh = make("data", 0.01), runners.mesh(N)
  gradients = np.resize(draws(), (STEPS, N, size))
  gradients = gradients * np.linspace(1, 2, size, dtype=np.float32)
  params = jnp.zeros(size)

  def step(state, g):
    _, state = state
    return tx.update(g[0], state), ()

  step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  state = zenjax.init_state(tx, params, mesh, "data")
  for g in gradients[:3]:
    (_, state), _ = step((params, state), g)
  saved = flax.serialization.to_bytes(jax.device_get(state))
  fresh = zenjax.init_state(tx, params, mesh, "data")
  restored = flax.serialization.from_bytes(jax.device_get(fresh), saved)
  specs = zenjax.state_specs(restored, "data")
  other = jax.tree.map(
    lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
    restored,
    specs,
  )
  for g in gradients[3:]:
    (one, state), _ = step((params, state), g)
    (two, other), _ = step((params, other), g)
    np.testing.assert_array_equal(one, two)
  jax.tree.map(np.testing.assert_array_equal, state, other)


OTHERS = {
  "names": lambda: {"a": jnp.zeros((4, 100)), "c": jnp.zeros(600)},
  "order": lambda: {"b": jnp.zeros((4, 100)), "a": jnp.zeros(600)},
  "shapes": lambda: {"a": jnp.zeros((100, 4)), "b": jnp.zeros(600)},
  "a dimension more": lambda: {
    "a": jnp.zeros((4, 100)),
    "b": jnp.zeros((600, 1)),
  },
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_residual_of_another_tree_of_as_many_elements(other):
  tx: Any = zenjax.sparsify.micro("data", 0.05)
  own = {"a": jnp.zeros((4, 100)), "b": jnp.zeros(600)}
  params = OTHERS[other]()

  @jax.jit
  def made():
    both = lambda _: (tx.init(own), tx.init(params))
    return jax.vmap(both, axis_name="data")(jnp.zeros(N))

  state, wrong = made()
  assert state.residual.shape == wrong.residual.shape
  update = jax.vmap(tx.update, (None, 0), axis_name="data")
  step = functools.partial(jax.eval_shape, update)
  _, after = step(own, state)
  assert after.tree.keys() == state.tree.keys()
  with pytest.raises(ValueError) as error:
    step(own, wrong)
  (have,), (want,) = wrong.tree, state.tree
  names(error, "`state`", "1000 elements", have, want, "zenjax.init_state")
  with pytest.raises(ValueError, match="keys"):
    flax.serialization.from_bytes(state, flax.serialization.to_bytes(wrong))


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_state_of_the_other_op(op):
  """What waits would be applied with another weight."""
  other = {"mean": "sum", "sum": "mean"}[op]
  params, tx = jnp.zeros(SIZE), zenjax.sparsify.micro("data", 0.05, op=op)
  init = lambda tx: jax.vmap(lambda _: tx.init(params), axis_name="data")
  shapes = lambda tx: jax.jit(init(tx))(jnp.zeros(N))
  state, wrong = (
    shapes(tx),
    shapes(zenjax.sparsify.micro("data", 0.05, op=other)),
  )
  step = jax.vmap(tx.update, (None, 0), axis_name="data")
  _, after = jax.eval_shape(step, params, state)
  assert after.op.keys() == state.op.keys() == {op}
  with pytest.raises(ValueError) as error:
    jax.eval_shape(step, params, wrong)
  names(
    error, "`op`", "micro", f"op={op!r}", f"op={other!r}", "zenjax.init_state"
  )
  with pytest.raises(ValueError, match="keys"):
    flax.serialization.from_bytes(state, flax.serialization.to_bytes(wrong))

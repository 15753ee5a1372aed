"""`exdyna` and `micro` as users meet them: trees, dtypes, bad input."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import pytest
from refusals import names
import runners
import sparsifier_models as models

import zenjax

N = 2
STEPS = 5
SIZE = 1_000


def draws(seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.laplace(size=(STEPS, N, SIZE)).astype(np.float32)


def tree(flat):
  """Leaves of `[..., SIZE]`: what follows it is seen in one order."""
  lead = flat.shape[:-1]
  return {
    "a": flat[..., :600].reshape(*lead, 20, 30),
    "b": [flat[..., 600:999], flat[..., 999]],
  }


def flat(tree, lead: int = 0):
  leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
  return np.concatenate(
    [x.reshape(*x.shape[:lead], -1) for x in leaves], axis=-1
  )


def by_shard_map(tx, gradients, check_vma: bool):
  mesh = runners.mesh(N)
  state = zenjax.init_state(tx, tree(gradients[0, 0]), mesh, "data")
  specs = zenjax.state_specs(state, "data")

  def step(gradients, state):
    return tx.update(jax.tree.map(lambda g: g[0], gradients), state)

  mapped: Any = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P("data"), specs),
      out_specs=(P(), specs),
      check_vma=check_vma,
    )
  )
  for t in range(STEPS):
    updates, state = mapped(tree(gradients[t]), state)
    copies = jax.tree.map(lambda x: runners.shards(x), updates)
    assert all((x[0] == x[1]).all() for x in jax.tree.leaves(copies))
    yield updates, state.residual, state.threshold
  assert mapped._cache_size() == 1


def by_pmap(tx, gradients):
  devices = jax.devices()[:N]
  params = tree(jnp.asarray(gradients[0]))
  state = jax.pmap(tx.init, "data", devices=devices)(params)
  step = jax.pmap(tx.update, "data", devices=devices)
  for t in range(STEPS):
    updates, state = step(tree(jnp.asarray(gradients[t])), state)
    assert all((x[0] == x[1]).all() for x in jax.tree.leaves(updates))
    first = jax.tree.map(lambda x: x[0], updates)
    yield first, state.residual[:, 0], state.threshold[0]


RUNNERS = {
  "shard_map": lambda *a: by_shard_map(*a, check_vma=False),
  "shard_map_vma": lambda *a: by_shard_map(*a, check_vma=True),
  "pmap": by_pmap,
}


@pytest.mark.parametrize("run", RUNNERS.values(), ids=RUNNERS)
def test_every_runner_takes_the_same_steps(run):
  tx = zenjax.sparsify.micro(
    "data", 0.05, controller="paper", start=2.0, capacity=9
  )
  options: dict[str, Any] = dict(start=2.0, threshold_dtype=np.float32)
  model = models.Micro(SIZE, N, 0.05, **options)
  gradients = draws()
  steps = zip(gradients, run(tx, gradients), strict=True)
  for local, (updates, residual, threshold) in steps:
    want = model.step(local)
    assert threshold == want["threshold"]
    np.testing.assert_array_equal(residual, want["residuals"])
    np.testing.assert_allclose(flat(updates), want["updates"], atol=1e-6)
    shapes = jax.tree.map(np.shape, tree(local[0]))
    assert jax.tree.map(np.shape, updates) == shapes


def by_vmap(tx, gradients):
  """`[t, n, ...]` of all updates and states."""

  def train(gradients):
    step = lambda state, g: tx.update(g, state)[::-1]
    both = lambda state, g: (lambda s, u: (s, (u, s)))(*step(state, g))
    first = jax.tree.map(lambda x: x[0], gradients)
    return jax.lax.scan(both, tx.init(first), gradients)[1]

  mapped = jax.vmap(train, in_axes=1, out_axes=1, axis_name="data")
  return jax.jit(mapped)(gradients)


def test_the_published_blocks_and_a_sample_of_the_vector():
  rng = np.random.default_rng(0)
  gradients = rng.laplace(size=(3, 3, 50_000)).astype(np.float32)
  tx = zenjax.sparsify.exdyna("data", 0.02)
  updates, state = by_vmap(tx, jnp.asarray(gradients))
  options: dict[str, Any] = dict(controller="damped", start=1.0)
  model = models.ExDyna(50_000, 3, 0.02, force_one=False, **options)
  # Each of the first steps samples a threshold; the model takes ours.
  model.threshold.update = lambda count: None
  for t in range(3):
    model.threshold.value = state.threshold[t, 0]
    want = model.step(gradients[t])
    blocks = np.diff(want["partitions"])[:-1] // 32
    assert state.parts[t, 0, :-1].tolist() == blocks.tolist()
    np.testing.assert_array_equal(state.residual[t, :, 0], want["residuals"])
    np.testing.assert_allclose(updates[t, 1], want["updates"], atol=1e-6)
  assert state.stats.build_up[0, 0] == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("residual_dtype", [None, jnp.float32])
def test_leaves_of_16_bits(residual_dtype):
  gradients = draws().astype(ml_dtypes.bfloat16)
  tx = zenjax.sparsify.micro(
    "data", 0.05, controller="paper", start=2.0, residual_dtype=residual_dtype
  )
  updates, state = by_vmap(tx, jnp.asarray(gradients))
  dtype = residual_dtype or ml_dtypes.bfloat16
  options: dict[str, Any] = dict(
    start=2.0, threshold_dtype=np.float32, dtype=dtype
  )
  model = models.Micro(SIZE, N, 0.05, **options)
  assert updates.dtype == jnp.bfloat16 and state.residual.dtype == dtype
  for t, local in enumerate(gradients):
    want = model.step(local)
    residual = np.asarray(state.residual[t, :, 0])
    np.testing.assert_array_equal(residual, want["residuals"])
    update = np.asarray(updates[t, 0]).astype(np.float64)
    np.testing.assert_allclose(update, want["updates"], rtol=2**-8)


def test_leaves_of_several_dtypes_come_back_in_their_own():
  tx = zenjax.sparsify.micro("data", 0.1, op="sum")
  gradients = {
    "half": jnp.ones((1, N, 40), jnp.bfloat16),
    "none": jnp.ones((1, N, 0, 3)),
    "whole": jnp.full((1, N, 60), 2.0),
  }
  updates, state = by_vmap(tx, gradients)
  assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(
    lambda x: x.dtype, gradients
  )
  # Sixty are as large as the tenth largest, and each device sends its part.
  assert 10 <= (updates["whole"][0, 0] == 4).sum() < 10 + N
  assert not updates["half"].any()
  assert state.residual.dtype == jnp.float32


def trace(tx, size=SIZE, n=N, state=None):
  """Traces a step on `n` devices; nothing is compiled."""
  gradient = jax.ShapeDtypeStruct((n, size), jnp.float32)

  def step(gradient):
    return tx.update(gradient, state or tx.init(gradient))

  return jax.eval_shape(jax.vmap(step, axis_name="data"), gradient)


@pytest.mark.parametrize(
  ("arguments", "options", "words"),
  [
    ((0,), {}, ["`density`", "(0, 1]", "0"]),
    ((1.5,), {}, ["`density`", "(0, 1]", "1.5"]),
    ((-0.1,), {}, ["`density`", "(0, 1]", "-0.1"]),
    ((float("nan"),), {}, ["`density`", "(0, 1]", "nan"]),
    (("1%",), {}, ["`density`", "(0, 1]", "'1%'"]),
    ((0.1,), {"controller": "pid"}, ["`controller`", "'damped'", "'pid'"]),
    ((0.1,), {"start": 0.0}, ["`start`", "positive", "0.0"]),
    ((0.1,), {"start": np.inf}, ["`start`", "positive", "inf"]),
    ((0.1,), {"capacity": 0}, ["`capacity`", "positive", "0"]),
    ((0.1,), {"op": "max"}, ["`op`", "'mean'", "'max'"]),
    ((0.1,), {"wire_dtype": "int8"}, ["`wire_dtype`", "floating", "'int8'"]),
  ],
)
def test_arguments_out_of_range(arguments, options, words):
  kind = TypeError if "wire_dtype" in options else ValueError
  for make in (zenjax.sparsify.exdyna, zenjax.sparsify.micro):
    with pytest.raises(kind) as error:
      make("data", *arguments, **options)
    names(error, *words)


@pytest.mark.parametrize(
  ("tx", "size", "n", "words"),
  [
    (
      zenjax.sparsify.micro("data", 1e-4),
      9_999,
      2,
      ["`density`", "9999", "0.0001"],
    ),
    (
      zenjax.sparsify.micro("data", 1.0),
      3,
      4,
      ["`params`", "3", "4", "zen_sync"],
    ),
    (
      zenjax.sparsify.exdyna("data", 0.1),
      32_767,
      2,
      ["`params`", "32768", "micro"],
    ),
    (
      zenjax.sparsify.exdyna("data", 0.1),
      40_000,
      1_025,
      ["`axis_name`", "1024", "1025"],
    ),
    (
      zenjax.sparsify.micro("data", 0.1),
      2**31,
      2,
      ["`params`", "2**31", "optax.partition"],
    ),
  ],
)
def test_models_of_a_size_that_does_not_fit(tx, size, n, words):
  with pytest.raises(ValueError) as error:
    trace(tx, size, n)
  names(error, *words)


def test_a_state_that_was_not_made_by_init():
  tx = zenjax.sparsify.micro("data", 0.1)
  with pytest.raises(ValueError) as error:
    tx.init(jnp.zeros(SIZE))
  names(error, "`micro`", "zenjax.init_state(tx, params, mesh, 'data')")
  made = zenjax.init_state(tx, jnp.zeros(SIZE), runners.mesh(N), "data")
  local = made._replace(residual=made.residual[:1])
  trace(tx, state=local)
  for state, words in [
    (made, ["(2, 1000)", "(1, 1000)", "zenjax.state_specs"]),
    (local._replace(residual=made.residual[:1, :9]), ["(1, 9)", "(1, 1000)"]),
    (local._replace(parts=made.parts[:1]), ["2 devices", "for 1"]),
  ]:
    with pytest.raises(ValueError) as error:
      trace(tx, state=state)
    names(error, "`state`", "zenjax.init_state", *words)


def test_leaves_that_are_no_floating_arrays():
  tx = zenjax.sparsify.micro("data", 0.5)
  rows = zenjax.SparseRows(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3)), 4)
  for leaf, word in [(jnp.zeros(8, jnp.int32), "int32"), (rows, "SparseRows")]:
    with pytest.raises(TypeError) as error:
      tx.init({"w": jnp.zeros(8), "t": leaf})
    names(error, "`params`", "'t'", word, "zenjax.zen_sync")


@pytest.mark.parametrize(
  "tx",
  [
    zenjax.sparsify.micro("data", 0.5),
    zenjax.sparsify.error_feedback(
      zenjax.sparsify.top_k(0.5, sparse=True), "data"
    ),
  ],
)
def test_a_gradient_that_autodiff_has_summed(tx):
  def step(w):
    return tx.update(w, tx.init(w))[0]

  mapped = jax.shard_map(
    step, mesh=runners.mesh(N), in_specs=P(), out_specs=P()
  )
  with pytest.raises(ValueError) as error:
    jax.eval_shape(mapped, jnp.zeros(8))
  names(error, "`updates`", "zenjax.unreduced")


def placed_alike(one, other):
  assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.parametrize("devices", [1, 4])
def test_residuals_on_another_number_of_devices(devices):
  """The steps of a model that begins with what was kept."""
  tx = zenjax.sparsify.micro("data", 0.05, controller="paper", start=2.0)
  gradients = draws()
  (*_, (_, residual, threshold)) = by_shard_map(tx, gradients, False)
  params = tree(gradients[0, 0])
  made = zenjax.init_state(tx, params, runners.mesh(N), "data")
  state = made._replace(
    step=made.step + STEPS, residual=residual, threshold=threshold
  )
  state = state._replace(drift=jnp.float32(-0.01))
  mesh = runners.mesh(devices)
  moved = zenjax.from_checkpoint(state, mesh, "data")
  assert moved.residual.shape == (devices, SIZE)
  np.testing.assert_allclose(
    np.mean(moved.residual, axis=0), np.mean(residual, axis=0), atol=1e-6
  )
  fresh = zenjax.init_state(tx, params, mesh, "data")
  assert moved.parts.tolist() == fresh.parts.tolist()
  assert moved.counts.tolist() == [0] * devices and moved.step == 0
  assert float(moved.threshold) == float(threshold)
  assert float(moved.drift) == float(state.drift) != 0
  # On one device `P("data")` and `P()` are two names of one placement.
  jax.tree.map(placed_alike, moved, fresh)

"""zen_sync among the transformations of optax, and its state."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax
import oracle
import pytest
import runners
import stablehlo
import steps
from transforms import make_params
from transforms import make_stack
from transforms import N
from transforms import sgd
from transforms import SPARSE
from transforms import TRANSFORMS
from transforms import zen
from transforms import zen_for

import zenjax


@pytest.mark.parametrize("name", TRANSFORMS)
def test_same_training_as_pmean(name):
  make = TRANSFORMS[name]
  ours, theirs = [
    steps.Trainer(make(sync), make_params(), runners.mesh(N))
    for sync in (zen_for, lambda _: steps.pmean("data"))
  ]
  for seed in range(4):
    stack = make_stack(seed)
    if "finite" in name and seed == 1:
      stack["user"]["embedding"][2, 5, 0] = np.nan
    got, want = ours(stack), theirs(stack)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      assert a.dtype == b.dtype
      oracle.check_replicas(a, name)
      # bfloat16 updates may differ by one rounding of a float32 sum.
      tolerance = 1e-5 if a.dtype == np.float32 else 1e-2
      np.testing.assert_allclose(
        a.astype(np.float64), b.astype(np.float64), tolerance, tolerance
      )
    ours.check_replicas()


def test_nothing_is_exchanged_between_multisteps():
  """Along two axes: what accumulates on each device is placed by both."""
  k, axes = 3, ("host", "device")
  sync = zenjax.zen_sync(axes, sparse=SPARSE)
  tx = steps.lenient(
    optax.MultiSteps(optax.chain(sync, sgd()), k).gradient_transformation()
  )
  mesh = Mesh(np.array(jax.devices()[:N]).reshape(2, 2), axes)
  trainer = steps.Trainer(tx, make_params(), mesh, axes)
  lowered = trainer.step.lower(
    trainer.params, trainer.state, trainer.place(make_stack(0))
  )
  found = stablehlo.collectives(lowered)
  assert found and all("stablehlo.case" in x.inside for x in found)

  stacks = [make_stack(seed) for seed in range(k)]
  for stack in stacks[:-1]:
    updates = trainer(stack)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
  accumulated = trainer.state.acc_grads["user"]["embedding"]
  local = runners.shards(accumulated).reshape(N, 300, 12)
  want = np.mean([s["user"]["embedding"] for s in stacks[:-1]], axis=0)
  np.testing.assert_allclose(local, want, rtol=1e-5, atol=1e-6)

  local = jax.tree.map(lambda *x: np.concatenate(x), *stacks)
  jax.tree.map(check_sgd, trainer(stacks[-1]), local)
  trainer.check_replicas()


def check_sgd(updates, local):
  """Updates of `sgd()` on every device, from the local gradients."""
  oracle.check_replicas(updates)
  rtol, atol = (1e-5, 1e-6) if updates.dtype == np.float32 else (1e-2, 1e-2)
  np.testing.assert_allclose(
    updates.astype(np.float64),
    np.broadcast_to(-0.1 * oracle.exact(local), updates.shape),
    rtol,
    atol,
  )


def test_init_is_abstract():
  """No axis, no mesh and no values are needed to know the state."""
  tx = optax.chain(zen(), sgd())
  params = make_params()
  abstract = jax.eval_shape(tx.init, params)
  for state in (
    tx.init(params),
    zenjax.init_state(tx, params, runners.mesh(N), "data"),
    tx.init(jax.eval_shape(lambda: params)),
  ):
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for a, b in zip(
      jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True
    ):
      assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_one_compilation_from_density_0_to_100_percent():
  """Dtypes, structure and the types of the state are kept."""
  tx = optax.chain(zen(), sgd())
  trainer = steps.Trainer(
    tx, make_params(), runners.mesh(N), check_vma=False, donate=True
  )
  before = jax.eval_shape(lambda: trainer.state)
  densities = (0.0, 0.01, 0.1, 0.5, 1.0, 1.0, 1.0, 0.1, 0.0)
  counts = []
  for step, density in enumerate(densities):
    stack = make_stack(step, density)
    with steps.compilations() as compiled:
      updates = trainer(stack)
    counts.append(len(compiled))
    assert jax.tree.structure(updates) == jax.tree.structure(stack)
    for got, local in zip(
      jax.tree.leaves(updates), jax.tree.leaves(stack), strict=True
    ):
      check_sgd(got, local)
      assert (got.shape, got.dtype) == (local.shape, local.dtype)
  assert counts == [1] + [0] * (len(densities) - 1)
  after = jax.eval_shape(lambda: trainer.state)
  assert jax.tree.structure(before) == jax.tree.structure(after)
  for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
  trainer.check_replicas()


def test_extra_arguments_pass_through():
  tx = optax.chain(zenjax.zen_sync("data", sparse=False), sgd())
  params = {"w": jnp.zeros(3)}
  run = runners.RUNNERS["vmap"](
    lambda g, _: tx.update(g, tx.init(params), params, value=jnp.ones(()))[0], N
  )
  stack = {"w": np.arange(3 * N, dtype=np.float32).reshape(N, 3)}
  check_sgd(run(stack)["w"], stack["w"])

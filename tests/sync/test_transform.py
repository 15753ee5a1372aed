"""zen_sync among the transformations of optax, and its state."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import oracle
import pytest
import runners
import steps
from transforms import make_params
from transforms import make_stack
from transforms import N
from transforms import sgd
from transforms import TRANSFORMS
from transforms import zen
from transforms import zen_for

import zenjax

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


@pytest.mark.usually("MultiSteps-True", "chain-True")
@pytest.mark.parametrize(
  ("name", "check_vma"),
  [
    (name, True)
    for name in TRANSFORMS
    if name not in ("adam", "masked")  # The others are as much.
  ]
  + [
    ("MultiSteps", False),
  ],
)
def test_same_training_as_pmean(name, check_vma):
  make = TRANSFORMS[name]
  ours = steps.Trainer(
    make(zen_for), make_params(), runners.mesh(N), check_vma=check_vma
  )
  theirs = steps.Trainer(
    make(lambda _: steps.pmean("data")),
    make_params(),
    runners.mesh(N),
    check_vma=check_vma,
  )
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


def test_a_nan_of_one_device_skips_the_step_everywhere():
  """Were the predicate local, devices would part ways and hang."""
  tx = TRANSFORMS["apply_if_finite after"](zen_for)
  trainer = steps.Trainer(tx, make_params(), runners.mesh(N), check_vma=False)
  stack = make_stack(0)
  stack["user"]["embedding"][1, 7, 3] = np.nan
  updates = trainer(stack)
  assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
  assert all(
    (leaf != 0).any() for leaf in jax.tree.leaves(trainer(make_stack(1)))
  )


@pytest.mark.usually("True")
@CHECK_VMA
def test_nothing_is_exchanged_between_multisteps(check_vma):
  k = 3
  tx = steps.lenient(
    optax.MultiSteps(optax.chain(zen(), sgd()), k).gradient_transformation()
  )
  trainer = steps.Trainer(
    tx, make_params(), runners.mesh(N), check_vma=check_vma
  )
  traced = trainer.step.trace(
    trainer.params, trainer.state, trainer.place(make_stack(0))
  )
  assert steps.collectives(traced.jaxpr.jaxpr)
  assert not steps.collectives_outside_cond(traced.jaxpr.jaxpr)

  stacks = [make_stack(seed) for seed in range(k)]
  for stack in stacks[:-1]:
    updates = trainer(stack)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
  accumulated = trainer.state.acc_grads["user"]["embedding"]
  local = runners.shards(accumulated).reshape(N, 300, 12)
  want = np.mean([s["user"]["embedding"] for s in stacks[:-1]], axis=0)
  np.testing.assert_allclose(local, want, rtol=1e-5, atol=1e-6)

  updates = trainer(stacks[-1])["user"]["embedding"]
  want = oracle.exact(np.concatenate([s["user"]["embedding"] for s in stacks]))
  want = np.broadcast_to(-0.1 * want, updates.shape)
  np.testing.assert_allclose(updates, want, rtol=1e-5, atol=1e-6)


def test_scan_over_steps():
  """Steps in one `lax.scan` are the steps taken one by one."""
  tx = optax.chain(zen(), sgd())
  stacks = [make_stack(seed) for seed in range(3)]
  start = steps.Trainer(tx, make_params(), runners.mesh(N))

  def body(params, state, batch):
    def step(carry, stack):
      params, state = carry
      grads = jax.tree.map(lambda x: x[0], stack)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), updates

    return lax.scan(step, (params, state), batch)

  run = jax.jit(
    jax.shard_map(
      body,
      mesh=start.mesh,
      in_specs=(P(), start.specs, P(None, "data")),
      out_specs=((P(), start.specs), P()),
    )
  )
  batch = jax.tree.map(lambda *leaves: np.stack(leaves), *stacks)
  (params, _), updates = run(start.params, start.state, batch)
  for leaf in jax.tree.leaves(params):
    oracle.check_replicas(runners.shards(leaf))
  for step, stack in enumerate(stacks):
    for got, local in zip(
      jax.tree.leaves(updates), jax.tree.leaves(stack), strict=True
    ):
      check_sgd(runners.shards(got)[:, step], local)


def check_sgd(updates, local):
  """Updates of `sgd()` on every device, from the local gradients."""
  oracle.check_replicas(updates)
  tolerance = 1e-5 if updates.dtype == np.float32 else 1e-2
  np.testing.assert_allclose(
    updates.astype(np.float64),
    np.broadcast_to(-0.1 * oracle.exact(local), updates.shape),
    tolerance,
    tolerance,
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


def test_dtypes_structure_and_state_are_kept():
  trainer = steps.Trainer(zen(), make_params(), runners.mesh(N))
  before = jax.eval_shape(lambda: trainer.state)
  stack = make_stack(0)
  updates = trainer(stack)
  assert jax.tree.structure(updates) == jax.tree.structure(stack)
  for a, b in zip(
    jax.tree.leaves(updates), jax.tree.leaves(stack), strict=True
  ):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  after = jax.eval_shape(lambda: trainer.state)
  assert jax.tree.structure(before) == jax.tree.structure(after)
  for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
  trainer.check_replicas()


@pytest.mark.parametrize(
  ("check_vma", "donate"), [(True, False), (False, True)]
)
def test_one_compilation_from_density_0_to_100_percent(check_vma, donate):
  tx = optax.chain(zen(), sgd())
  trainer = steps.Trainer(
    tx, make_params(), runners.mesh(N), check_vma=check_vma, donate=donate
  )
  densities = (0.0, 0.01, 0.1, 0.5, 1.0, 1.0, 1.0, 0.1, 0.0)
  counts = []
  for step, density in enumerate(densities):
    stack = make_stack(step, density)
    with steps.compilations() as compiled:
      updates = trainer(stack)
    counts.append(len(compiled))
    for got, local in zip(
      jax.tree.leaves(updates), jax.tree.leaves(stack), strict=True
    ):
      check_sgd(got, local)
  assert counts == [1] + [0] * (len(densities) - 1)


@pytest.mark.usually("shard_map_shards")
@pytest.mark.parametrize("runner", ["vmap", "pmap", "shard_map_shards"])
def test_updates_are_the_mean_of_every_leaf(runner):
  tx = zen()
  state = tx.init(make_params())

  def update(grads, axis):
    del axis
    return tx.update(grads, state)[0]

  run = runners.RUNNERS[runner](update, N)
  for seed, density in enumerate((0.0, 0.02, 0.3, 1.0)):
    stack = make_stack(seed, density)
    for got, local in zip(
      jax.tree.leaves(run(stack)), jax.tree.leaves(stack), strict=True
    ):
      oracle.check(got, local)


def test_extra_arguments_pass_through():
  tx = optax.chain(zenjax.zen_sync("data", sparse=False), sgd())
  params = {"w": jnp.zeros(3)}
  run = runners.RUNNERS["vmap"](
    lambda g, _: tx.update(g, tx.init(params), params, value=jnp.ones(()))[0], N
  )
  stack = {"w": np.arange(3 * N, dtype=np.float32).reshape(N, 3)}
  check_sgd(run(stack)["w"], stack["w"])

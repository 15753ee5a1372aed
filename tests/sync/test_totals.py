"""Leaves that travel as a whole, where several of them share a buffer."""

import forced
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import oracle
import pytest
import runners

import zenjax

pytestmark = pytest.mark.optimized

N = 4
SHAPES = {
  "bias": ((5,), jnp.float32),
  "kernel": ((6, 7), jnp.float32),
  "number": ((), jnp.float32),
  "none": ((0, 3), jnp.float32),
  "half": ((9,), jnp.bfloat16),
  "other half": ((4, 2), jnp.float16),
  "count": ((3,), jnp.int32),
  "other count": ((2,), jnp.int32),
  "large": (((1 << 18) + 1,), jnp.float32),
}


def gradients():
  rng = np.random.default_rng(0)
  return {
    name: jnp.asarray(8 * rng.standard_normal((N, *shape)), dtype)
    for name, (shape, dtype) in SHAPES.items()
  }


def mean(grads, axis):
  tx = zenjax.zen_sync(axis, sparse=False)
  return tx.update(grads, tx.init(grads))[0]


@pytest.fixture
def in_turn(monkeypatch):
  forced.buffers_in_turn(monkeypatch)


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize(
  "runner", ["vmap", "shard_map_replicated", "shard_map_vma_replicated"]
)
def test_shared_buffers_hold_the_mean_of_every_leaf(runner):
  grads = gradients()
  got = runners.RUNNERS[runner](mean, N)(grads)
  for name, local in grads.items():
    if jnp.issubdtype(local.dtype, jnp.floating):
      oracle.check(got[name], np.asarray(local), "mean")
    else:
      want = np.mean(local, axis=0, dtype=np.float32)  # As `lax.pmean`.
      assert got[name].dtype == want.dtype
      np.testing.assert_array_equal(got[name], np.stack([want] * N))


def sums(f):
  """Buffers that a compiled step sums."""
  grads = jax.tree.map(lambda x: x[0], gradients())
  run = jax.shard_map(
    lambda tree: f(tree, "data"),
    mesh=runners.mesh(N),
    in_specs=P(),
    out_specs=P(),
    check_vma=False,
  )
  return jax.jit(run).lower(grads).as_text().count('"stablehlo.all_reduce"')


def test_small_leaves_of_a_type_are_summed_as_one(monkeypatch):
  assert sums(mean) == len(SHAPES)
  forced.buffers_in_turn(monkeypatch)
  # Those added in float32, those in int32, and the large one.
  assert sums(mean) == 3

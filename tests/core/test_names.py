"""Leaves whose keys hold dots: each has a name, and a memory, of its own."""

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import zenjax
from zenjax import compress

N = 2
# Both are "a.b" by keys and dots.
TREE = {"a.b": jnp.zeros((8, 2)), "a": {"b": jnp.zeros((8, 2)), "c": 0.0}}


def named(tree):
  """The names by which `sparse` is asked."""
  names = []

  def sparse(name, leaf):
    names.append(name)
    return np.ndim(leaf) == 2

  zenjax.zen_sync("data", sparse=sparse).init(tree)
  return names


def test_names_are_unique():
  assert named(TREE) == ["['a']['b']", "a.c", "['a.b']"]
  assert named({"a": {"b": TREE["a.b"]}}) == ["a.b"]
  assert named({"value": TREE["a.b"]}) == ["value"]


def test_a_box_has_the_name_of_its_array():
  """So a state made of a model's variables fits its plain gradients."""
  state = nnx.state(nnx.Embed(8, 2, rngs=nnx.Rngs(0)), nnx.Param)
  boxed = nn.Partitioned(TREE["a.b"], names=(None, "model"))
  assert named(state) == named(nnx.to_pure_dict(state)) == ["embedding"]
  assert named({"a": boxed, "b": TREE["a"]["b"]}) == ["a", "b"]


def test_what_waits_is_that_of_the_leaf():
  """All gradients of the first step come out, and none twice."""
  tx = compress.all_reduce(compress.TopK(0.2), "data", leaves=True)
  rng = np.random.default_rng(0)
  tree = {"a.b": TREE["a.b"], "a": {"b": TREE["a"]["b"]}}
  draw = lambda x: rng.integers(1, 9, (N, *x.shape)).astype(np.float32)
  gradients = jax.tree.map(draw, tree)

  def train(gradients):
    def step(carry, turn):
      state, total = carry
      now = jax.tree.map(lambda g: jnp.where(turn == 0, g, 0), gradients)
      updates, state = tx.update(now, state)
      return (state, jax.tree.map(jnp.add, total, updates)), None

    start = tx.init(gradients), jax.tree.map(jnp.zeros_like, gradients)
    return jax.lax.scan(step, start, jnp.arange(12))[0][1]

  totals = jax.jit(jax.vmap(train, axis_name="data"))(gradients)
  jax.tree.map(
    lambda t, g: np.testing.assert_array_equal(t[0], g.mean(axis=0)),
    totals,
    gradients,
  )


def test_a_plan():
  shapes = jax.tree.map(lambda x: jnp.zeros((640, 2)), TREE)
  loss = lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(p))
  found = zenjax.planner.plan(
    jax.value_and_grad(loss),
    shapes,
    topology=zenjax.planner.Topology.network("1gbit", N),
  )
  assert {"['a']['b']", "['a.b']"} <= set(found.by_name)

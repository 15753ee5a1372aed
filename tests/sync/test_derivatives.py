"""Derivatives through an exchange are those through `lax.psum`."""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
from refusals import refused
from refusals import trace
import runners

import zenjax

N, R, D, K = 2, 40, 3, 6


def derivatives(sync, x, t, c) -> dict[str, Any]:
  """Of a function that is linear after `sync` and not before it."""
  f = lambda x: sync(x * x)
  loss = lambda x: jnp.sum(f(x) * c)
  value, moved = jax.jvp(f, (x,), (t,))
  return {"value": value, "jvp": moved, "grad": jax.grad(jax.jit(loss))(x)}


def further_derivatives(sync, x, t, c) -> dict[str, Any]:
  """A second derivative, and one through a loop."""
  f = lambda x: sync(x * x)

  def turns(x):
    x, _ = lax.scan(lambda x, _: (x + c * f(x), None), x, None, length=2)
    return jnp.sum(x * c)

  return {
    "second": jax.jvp(jax.grad(lambda x: jnp.sum(f(x) ** 2 * c)), (x,), (t,)),
    "in a scan": jax.grad(turns)(x),
  }


def whole(seed: int, *shape: int) -> np.ndarray:
  """Whole numbers, of which all sums are exact; most rows are zero."""
  rng = np.random.default_rng(seed)
  x = rng.integers(-2, 3, (N, *shape)).astype(np.float32)
  if len(shape) == 2:
    x[:, rng.permutation(shape[0])[: shape[0] // 2]] = 0
  return x


def test_of_arrays():
  # Tangents and cotangents are where values are zero, too.
  given = whole(0, R, D), 1 + np.abs(whole(1, R, D)), 1 + whole(2, R, D)

  def by(sum_):
    def f(given, axis):
      sync = functools.partial(sum_, axis_name=axis)
      return derivatives(sync, *given) | further_derivatives(sync, *given)

    return runners.RUNNERS["shard_map_vma_shards"](f, N)(given)

  want = by(lax.psum)
  assert np.any(want["jvp"]) and np.any(want["grad"])
  got = by(zenjax.sparse_psum)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_of_means():
  """Along two axes; by a scheme of another make."""
  axes = "host", "data"
  mean = functools.partial(
    zenjax.sparse_pmean, axis_name=axes, scheme="recursive_doubling"
  )

  def both(x):
    return [
      (
        jax.jvp(f, (x,), (x + 1,))[1],
        jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(x),
      )
      for f in (mean, lambda x: lax.pmean(x, axes))
    ]

  for axis in reversed(axes):
    both = jax.vmap(both, axis_name=axis)
  x = whole(0, N, R, D)
  got, want = jax.jit(both)(x)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_of_rows():
  ids = np.array([[1, 5, 1, R, -1, 7], [7, 7, 2, 0, 39, 1]], np.int32)
  given = ids, whole(0, K, D), 1 + whole(1, K, D), 1 + whole(2, K, D)

  def by(output):
    def f(given, axis):
      ids, *given = given

      def sync(x):
        rows = zenjax.SparseRows(ids, x, R)
        if output is None:
          return lax.psum(rows.to_dense(), axis)[:K]
        out: Any = zenjax.sparse_psum(rows, axis, output=output)
        return (out if output == "dense" else out.to_dense())[:K]

      return derivatives(sync, *given)

    return runners.RUNNERS["shard_map_vma_shards"](f, N)(given)

  want = by(None)
  assert np.any(want["jvp"]) and np.any(want["grad"])
  for output in ("dense", "rows"):
    jax.tree.map(np.testing.assert_array_equal, by(output), want)


def test_through_steps_of_an_optimizer():
  """The gradient by a learning rate and by the first parameters."""
  zen = zenjax.zen_sync("data", sparse=lambda name, _: name == "table")

  def trained(sync, rate, params, x):
    state = sync.init(params)
    for _ in range(2):
      params_ = zenjax.unreduced(params, "data")
      loss = lambda p: jnp.sum((x @ (p["table"] + p["bias"])) ** 2)
      grads, state = sync.update(jax.grad(loss)(params_), state)
      params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return jnp.sum(params["table"] ** 3) + jnp.sum(params["bias"])

  def both(given, axis):
    x, table = given
    params = {"bias": jnp.ones((R, D)), "table": lax.pmean(table, axis)}
    mean = optax.stateless(lambda g, _: lax.pmean(g, axis))
    return [
      jax.value_and_grad(functools.partial(trained, sync), argnums=(0, 1))(
        jnp.float32(0.125), params, x
      )
      for sync in (zen, mean)
    ]

  given = whole(0, 4, R) / 8, whole(1, R, D)
  got, want = runners.RUNNERS["shard_map_vma_shards"](both, N)(given)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
    got,
    want,
  )


def test_integers_do_not_move():
  tx = zenjax.zen_sync("data", sparse=False)

  def f(x):
    grads = {"count": jnp.arange(2), "x": x}
    out: Any = tx.update(grads, tx.init(grads))[0]
    return jnp.sum(out["x"]) + jnp.sum(out["count"])

  assert (
    jax.vmap(jax.grad(f), axis_name="data")(jnp.ones(3)).tolist() == [1] * 3
  )


def test_rows_that_come_out_of_an_array_have_none():
  def f(x):
    return zenjax.sparse_psum(x, "data", output="rows").to_dense()

  with refused(NotImplementedError, "are zero ... `output='dense'`"):
    trace(lambda x: jax.jvp(f, (x,), (x,)))


def test_owners_have_none():
  """A derivative of bits would be zero without a word."""
  tx = zenjax.sharded_optimizer(optax.sgd(0.1), "data", sparse=True)

  def f(x):
    return tx.update(x, tx.init(x), x)[0]

  words = "sharded_optimizer ... zenjax.zen_sync ... stop_gradient"
  with refused(NotImplementedError, words):
    trace(lambda x: jax.jvp(f, (x,), (x,)))

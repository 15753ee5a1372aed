"""Parameters, their gradients and chains of optax that tests step."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import steps

import zenjax

N = 4

# A table, an ordinary kernel and a bias of another dtype.
SHAPES = {
  "user": {"embedding": ((300, 12), jnp.float32)},
  "dense": {"kernel": ((6, 4), jnp.float32), "bias": ((4,), jnp.bfloat16)},
}
SPARSE = {"user": True, "dense": False}


def is_shape(x):
  return isinstance(x, tuple)


def make_params(seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.asarray(rng.standard_normal(s[0]), s[1]),
    SHAPES,
    is_leaf=is_shape,
  )


def make_stack(seed, density=0.1, n=N):
  """Local gradients for `make_params`, tables with `density` of their rows."""
  rng = np.random.default_rng(seed)

  def leaf(spec):
    shape, dtype = spec
    dtype = np.dtype(dtype)
    if len(shape) < 2 or shape[0] < 50:
      return rng.standard_normal((n, *shape)).astype(dtype)
    x = cases.normal(rng, n, shape[0], shape[1], dtype)
    count = round(density * shape[0])
    ids = [rng.permutation(shape[0])[:count] for _ in range(n)]
    return cases.keep(x, ids)

  return jax.tree.map(leaf, SHAPES, is_leaf=is_shape)


def zen(**options):
  return zenjax.zen_sync("data", sparse=SPARSE, **options)


def sgd():
  return optax.sgd(0.1)


def only(name):
  """A mask over the top level of the parameters."""
  return lambda params: {key: key == name for key in params}


def labels(params):
  return {key: "dense" if key == "dense" else "table" for key in params}


# Each takes "how gradients are averaged" and is run with zen_sync and pmean.
TRANSFORMS = {
  "masked": lambda sync: optax.chain(
    *(optax.masked(sync(key), only(key)) for key in SHAPES), sgd()
  ),
  "multi_transform": lambda sync: optax.multi_transform(
    {
      "table": optax.chain(sync("table"), sgd()),
      "dense": optax.chain(sync("dense"), steps.lenient(optax.adam(1e-2))),
    },
    labels,
  ),
  "inject_hyperparams": lambda sync: steps.lenient(
    optax.inject_hyperparams(
      lambda rate: optax.chain(
        sync(None), optax.clip_by_global_norm(0.5), optax.sgd(rate)
      )
    )(rate=0.1)
  ),
  "apply_if_finite after": lambda sync: optax.chain(
    sync(None), steps.lenient(optax.apply_if_finite(optax.adam(1e-2), 3))
  ),
}


def zen_for(key):
  """zen_sync for the leaves that a mask or a label leaves it."""
  if key is None:
    return zen()
  if key == "table":
    return zenjax.zen_sync("data", sparse=True)
  return zenjax.zen_sync("data", sparse=key != "dense")

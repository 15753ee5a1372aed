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
  "user": {"embedding": jax.ShapeDtypeStruct((300, 12), jnp.float32)},
  "dense": {
    "kernel": jax.ShapeDtypeStruct((6, 4), jnp.float32),
    "bias": jax.ShapeDtypeStruct((4,), jnp.bfloat16),
  },
}
SPARSE = {"user": True, "dense": False}


def make_params(seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
  return jax.tree.map(draw, SHAPES)


def make_stack(seed, density=0.1, n=N):
  """Local gradients for `make_params`, tables with `density` of their rows."""
  rng = np.random.default_rng(seed)
  draw = lambda x: rng.standard_normal((n, *x.shape)).astype(x.dtype)
  stack = jax.tree.map(draw, SHAPES)
  rows = SHAPES["user"]["embedding"].shape[0]
  ids = [rng.permutation(rows)[: round(density * rows)] for _ in range(n)]
  table = cases.keep(stack["user"]["embedding"], ids)
  return stack | {"user": {"embedding": table}}


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

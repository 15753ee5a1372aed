"""A table and a bias trained on a text, by dense gradients and by rows.

Words come as in any text: a few at nearly every step, most hardly ever.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.studies.lm import corpus
import zenjax

ROWS, WIDTH, LOOK_UPS, STEPS = 2000, 4, 32, 200


@functools.cache
def batches():
  """Every step's words of a text, `[STEPS, LOOK_UPS]`, and what to predict."""
  ids = corpus.load_tokens(max_tokens=40_000).ids
  # Numbers go by frequency: few words are rarer than the table's last, in
  # whichever Python's standard library.
  ids = ids[ids < ROWS]
  assert ids.max() == ROWS - 1
  every = len(ids) // STEPS
  ids = np.stack([ids[i * every :][:LOOK_UPS] for i in range(STEPS)])
  rng = np.random.default_rng(0)
  return ids, rng.standard_normal((*ids.shape, WIDTH)).astype(np.float32)


def start():
  table = np.random.default_rng(1).standard_normal((ROWS, WIDTH))
  return {"table": jnp.array(table, jnp.float32), "bias": jnp.ones(WIDTH)}


def loss(params, ids, wanted):
  error = params["table"][ids] + params["bias"] - wanted
  return 0.5 * jnp.sum(error**2)


def train_dense(tx, steps=STEPS):
  params = start()
  state = tx.init(params)

  @jax.jit
  def step(params, state, ids, wanted):
    grads = jax.grad(loss)(params, ids, wanted)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for ids, wanted in list(zip(*batches()))[:steps]:
    params, state = step(params, state, ids, wanted)
  return params, state


def train_rows(inner, before=True) -> tuple[Any, Any]:
  """The same through rows; `before`: whether they catch up when read."""
  tx = zenjax.lazy_rows(inner, catch_up=True)
  params = start()
  state = tx.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, ids, wanted):
    if before:
      params, state = zenjax.rows.catch_up(tx, params, state, {"table": ids})
    grads = zenjax.rows.grad(loss)(params, ids, wanted)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  for ids, wanted in zip(*batches()):
    params, state = step(params, state, ids, wanted)
  return jax.jit(lambda *x: zenjax.rows.catch_up(tx, *x))(params, state)


def seen_again_after_a_gap():
  """How many distinct words of steps stood before, but not in the last step."""
  late, last = 0, {}
  for step, ids in enumerate(batches()[0]):
    for i in set(ids.tolist()):
      late += last.get(i, step - 1) < step - 1
      last[i] = step
  return late


def furthest(a, b):
  """The largest difference of two trees."""
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return max(float(np.max(np.abs(np.asarray(x) - y))) for x, y in leaves)

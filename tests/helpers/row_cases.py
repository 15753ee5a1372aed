"""Losses of one table: those that only look it up, and those that do more.

Each takes `(table [ROWS, WIDTH], ids [8])` and returns a scalar. Adding a form
is adding a row.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH = 40, 4
# Duplicates and negatives; and with ids out of range on either side.
IDS = np.array([3, 1, 3, -1, 39, 0, -40, 17], np.int32)
OUT_OF_RANGE = np.array([3, 45, -41, 3, 1000, 0, -1000, 17], np.int32)


def table(seed: int = 0) -> jax.Array:
  rng = np.random.default_rng(seed)
  return jnp.array(rng.standard_normal((ROWS, WIDTH)), jnp.float32)


def loss(rows: jax.Array) -> jax.Array:
  """In which every element of every row counts differently."""
  weights = jnp.arange(1, rows.size + 1, dtype=jnp.float32).reshape(rows.shape)
  return jnp.sum(jnp.sin(rows.astype(jnp.float32)) * weights)


def _zero(ids):
  # Carries must vary over devices as what is added to them does.
  return ids[0].astype(jnp.float32) * 0.0


def _scan(table, ids):
  turn = lambda c, i: (c * 0.5 + loss(table[i]), c)
  return lax.scan(turn, _zero(ids), ids)[0]


def _nested_scans(table, ids):
  def outer(c, some):
    inner = lambda i: loss(jnp.take(table, i, axis=0)) * c
    return c + 1.0, lax.map(inner, some)

  return jnp.sum(lax.scan(outer, _zero(ids), ids.reshape(4, 2))[1])


def _scan_of_remat(table, ids):
  turn = jax.checkpoint(lambda c, i: (c * 0.5 + loss(table[i]), None))
  return lax.scan(turn, _zero(ids), ids)[0]


def _for_loop(table, ids):
  add = lambda k, total: total + loss(table[ids[k]])
  return lax.fori_loop(0, len(ids), add, _zero(ids))


def _remat(table, ids, **options):
  inside = jax.checkpoint(lambda t, i: jnp.sin(t[i]), **options)
  return loss(inside(table, ids))


def _column_factors(table, ids):
  return loss((table * jnp.array([[1.0, 2.0, 3.0, 4.0]]))[ids])


def _broadcast_factor(table, ids):
  factor = jnp.broadcast_to(jnp.float32(0.3), table.shape)
  return loss(jnp.take(table * factor, ids, axis=0))


ROWS_ONLY = {
  "take": lambda t, i: loss(jnp.take(t, i, axis=0)),
  "take clip": lambda t, i: loss(jnp.take(t, i, axis=0, mode="clip")),
  "take wrap": lambda t, i: loss(jnp.take(t, i, axis=0, mode="wrap")),
  "take fill 0": lambda t, i: loss(jnp.take(t, i, axis=0, fill_value=0)),
  "scaled fill": lambda t, i: loss(jnp.take(t * 2.0, i, axis=0, fill_value=1)),
  "quotient": lambda t, i: loss((t / 1.5)[i]),
  "index": lambda t, i: loss(t[i]),
  "index 2-D": lambda t, i: loss(t[i.reshape(2, 4)]),
  "at.get drop": lambda t, i: loss(t.at[i].get(mode="drop", fill_value=0)),
  "vmap": lambda t, i: loss(jax.vmap(lambda j: t[j])(i)),
  "scalars": lambda t, i: loss(t[i[0]]) + loss(t[i[3]]),
  "slices": lambda t, i: loss(t[2:9:3]) + loss(t[-1]) + _zero(i),
  "more lookups than rows": lambda t, i: loss(t[jnp.tile(i, 6)]),
  "twice": lambda t, i: loss(t[i]) + loss(jnp.take(t, i[:3], axis=0)),
  "jit": lambda t, i: loss(jax.jit(lambda t, i: t[i])(t, i)),
  "uint8 ids": lambda t, i: loss(t[i.astype(jnp.uint8)]),
  "uint32 ids": lambda t, i: loss(t.at[i.astype(jnp.uint32)].get(mode="clip")),
  "remat": _remat,
  "remat policy": lambda t, i: _remat(
    t, i, policy=jax.checkpoint_policies.dots_saveable
  ),
  "scan": _scan,
  "nested scans": _nested_scans,
  "scan of remat": _scan_of_remat,
  "fori_loop": _for_loop,
  "bfloat16": lambda t, i: loss(t.astype(jnp.bfloat16)[i]),
  "factor": lambda t, i: loss((t * 1.7)[i]),
  "column factors": _column_factors,
  "negative": lambda t, i: loss((-t)[i]),
  "padding row": lambda t, i: loss(t.at[0].set(0.0)[i]),
  "row set": lambda t, i: loss((t.at[3].set(jnp.arange(4.0)) * 2.0)[i]),
  "stopped": lambda t, i: loss(t[i]) + jnp.sum(lax.stop_gradient(t) ** 2),
  "custom derivative": lambda t, i: loss(jax.nn.softmax(jax.nn.gelu(t[i]))),
}


def _tied(table, ids):
  return loss(table[ids] @ table.T)


def _cond(table, ids):
  looked_up = lambda t: loss(t[ids])
  return lax.cond(ids[0] > 2, looked_up, lambda t: _zero(ids), table)


def _carried(table, ids):
  turn = lambda t, i: (t * 2.0, loss(t[i]))
  return jnp.sum(lax.scan(turn, table, ids)[1])


def _padded(table, ids):
  zero = jnp.zeros((1, WIDTH))
  return loss(jnp.concatenate([zero, table])[ids])


# The primitive that keeps the gradient dense.
ALSO_ELSE = {
  "tied softmax": (_tied, "transpose"),
  "decay": (lambda t, i: loss(t[i]) + jnp.sum(t**2), "integer_pow"),
  "cond": (_cond, "cond"),
  "elements": (lambda t, i: loss(t[i, 1]), "other pieces"),
  "one-hot": (lambda t, i: loss(jax.nn.one_hot(i, ROWS) @ t), "dot_general"),
  "concatenated": (_padded, "concatenate"),
  "carried": (_carried, "carried"),
  "reshaped": (lambda t, i: loss(t.reshape(-1, 2)[i]), "reshape"),
  "broadcast factor": (_broadcast_factor, "more than a factor"),
  "not read": (lambda t, i: _zero(i) + 1.0, "not looked up"),
}

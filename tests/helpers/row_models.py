"""Models as their libraries write them: parameters, and a function of ids."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

VOCABULARY, WIDTH, BATCH, LENGTH = 50, 8, 8, 5
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH))


class Embedded(nn.Module):
  """An embedding and a dense layer."""

  options: dict[str, Any]
  wrap: Callable = staticmethod(lambda module: module)

  @nn.compact
  def __call__(self, ids):
    embed = self.wrap(nn.Embed)(VOCABULARY, WIDTH, **self.options)
    return nn.Dense(3, dtype=jnp.float32)(nn.gelu(embed(ids)))


class Tied(nn.Module):
  """The table is the softmax's kernel too; positions are only looked up."""

  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(VOCABULARY, WIDTH)
    positions = nn.Embed(60, WIDTH, name="positions")
    where = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    return embed.attend(embed(ids) + positions(where))


class Scanned(nn.Module):
  """Looks up inside `nn.scan`, one position a step."""

  @nn.compact
  def __call__(self, ids):
    def step(cell, carry, i):
      carry = cell(carry, i)
      return carry, carry

    cell = Cell()
    scan = nn.scan(
      step, variable_broadcast="params", split_rngs={"params": False}
    )
    return scan(cell, jnp.zeros((BATCH, WIDTH)), ids.T)[1]


class Cell(nn.Module):
  @nn.compact
  def __call__(self, carry, ids):
    rows = nn.Embed(VOCABULARY, WIDTH)(ids)
    return jnp.tanh(nn.Dense(WIDTH)(carry) + rows)


def linen(model):
  params = model.init(jax.random.key(0), IDS)
  return params, lambda p, ids: model.apply(p, ids)


class NnxModel(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.dense = nnx.Linear(WIDTH, 3, rngs=rngs)

  def __call__(self, ids):
    return self.dense(jax.nn.gelu(self.embed(ids)))


def nnx_split():
  graph, state = nnx.split(NnxModel(nnx.Rngs(0)))
  return state, lambda state, ids: nnx.merge(graph, state)(ids)


def two_tables():
  rng = np.random.default_rng(1)
  normal = lambda *s: jnp.array(rng.standard_normal(s), jnp.float32)
  params = {
    "users": normal(VOCABULARY, WIDTH),
    "items": normal(2 * VOCABULARY, WIDTH),
    "bias": normal(VOCABULARY),
  }

  def apply(p, ids):
    users = p["users"].at[0].set(0.0)[ids[:, 0]]
    items = jnp.take(p["items"], 2 * ids, axis=0).mean(axis=1)
    return jnp.sum(users * items, axis=-1) + p["bias"][ids[:, 0]]

  return params, apply


def mixed_precision():
  params = {"table": jnp.ones((VOCABULARY, WIDTH)), "w": jnp.ones((WIDTH, 2))}

  def apply(p, ids):
    p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
    return p["table"][ids] @ p["w"]

  return params, apply


def equinox():
  eqx = pytest.importorskip("equinox")
  embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=jax.random.key(0))
  linear = eqx.nn.Linear(WIDTH, 3, key=jax.random.key(1))
  params, static = eqx.partition((embed, linear), eqx.is_inexact_array)

  def apply(params, ids):
    embed, linear = eqx.combine(params, static)
    return jax.vmap(jax.vmap(lambda i: linear(jnp.tanh(embed(i)))))(ids)

  return params, apply


def haiku():
  hk = pytest.importorskip("haiku")

  def model(ids):
    rows = hk.Embed(VOCABULARY, WIDTH)(ids)
    return hk.Linear(3)(jnp.tanh(rows))

  transformed = hk.without_apply_rng(hk.transform(model))
  return transformed.init(jax.random.key(0), IDS), transformed.apply


# Parameters and `apply`, and how many tables give rows.
MODELS: dict[str, tuple[Callable, int]] = {
  "linen": (lambda: linen(Embedded({})), 1),
  "linen bfloat16": (lambda: linen(Embedded({"dtype": jnp.bfloat16})), 1),
  "linen remat": (lambda: linen(Embedded({}, nn.remat)), 1),
  "linen jit": (lambda: linen(Embedded({}, nn.jit)), 1),
  "linen tied": (lambda: linen(Tied()), 1),
  "linen scan": (lambda: linen(Scanned()), 1),
  "nnx split": (nnx_split, 1),
  "nnx module": (lambda: (NnxModel(nnx.Rngs(0)), lambda m, i: m(i)), 1),
  "two tables": (two_tables, 2),
  "mixed precision": (mixed_precision, 1),
  "equinox": (equinox, 1),
  "haiku": (haiku, 1),
}


def loss_of(apply):
  """Returns a loss of parameters and ids."""

  def loss(params, ids):
    out = apply(params, ids).astype(jnp.float32)
    return jnp.mean(jnp.sin(out) ** 2) + jnp.mean(jnp.tanh(out))

  return loss

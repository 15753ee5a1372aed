"""Training scripts in plain `jit` as users write them, without and with zenjax.

A script trains over `mesh` and returns what it logged of each step, and the
lowered step. A batch is `ids [B, 3] int32`, `targets [B]` and `mask [B]`, zero
where an example is padding. What both of a pair use stands above them.
"""

from typing import Any

from flax import nnx
import flax.linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import orbax.checkpoint as ocp

import zenjax

ROWS, WIDTH = 2048, 8


def masked_mean(losses, mask):
  return jnp.sum(losses * mask) / jnp.sum(mask)


class State(TrainState):
  """A TrainState with a moving average of the parameters."""

  ema: Any


class Model(nn.Module):
  """The mean of three rows, and two layers."""

  @nn.compact
  def __call__(self, ids):
    x = nn.Embed(ROWS, WIDTH)(ids).mean(1)
    return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))[:, 0]


def flax_rows(mesh, batches, folder):
  model = Model()
  params = model.init(jax.random.key(0), batches[0][0])
  matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30, 0.01)
  tx = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(schedule, weight_decay=0.01, mask=matrices),
  )
  tx = optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation()
  state = State.create(apply_fn=model.apply, params=params, tx=tx, ema=params)
  state = jax.device_put(state, NamedSharding(mesh, P()))

  @jax.jit
  def step(state, ids, targets, mask):
    def loss_fn(params):
      return masked_mean((state.apply_fn(params, ids) - targets) ** 2, mask)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    ema = optax.incremental_update(state.params, state.ema, 0.1)
    return state.replace(ema=ema), loss

  losses, batch = [], ()
  for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    state, loss = step(state, *batch)
    losses.append(float(loss))
    if len(losses) == len(batches) // 2:
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "half", state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(folder / "half", state)
  return losses, step.lower(state, *batch)


def flax_rows_zenjax(mesh, batches, folder):
  model = Model()
  params = model.init(jax.random.key(0), batches[0][0])
  matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30, 0.01)
  tx = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(schedule, weight_decay=0.01, mask=matrices),
  )
  tx = optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation()
  tx = optax.chain(zenjax.zen_sync("data", output="dense"), tx)
  state = State.create(apply_fn=model.apply, params=params, tx=tx, ema=params)
  state = jax.device_put(state, NamedSharding(mesh, P()))

  @jax.jit
  def step(state, ids, targets, mask):
    def loss_fn(params):
      return masked_mean((state.apply_fn(params, ids) - targets) ** 2, mask)

    loss, grads = zenjax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    ema = optax.incremental_update(state.params, state.ema, 0.1)
    return state.replace(ema=ema), loss

  losses, batch = [], ()
  for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    state, loss = step(state, *batch)
    losses.append(float(loss))
    if len(losses) == len(batches) // 2:
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "half", state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(folder / "half", state)
  return losses, step.lower(state, *batch)


class Towers(nnx.Module):
  """A row of a user, of which the other rows are items, with dropout."""

  def __init__(self, rngs):
    self.table = nnx.Embed(ROWS, WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.user = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

  def loss(self, ids, targets, mask):
    """Tells the items of each user from those of all others of the batch."""
    del targets
    users = self.user(self.dropout(self.table(ids[:, 0])))
    items = self.table(ids[:, 1:]).mean(1)
    logits = jnp.where(mask > 0, users @ items.T, -1e9)
    own = jnp.arange(ids.shape[0])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, own)
    return masked_mean(losses, mask)


def nnx_dropout(mesh, batches, folder):
  del folder
  with jax.set_mesh(mesh):
    model = Towers(nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, *batch):
      loss, grads = nnx.value_and_grad(Towers.loss)(model, *batch)
      optimizer.update(model, grads)
      return loss

    losses, batch = [], ()
    for batch in batches:
      batch = jax.device_put(batch, P("data"))
      losses.append(float(step(model, optimizer, *batch)))
    return losses, step.lower(model, optimizer, *batch)


def nnx_dropout_zenjax(mesh, batches, folder):
  del folder
  with jax.set_mesh(mesh):
    model = Towers(nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))
    tx = optax.chain(zenjax.zen_sync("data"), zenjax.lazy_rows(tx))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, *batch):
      loss, grads = zenjax.value_and_grad(Towers.loss)(model, *batch)
      optimizer.update(model, grads)
      return loss

    losses, batch = [], ()
    for batch in batches:
      batch = jax.device_put(batch, P("data"))
      losses.append(float(step(model, optimizer, *batch)))
    return losses, step.lower(model, optimizer, *batch)

"""Row gradients of modules: Flax's nnx, and trees that are not all arrays."""

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenjax

ROWS, WIDTH = 40, 3
IDS = jnp.arange(24).reshape(8, 3) ** 2 % ROWS


class Net(nnx.Module):
  """A table, dropout, batch norm and a layer."""

  def __init__(self, rngs):
    self.table = nnx.Embed(ROWS, WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.3, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.dense = nnx.Linear(WIDTH, 2, rngs=rngs)

  def __call__(self, ids):
    return self.dense(self.norm(self.dropout(self.table(ids).mean(1))))


def loss(model, ids):
  return jnp.square(model(ids) - 1).sum()


def scored(ids, model):
  out = model(ids)
  return jnp.square(out).sum(), {"out": out}


def dense(grads):
  is_rows = lambda x: isinstance(x, zenjax.SparseRows)
  return jax.tree.map(
    lambda x: x.to_dense() if is_rows(x) else x, grads, is_leaf=is_rows
  )


def assert_close(got, want):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5),
    got,
    want,
  )


def writes(model, ids):
  model.dense.bias.set_value(model.dense.bias.get_value() * 2)
  return loss(model, ids)


def rematerialized(model, ids):
  """A layer and the table, each inside a transformation of nnx."""
  table = nnx.remat(lambda layer, x: layer(x))(model.table, ids)
  out = nnx.jit(lambda m, x: m.dense(m.norm(x)))(model, table.mean(1))
  return jnp.square(out - 1).sum()


BY_TABLE = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("table")))
NNX = {
  "nnx.jit outside": (loss, 0, True),
  "nnx.remat, nnx.jit inside": (rematerialized, 0, False),
  "inside and outside": (rematerialized, 0, True),
  "writes to a parameter": (writes, 0, False),
  "DiffState": (loss, BY_TABLE, True),
}


@pytest.mark.parametrize("name", NNX)
def test_of_an_nnx_module_as_nnx_takes_them(name):
  """Values, gradients, and what three calls leave of the module."""
  fun, argnums, jitted = NNX[name]

  def run(value_and_grad):
    model, found = Net(nnx.Rngs(0)), []
    rows: Any = None
    both = value_and_grad(fun, argnums=argnums)
    step = nnx.jit(both) if jitted else both
    for turn in range(3):
      value, grads = step(model, IDS + turn - 1)
      rows = grads["table"]["embedding"].get_value()
      found.append((value, dense(grads)))
    return found, nnx.state(model, nnx.Not(nnx.RngKey)), rows

  *got, rows = run(zenjax.value_and_grad)
  *want, _ = run(nnx.value_and_grad)
  assert_close(got, want)
  assert isinstance(rows, zenjax.SparseRows) and rows.capacity == IDS.size


def test_by_another_argument_with_aux():
  ours = zenjax.value_and_grad(scored, argnums=1, has_aux=True)
  theirs = nnx.value_and_grad(scored, argnums=1, has_aux=True)
  models = Net(nnx.Rngs(1)), Net(nnx.Rngs(1))
  (value, aux), grads = ours(IDS, models[0])
  (want, want_aux), want_grads = theirs(IDS, models[1])
  assert_close((value, aux, dense(grads)), (want, want_aux, want_grads))


def test_a_module_that_is_no_parameter_keeps_what_changes():
  """As the teacher of another: its counts go on too."""

  def distilled(table, teacher, ids):
    return jnp.sum(table[ids].mean(1) * teacher(ids)[:, :1])

  teachers = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
  table = jnp.ones((ROWS, WIDTH))
  for _ in range(2):
    value, grads = zenjax.value_and_grad(distilled)(table, teachers[0], IDS)
    want, want_grads = nnx.value_and_grad(distilled)(table, teachers[1], IDS)
    assert isinstance(grads, zenjax.SparseRows)
    assert_close((value, dense(grads)), (want, want_grads))
  counts: Any = [x.dropout.rngs for x in teachers]
  assert [int(x.count[...]) for x in counts] == [2, 2]
  assert_close(*[nnx.state(x, nnx.BatchStat) for x in teachers])


def adds(model, ids):
  model.mean = nnx.Intermediate(model(ids).mean())
  return loss(model, ids)


@pytest.mark.parametrize(
  ("fun", "arguments", "words"),
  [
    (adds, lambda m: (m, IDS), "argument 0.*has_aux"),
    (
      lambda both, ids: loss(both[0], ids),
      lambda m: ((m,), IDS),
      "arguments of their own.*argument 0 holds one",
    ),
    (
      lambda a, b: loss(a, IDS),
      lambda m: (m, {"table": m.table}),
      "once.*argument 1 has one of argument 0",
    ),
  ],
  ids=["adds", "holds", "twice"],
)
def test_what_would_be_lost_is_refused(fun, arguments, words):
  with pytest.raises(ValueError, match="(?s)`fun` must.*" + words):
    zenjax.value_and_grad(fun)(*arguments(Net(nnx.Rngs(0))))


def test_of_a_tree_that_is_not_all_arrays():
  """Gradients of its floating arrays; None for all else."""
  table = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
  floats, others = (table, np.float32(0.5)), (jnp.tanh, jnp.array(2), None)

  def fun(model, ids, *, power):
    table, scale, act, more, _ = model
    rows = jnp.take(table, ids + more, axis=0, mode="clip")
    return jnp.sum(act(rows * scale) ** power)

  both = zenjax.rows.filter_value_and_grad(fun)
  value, (rows, scale, *none) = both((*floats, *others), IDS, power=2)
  assert none == [None, None, None]
  assert isinstance(rows, zenjax.SparseRows)
  plain = lambda *floats: fun((*floats, *others), IDS, power=2)
  want = jax.value_and_grad(plain, (0, 1))(*floats)
  assert_close((value, (rows.to_dense(), scale)), want)

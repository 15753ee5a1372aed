"""What a report says beside its numbers."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import names
import runners

import zenjax

N = 4
ROWS = 400


@functools.cache
def program(tx):
  """The first state, and a step of gradients in the rows `touched: [N, k]`."""
  params = jnp.zeros((ROWS, 8))
  mesh = runners.mesh(N)

  def step(state, touched):
    params, state = state
    grads = jnp.zeros_like(params).at[touched[0]].set(1.0)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), ()

  state = params, zenjax.init_state(tx, params, mesh, "data")
  return state, jax.jit(zenjax.data_parallel(step, mesh, "data"))


def reported(tx, touched):
  """The report after one step."""
  state, step = program(tx)
  return zenjax.report(step(state, touched)[0])


def rows_of_each(count, apart):
  """`count` rows of each device, as often as all shapes become the same."""
  ids = np.arange(ROWS) % count + apart * np.arange(N)[:, None]
  return jnp.array(ids % ROWS)


OWNER = zenjax.sharded_optimizer(optax.sgd(0.1), "data", sparse=True)
ZEN = zenjax.zen_sync("data", sparse=True)


@pytest.mark.parametrize(
  ("tx", "count", "apart", "asked"),
  [
    (ZEN, 300, 0, True),  # above break-even
    (ZEN, 20, 1, False),
    (ZEN, ROWS, 0, False),  # no row is left to differ in
    (ZEN, ROWS - 8, 0, False),  # as in the gradient of a dense layer
    (OWNER, 20, 0, True),
  ],
)
def test_report_asks_where_all_devices_hold_the_same_rows(
  tx, count, apart, asked
):
  shown = reported(tx, rows_of_each(count, apart))
  by = "sharded_optimizer" if tx is OWNER else "zen_sync"
  assert shown.startswith(f"{by} after 1 step on {N} devices")
  question = "leaf: all devices hold the same rows: were the gradients averaged"
  assert (question in shown) == asked
  assert (f"before {by}? Remove that pmean" in shown) == asked


def test_report_explains_its_columns():
  shown = reported(ZEN, rows_of_each(20, 3))
  headings = shown.splitlines()[1]
  legend = " ".join(shown.splitlines()[3:6])
  for word in ("density", "union", "growth", "imb", "rounds", "MB", "bytes"):
    assert word in headings
    assert f"{word}: " in legend
  assert "zen/" in shown.splitlines()[2] and "zen/g: " in legend


def test_report_names_owner_update_before_the_first_step():
  state, _ = program(OWNER)
  assert zenjax.report(state).startswith("sharded_optimizer: no step was taken")


def test_report_where_nothing_was_exchanged():
  tx, mesh, grads = ZEN, runners.mesh(1), jnp.zeros((ROWS, 8))
  state = zenjax.init_state(tx, grads, mesh, "data")
  step = jax.vmap(tx.update, (None, None), axis_name="data", axis_size=1)
  step = jax.jit(step)
  for told in (
    "no step was taken yet.",
    *["there is one device, so nothing was exchanged."] * 2,
  ):
    assert zenjax.report(state) == f"zen_sync: {told}"
    state = jax.tree.map(lambda x: x[0], step(grads, state)[1])


@pytest.mark.parametrize("name", ["stats", "report", "tune", "planner.profile"])
def test_numbers_are_read_outside_of_jit(name):
  state = ZEN.init(jnp.zeros((ROWS, 8)))
  with pytest.raises(TypeError) as error:
    jax.eval_shape(operator.attrgetter(name)(zenjax), state)
  names(error, "`state`", "`jit`", f"`zenjax.{name}`", "outside")

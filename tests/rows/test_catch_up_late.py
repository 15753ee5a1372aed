"""What is said where rows do not catch up before they are read."""

import functools
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import runners

import zenjax
from zenjax import SparseRows

pytestmark = pytest.mark.usefixtures("as_optax_computes")

ROWS, WIDTH = 6, 4
PARAMS = {"table": jnp.ones((ROWS, WIDTH)), "bias": jnp.ones(2)}
unasked = pytest.mark.filterwarnings("ignore:`catch_up=True` of `lazy_rows`")


def rows_of(*ids) -> Any:
  return SparseRows(jnp.array(ids), jnp.ones((len(ids), WIDTH)), ROWS)


def lazy(inner: Any = None):
  return zenjax.lazy_rows(inner or optax.sgd(0.1, 0.9), catch_up=True)


def by_label():
  labels = {"table": "a", "bias": "b"}
  return optax.multi_transform({"a": lazy(), "b": lazy()}, labels)


HOLDERS = {
  "alone": lazy,
  "chain": lambda: optax.chain(optax.identity(), lazy()),
  "multi_transform": by_label,
  "masked": lambda: optax.masked(lazy(), {"table": True, "bias": False}),
}


def warned(tx, *calls, table=None):
  """Warnings of traces that call catch_up first, or not, or do no more."""

  def trace(call, params, state):
    if call is not None:
      ids = {"table": jnp.array([1, 3])} if call == "ids" else None
      params, state = zenjax.rows.catch_up(tx, params, state, ids)
    if call != "alone":
      grads = PARAMS | {"table": rows_of(1, 3) if table is None else table}
      params, state = tx.update(grads, state, params)
    return params, state

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for call in calls:
      state = jax.eval_shape(tx.init, PARAMS)
      jax.eval_shape(functools.partial(trace, call), PARAMS, state)
  return [str(w.message) for w in caught]


@pytest.mark.parametrize("name", HOLDERS)
def test_an_optimizer_that_nobody_asked_says_so_once(name):
  (said,) = warned(HOLDERS[name](), None, None)
  for word in (
    "`zenjax.rows.catch_up`",
    "before the gradients",
    "all_gather",
    "par",
  ):
    assert word in said


@pytest.mark.parametrize("call", ["ids", "all", "alone"])
@pytest.mark.parametrize("name", HOLDERS)
def test_one_that_was_asked_says_nothing(name, call):
  """In the same trace, or in another before."""
  assert not warned(HOLDERS[name](), call, None)


def test_two_that_nobody_asked_both_say_so():
  assert len(warned(lazy(), None) + warned(lazy(), None)) == 2


def test_nothing_is_said_where_nothing_is_missed():
  assert not warned(lazy(optax.sgd(0.1)), None)
  assert not warned(lazy(), None, table=PARAMS["table"])
  assert not warned(zenjax.lazy_rows(optax.adam(0.1)), None)


RULES = {
  "momentum": (optax.sgd(0.1, 0.9), False),
  "adam": (optax.adam(0.1), False),
  "adamw": (optax.adamw(0.1), True),
  "adamw, schedule": (optax.adamw(optax.linear_schedule(0, 0.1, 9)), True),
  "L2": (
    optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9)),
    True,
  ),
  "L2, schedule": (
    optax.chain(
      optax.add_decayed_weights(0.1),
      optax.sgd(optax.linear_schedule(0, 0.1, 9)),
    ),
    True,
  ),
  "state that is not zero": (optax.yogi(0.1), True),
}


@pytest.mark.usually("adamw, schedule", "adam", "momentum*")
@unasked
@pytest.mark.parametrize("name", RULES)
def test_rows_that_have_taken_no_step_count_where_these_are_moved(name):
  inner, moves = RULES[name]
  tx = lazy(inner)
  step = jax.jit(lambda rows, state: tx.update(rows, state, PARAMS["table"])[1])
  state: Any = tx.init(PARAMS["table"])
  found = []
  # Row 2 is new at the second step and 5 is padding; at the third row 1 missed
  # one step and row 2 none.
  for ids in ([1, 1], [2, ROWS], [2, 1], [1, 2]):
    state = step(rows_of(*ids), state)
    found.append(int(state.late))
  assert found == [0, moves, moves + 1, moves + 1]


@unasked
def test_the_count_stops_where_int32_does():
  tx = lazy()
  most = np.iinfo(np.int32).max
  state: Any = tx.init(PARAMS["table"])
  state = state._replace(
    late=state.late + (most - 1),
    steps=state.steps + 2,
    current=state.current + 1,
  )
  _, state = tx.update(rows_of(1, 2, 3), state, PARAMS["table"])
  assert int(state.late) == most


def trained(every: bool):
  """The state after steps on two devices; whether ids of all are given."""
  tx = optax.chain(
    zenjax.zen_sync("data", sparse={"table": True, "bias": False}), lazy()
  )

  def step(params, state, ids):
    mine = jax.lax.all_gather(ids, "data", tiled=True) if every else ids
    params, state = zenjax.rows.catch_up(tx, params, state, {"table": mine})
    values = jnp.ones((len(ids), WIDTH))
    grads = {"table": SparseRows(ids, values, ROWS), "bias": jnp.ones(2)}
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  mapped: Any = jax.jit(
    jax.shard_map(
      step,
      mesh=runners.mesh(2),
      in_specs=(P(), P(), P("data")),
      out_specs=P(),
      check_vma=False,
    )
  )
  params, state = PARAMS, tx.init(PARAMS)
  for ids in ([0, 1], [2, 3], [0, 1]):
    params, state = mapped(params, state, jnp.array(ids))
  return state


def test_report_tells_of_ids_of_one_device_alone():
  state: Any = trained(every=False)
  # Each device misses the row that the other looks up.
  assert int(state[1].late) == 1
  said = zenjax.report(state).splitlines()[-1]
  assert said.startswith("lazy_rows: 1 rows were behind")
  assert "`jax.lax.all_gather(ids, axis_name)`" in said


def test_report_is_silent_where_ids_of_all_are_given():
  state: Any = trained(every=True)
  assert int(state[1].late) == 0
  assert "lazy_rows" not in zenjax.report(state)


def test_report_tells_where_no_leaf_travels_sparse():
  tx = optax.chain(zenjax.zen_sync("data", sparse=False), lazy())
  state: Any = tx.init(PARAMS)
  state = state[0], state[1]._replace(late=jnp.int32(7))
  assert "7 rows were behind" in zenjax.report(state)

"""Sizes to pin that pay in no step: not advised, and warned of if given."""

import functools
from typing import Any
import warnings

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import zenjax
from zenjax._src.sync import sync_state

ROWS, WIDTH, DEVICES = 50_000, 128, 8
# 20 % of the rows on each of 8 devices, and their union: what steps of zen by
# columns need, and a first round of 41 % of a dense exchange's bytes there.
PIN = (10_000, 30_690)
TABLE = {"embed": (ROWS, WIDTH)}


def traced(shapes=TABLE, **options: Any) -> list[str]:
  """Messages of the warnings when a step is traced; nothing is compiled."""
  stack = {
    name: jax.ShapeDtypeStruct((DEVICES, *shape), jnp.float32)
    for name, shape in shapes.items()
  }
  return traced_on(stack, lambda grads: grads, **options)


def traced_on(stack, gradients, **options: Any) -> list[str]:
  """The same of what `gradients` makes of a device's part of `stack`."""
  tx = zenjax.zen_sync("data", sparse=True, **options)

  def step(part):
    grads = gradients(part)
    return tx.update(grads, tx.init(grads))

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax.eval_shape(jax.vmap(step, axis_name="data"), stack)
  return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
  ("scheme", "part"),
  [
    ("zen", None),
    ("all_gather", "81%"),
    ("recursive_doubling", "53%"),
    ("split_all_gather", "101%"),
  ],
)
def test_sizes_of_another_scheme_may_be_above_break_even(scheme, part):
  partition = "columns" if scheme == "zen" else "auto"
  said = traced(scheme=scheme, partition=partition, capacities=PIN)
  assert len(said) == (part is not None)
  for message in said:
    assert "`capacities` of leaf 'embed'" in message
    assert f"{PIN} make it {part} with scheme='{scheme}'" in message
    assert "zenjax.advise" in message


def test_warning_is_of_the_leaf_that_is_pinned():
  tables = {"a": (ROWS, WIDTH), "b": (ROWS, WIDTH)}
  options = {"scheme": "all_gather"}
  both = traced(tables, capacities=PIN, **options)
  assert len(both) == 2
  (one,) = traced(tables, capacities={"b": PIN}, **options)
  assert "leaf 'b'" in one
  assert traced(tables, capacities={"b": (100, 400)}, **options) == []


def test_no_warning_where_it_would_be_no_help():
  # Rows that do not fit wait: there is no dense path to take instead.
  carry = {"on_overflow": "carry", "partition": "columns"}
  assert traced(capacities=(ROWS, ROWS), **carry) == []
  # Of a few rows a guess takes as many.
  few = {"embed": (20, 4)}
  assert traced(few, capacities=(8, 8)) == []
  assert len(traced(few, capacities=(20, 20))) == 1


def test_no_warning_of_rows_which_have_no_dense_path():
  stack = (
    jax.ShapeDtypeStruct((DEVICES, PIN[0]), jnp.int32),
    jax.ShapeDtypeStruct((DEVICES, PIN[0], WIDTH), jnp.float32),
  )
  rows = lambda part: {"embed": zenjax.SparseRows(*part, num_rows=ROWS)}
  assert traced_on(stack, rows, scheme="all_gather", capacities=PIN) == []


def _leaf(needs, *, dense: bool = False) -> sync_state.LeafState:
  """A table of 1000 rows whose steps needed these."""
  sizes = sync_state.Sizes(1000, 16, DEVICES, DEVICES, 1, 8, 8, 1, 0)
  history = np.zeros((sync_state.HISTORY, 2), np.int32)
  history[: len(needs)] = needs
  return sync_state.empty_leaf(None, mean=True, devices=0)._replace(
    sizes=jnp.array(sizes, jnp.int32),
    history=jnp.array(history),
    dense=jnp.array(dense),
  )


@pytest.mark.parametrize(
  ("needs", "dense", "pin"),
  [
    ([(8, 40)] * 10, False, (8, 40)),
    ([(8, 40)] * 8 + [(sync_state.DENSE_STEP,) * 2] * 2, False, (8, 40)),
    ([(sync_state.DENSE_STEP,) * 2] * 10, False, None),
    ([(8, 40)] * 10, True, None),
    # The 90th percentile of the push, the 10th of the pull.
    ([(10 * i, 200 + 10 * i) for i in range(11)], False, (90, 210)),
  ],
)
def test_advice_is_for_steps_that_travel_sparse(needs, dense, pin):
  state = sync_state.ZenSyncState(
    jnp.array(len(needs), jnp.int32), {"t": _leaf(needs, dense=dense)}
  )
  assert zenjax.advise(state).get("t") == pin


@functools.cache
def few_and_full() -> tuple[Any, ...]:
  """A step on four devices, its first state, and gradients of two densities."""
  n, rows, width = 4, 2000, 16
  tx = zenjax.zen_sync("data", sparse=True)
  step = jax.jit(jax.vmap(tx.update, axis_name="data"))
  rng = np.random.default_rng(0)
  full = rng.standard_normal((n, rows, width)).astype(np.float32)
  few = cases.keep(full, [rng.permutation(rows)[:20] for _ in range(n)])
  return step, jax.vmap(tx.init)(full), few, full


def test_steps_above_break_even_leave_no_mark_on_the_advice():
  """A full step among sparse ones, as a regularizer now and then makes it."""
  step, state, few, full = few_and_full()
  for stack in (few, full, few, few):
    got, state = step(stack, state)
    oracle.check(got, stack)
  mine = jax.tree.map(lambda x: x[0], state)
  ((push, pull),) = zenjax.advise(mine).values()
  assert 5 <= push <= 20 and push <= pull <= 80
  assert f"({push}, {pull})" in zenjax.report(mine)


def test_the_latest_steps_take_the_place_of_the_oldest():
  step, state, few, _ = few_and_full()
  state = state._replace(step=state.step + sync_state.HISTORY + 7)
  _, state = step(few, state)
  history = state.leaves["leaf"].history[0]
  assert np.flatnonzero(np.any(history != 0, axis=1)).tolist() == [7]

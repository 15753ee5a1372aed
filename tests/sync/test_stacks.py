"""Tables of one width and dtype travel as one table of all their rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runners
import scheme_names

import zenjax
from zenjax._src.core.arguments import Capacity
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.buffer_sizes import Table

N = 4
# Rows, columns and the share of rows that a device has.
TABLES = {
  "few": (700, 3, 0.02),
  "none": (90, 3, 0.0),
  "all": (300, 3, 1.0),
  "other": (500, 2, 0.05),  # of a width of its own
  "many": (41, 3, 0.3),
}


def drawn(seed):
  """Local gradients of all devices, `[N, R, D]` each."""
  rng = np.random.default_rng(seed)
  grads = {}
  for name, (rows, width, part) in TABLES.items():
    some = rng.random((N, rows, 1)) < part
    grads[name] = np.where(some, rng.normal(size=(N, rows, width)), 0)
  return jax.tree.map(lambda x: x.astype(np.float32), grads)


def listed(x):
  """The rows of `[N, R, D]` that are not zero, `[N, K]` ids and values."""
  room = max(1, max(np.count_nonzero(y.any(-1)) for y in x))
  ids = np.full((N, room), x.shape[1], np.int32)
  values = np.zeros((N, room, x.shape[2]), x.dtype)
  for device, y in enumerate(x):
    own = np.flatnonzero(y.any(-1))
    ids[device, : len(own)], values[device, : len(own)] = own, y[own]
  return ids, values


def run(tx, grads, steps=3, rows=False):
  """Synchronizes gradients so often; returns every copy, and the state."""
  params = {name: jnp.zeros(x.shape[1:]) for name, x in grads.items()}
  given = {name: listed(x) for name, x in grads.items()} if rows else grads

  def local(stack, axis):
    del axis
    grads, state = stack
    if rows:
      grads = {
        name: zenjax.SparseRows(*x, len(params[name]))
        for name, x in grads.items()
      }
    synced, state = tx.update(grads, state, params)
    if rows:
      synced = {name: x.to_dense() for name, x in synced.items()}
    return synced, state

  step = runners.RUNNERS["vmap"](local, N)
  state = jax.tree.map(lambda x: np.stack([x] * N), tx.init(params))
  synced, state = step((given, state))
  for _ in range(steps - 1):
    synced, state = step((given, state))
  return synced, jax.tree.map(lambda x: x[0], state)


@functools.cache
def all_tables(scheme, rows):
  """All tables, synchronized by one program that tests share."""
  tx = zenjax.zen_sync("data", sparse=True, scheme=scheme)
  return run(tx, drawn(0), rows=rows)


@pytest.mark.usually("zen-*")
@pytest.mark.parametrize("listing", [False, True], ids=["arrays", "rows"])
@pytest.mark.parametrize("scheme", scheme_names.OF_ROWS)
def test_stacked_tables_equal_tables_alone(scheme, listing):
  """Bit by bit, and in what they tell of each table."""
  tx = zenjax.zen_sync("data", sparse=True, scheme=scheme)
  synced, state = all_tables(scheme, listing)
  told = zenjax.stats(state)
  for name, local in drawn(0).items():
    mean = local.astype(np.float64).mean(0)
    np.testing.assert_allclose(synced[name][0], mean, rtol=1e-5, atol=1e-7)
    density = local.any(-1).mean()
    assert told[name]["density"] == pytest.approx(density, abs=1e-6)
    rows, width, _ = TABLES[name]
    assert (told[name]["num_rows"], told[name]["width"]) == (rows, width)
    dense = 2 * (N - 1) / N * rows * width * 4
    assert told[name]["dense_bytes"] == pytest.approx(dense)
    # Of one that travelled dense a sample is counted: exact where all rows are.
    union = local.any((0, -1)).mean()
    assert told[name]["union_density"] == pytest.approx(union, abs=1e-6)
  alone, state = run(tx, {"few": drawn(0)["few"]}, rows=listing)
  np.testing.assert_array_equal(synced["few"], alone["few"])
  own, together = zenjax.stats(state)["few"], told["few"]
  same = ("num_rows", "width", "density", "went_dense", "dense_bytes")
  assert {k: own[k] for k in same} == {k: together[k] for k in same}
  assert together["union_density"] == pytest.approx(own["union_density"])


def test_a_full_table_travels_dense_beside_sparse_ones():
  _, state = all_tables("zen", False)
  told = zenjax.stats(state)
  went = {name for name, numbers in told.items() if numbers["went_dense"]}
  assert "all" in went and "few" not in went
  # Once it is remembered, no sparse byte is spent on it.
  assert told["all"]["wire_bytes"] == told["all"]["dense_bytes"]


@pytest.mark.parametrize(
  "capacities", [pytest.param((2, 5), marks=pytest.mark.more), (1, 1)], ids=str
)
def test_rows_of_a_stack_that_do_not_fit_follow(capacities):
  grads = drawn(2)
  tx = zenjax.zen_sync("data", sparse=True, capacities=capacities)
  synced, _ = run(tx, grads, steps=1)
  for name, local in grads.items():
    mean = local.astype(np.float64).mean(0)
    np.testing.assert_allclose(synced[name][0], mean, rtol=1e-5, atol=1e-7)


@pytest.mark.usually("rows")
@pytest.mark.parametrize("rows", [False, True], ids=["arrays", "rows"])
def test_replicas_are_known_to_be_equal_on_two_axes(rows):
  """Owners of columns share ids out: types must not tell who counted them."""
  axes, grads = ("host", "device"), drawn(3)
  tx = zenjax.zen_sync(axes, sparse=True, partition="columns")
  state = tx.init({name: jnp.zeros(x.shape[1:]) for name, x in grads.items()})
  mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:N], (2, 2)), axes)
  given = {name: listed(x) for name, x in grads.items()} if rows else grads

  def step(stack, state):
    local: Any = jax.tree.map(lambda x: x[0], stack)
    if rows:
      local = {
        name: zenjax.SparseRows(ids, values, TABLES[name][0])
        for name, (ids, values) in local.items()
      }
    synced: Any
    synced, state = tx.update(local, state)
    if rows:
      synced = {name: x.to_dense() for name, x in synced.items()}
    return synced, state

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(jax.P(axes), jax.P()),
    out_specs=jax.P(),
    check_vma=True,
  )
  synced, state = jax.jit(mapped)(given, state)
  for name, local in grads.items():
    mean = local.astype(np.float64).mean(0)
    np.testing.assert_allclose(synced[name], mean, rtol=1e-5, atol=1e-7)
    density = zenjax.stats(state)[name]["density"]
    assert density == pytest.approx(local.any(-1).mean(), abs=1e-6)


def two_axes():
  return jax.sharding.Mesh(
    np.reshape(jax.devices()[:N], (2, 2)), ("data", "model")
  )


# Of eight columns it has as many as the other on each device: one stack.
@pytest.mark.parametrize("columns", [8, 16])
def test_one_of_two_tables_varies_over_another_axis(columns):
  """Its state is remembered, for all of the stack in one array."""
  mesh = two_axes()
  tx = zenjax.zen_sync("data", sparse=True)

  def step(a, b):
    grads = {"a": a, "b": b}
    _, state = tx.update(grads, tx.init(grads), None)
    synced: Any = tx.update(grads, state, None)[0]
    return synced["b"].sum()[None]

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(jax.P("data"), jax.P("data", "model")),
    out_specs=jax.P("model"),
    check_vma=True,
  )
  total = jax.jit(mapped)(jnp.ones((1200, 4)), jnp.ones((1200, columns)))
  np.testing.assert_array_equal(total, [300 * columns] * 2)


@pytest.mark.each_jax
def test_values_alone_vary_over_another_axis():
  """Ids and counts are the same there, and so is a state that comes back."""
  tuning = zenjax.Tuning(ids_first=True)
  tx = zenjax.zen_sync("data", sparse=True, output="rows", tuning=tuning)
  rows = 300

  def step(ids, values, state):
    grads: Any = {"t": zenjax.SparseRows(ids[0], values[0], rows)}
    synced: Any = tx.update(grads, state)
    return synced[0]["t"].to_dense(), synced[1]

  mapped = jax.shard_map(
    step,
    mesh=two_axes(),
    in_specs=(jax.P("data"), jax.P("data", None, "model"), jax.P()),
    out_specs=(jax.P(None, "model"), jax.P()),
    check_vma=True,
  )
  ids = np.array([[5, 9, 5], [-1, 5, 7]], np.int32)
  state = tx.init({"t": jnp.zeros((rows, 8))})
  got, _ = jax.jit(mapped)(ids, jnp.ones((2, 3, 8)), state)
  want = np.zeros((rows, 8))
  np.add.at(want, ids.ravel(), 0.5)
  np.testing.assert_array_equal(got, want)


def test_tables_alike_are_lowered_once():
  """A program of eight has little more than that of two."""

  def operations(count):
    def local(grads):
      tx = zenjax.zen_sync("data", sparse=True)
      return tx.update(grads, tx.init(grads))[0]

    grads = {
      f"table {i}": jnp.zeros((N, 600 + 40 * i, 4)) for i in range(count)
    }
    mapped = jax.vmap(local, axis_name="data", axis_size=N)
    text = jax.jit(mapped).lower(grads).as_text()
    return text.count(" = stablehlo.")

  two, eight = operations(2), operations(8)
  assert eight < 2.2 * two, (two, eight)


def plan_of(name, rows, width=4, dtype=jnp.float32, pinned=None, look_ups=None):
  dtype = jnp.dtype(dtype)
  table = Table(
    name=name,
    num_rows=rows,
    width=width,
    dtype=dtype,
    wire_dtype=dtype,
    look_ups=look_ups,
  )
  return buffer_sizes.plan_table(
    table,
    groups=8,
    column_groups=1,
    devices=8,
    pinned=pinned,
    seed=0,
    first_word=0,
  )


def names(plans):
  return [[table.name for table in plan.tables] for plan in plans]


def test_which_tables_are_stacked():
  plans = [
    plan_of("a", 1000),
    plan_of("b", 1000, width=5),
    plan_of("c", 33),
    plan_of("d", 1000, dtype=jnp.float16),
    plan_of("e", 1000, pinned=Capacity(3, 4)),
    plan_of("f", 70),
  ]
  stacked = buffer_sizes.stack(plans, devices=8)
  assert names(stacked) == [["a", "c", "f"], ["b"], ["d"], ["e"]]
  # Words of slots follow one another.
  ends = [plan.layout.first_word + plan.layout.words for plan in stacked]
  assert [plan.layout.first_word for plan in stacked] == [0, *ends[:-1]]
  first = stacked[0]
  assert first.layout.words == sum(p.layout.words for p in first.members)


def test_stacks_are_not_too_large():
  huge = buffer_sizes.MAX_ROWS // 5 * 2
  plans = [plan_of(name, huge) for name in "abc"]
  assert names(buffer_sizes.stack(plans, devices=8)) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
  ("width", "look_ups", "most"),
  [(1, None, 1), (4, None, 8), (64, None, 32), (1, 50, 32)],
)
def test_a_stack_has_not_too_many_tables(width, look_ups, most):
  plans = [plan_of(str(i), 100, width, look_ups=look_ups) for i in range(70)]
  parts = names(buffer_sizes.stack(plans, devices=8))
  assert sum(parts, []) == [str(i) for i in range(70)]
  assert [len(part) for part in parts[:-1]] == [most] * (len(parts) - 1)

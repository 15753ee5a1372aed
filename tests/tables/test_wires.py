"""Sharded tables whose rows and gradients are rounded when they are sent."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import row_wires
import runners
from sharded_steps import split
from sharded_steps import step_of
from stablehlo import collectives
from usual import usual

import zenjax
from zenjax._src.core import wire as wire_of_rows
from zenjax._src.tables import fetch

R, D, B, RATE = 600, 10, 48, 0.5
WIRES = (*row_wires.SCALED, "bfloat16")
LEVELS = {k: 2 * x for k, x in row_wires.HALF_LEVEL.items()} | {
  "bfloat16": 1 / 128
}


def table_of() -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.normal(size=(R, D)).astype(np.float32)


def batch_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(seed)
  ids = (rng.zipf(1.2, B) % R).astype(np.int32)
  return ids, rng.normal(size=(B, D)).astype(np.float32)


def sharded(n: int, wire: Any, table: Any = None) -> Any:
  table = table_of() if table is None else table
  return zenjax.tables.shard(
    table, runners.mesh(n), "data", tables=True, wire_dtype=wire
  )


def loss_fn(table, ids, y):
  return 0.5 * jnp.mean(jnp.sum((table[ids] - y) ** 2, axis=-1))


def sent(rows: np.ndarray, wire: str) -> np.ndarray:
  if wire == "bfloat16":
    return rows.astype(jnp.bfloat16).astype(np.float64)
  return row_wires.rounded(rows, wire)


def step_in_numpy(table, ids, y, n, wire) -> tuple[float, np.ndarray]:
  """One step of SGD in float64: rows come rounded, and so do their sums."""
  rows = sent(table[ids], wire)
  loss = 0.5 * np.mean(np.sum((rows - y) ** 2, axis=-1))
  total = np.zeros_like(table)
  for device in range(n):
    part = slice(device * B // n, (device + 1) * B // n)
    local = np.zeros_like(table)
    # The derivative of a lookup does not see the rounding of its row.
    np.add.at(local, ids[part], (rows[part] - y[part]) / (B // n))
    total += sent(local, wire)
  return loss, table - RATE * total / n


def made(n: int, wire: Any, way: str = "jit") -> tuple[Any, Any]:
  """A table with its state on `n` devices, and a step."""
  mesh, table = runners.mesh(n), sharded(n, wire)
  around = None if way == "data_parallel" else mesh
  tx = zenjax.sharded_optimizer(optax.sgd(RATE), "data", mesh=around)
  step = step_of(tx, loss_fn)
  if way == "data_parallel":
    step = zenjax.data_parallel(step, mesh, "data")
  return (table, zenjax.init_state(tx, table, mesh, "data")), jax.jit(step)


@pytest.mark.parametrize(
  ("wire", "n", "way"),
  [
    ("bfloat16", 4, "jit"),
    ("float8_e4m3fn", 8, "data_parallel"),
    ("int4", 2, "data_parallel"),
    # The others run with `-m more`.
    *(pytest.param(wire, 4, "jit", marks=pytest.mark.more) for wire in WIRES),
    *(
      pytest.param("int8", n, "jit", marks=pytest.mark.more) for n in (1, 2, 8)
    ),
  ],
)
def test_steps_are_those_of_the_model(wire, n, way):
  state, step = made(n, jnp.dtype(wire), way)
  wanted = table_of().astype(np.float64)
  for seed in range(3):
    batch = batch_of(seed)
    before = wanted
    loss, wanted = step_in_numpy(wanted, *batch, n, wire)
    state, got_loss = step(state, *split(batch, runners.mesh(n)))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-3)
    got = np.asarray(zenjax.tables.unshard(state[0]), np.float64)
    size = np.abs(wanted - before).max(axis=-1, keepdims=True) + 1e-9
    off = np.abs(got - wanted)
    assert (off <= 2 * LEVELS[wire] * size + 1e-6).all()
    assert (off > 1e-5).mean() < 5e-3
    wanted = got  # A number on the other side of a middle stays there.
  assert state[0].wire_dtype == jnp.dtype(wire)
  assert step._cache_size() == 1 or n == 1


@pytest.mark.parametrize("wire", usual(["bfloat16", "int8"], "int8"))
def test_lookups_are_the_same_on_any_number_of_devices(wire):
  """A device rounds its own rows, too, and rows that are not finite are NaN."""
  table, ids = table_of(), np.arange(0, R, 25, dtype=np.int32)
  table[25, 4] = np.nan
  if wire != "bfloat16":  # There an infinity arrives as one.
    table[50, 1] = np.inf
  look_up = jax.jit(zenjax.tables.apply(lambda table, ids: table[ids]))
  one, eight = (look_up(sharded(n, wire, table), ids) for n in (1, 8))
  np.testing.assert_array_equal(one, eight)
  with np.errstate(invalid="ignore"):
    want = sent(table[ids].astype(np.float64), wire)
  row_wires.agree(one, want, LEVELS[wire])


@pytest.mark.parametrize(
  "wire", [None, *usual(["bfloat16", "int8", "int4"], "int4")]
)
def test_a_step_sends_and_counts_what_is_declared(wire):
  n = 4
  state, step = made(n, wire)
  batch, table = split(batch_of(0), runners.mesh(n)), state[0]
  lowered = step.lower(state, *batch)
  found = [
    x.words
    for x in collectives(lowered)
    if x.op == "all_to_all" and not x.inside
  ]
  size = fetch.buffer_size(B // n, table.layout, ())
  ids, rows, _ = fetch.words_of_round(size, n, table.row_wire)
  # Slots of gradient rows may be a bitmap, which is shorter.
  pushed = rows + n * (1 + wire_of_rows.index_words(size, table.layout.slots))
  assert found == [ids, rows, pushed]
  columns = {None: 10, "bfloat16": 5, "int8": 4, "int4": 3}[wire]
  assert found[1] == n * size * columns
  state, _ = step(state, *batch)
  counted = zenjax.stats(state[1])["leaf"]
  if counted["rounds"] == counted["fetch_rounds"] == 1:
    others = 4 * (n - 1) / n
    assert counted["wire_bytes"] >= others * sum(found)
    assert counted["wire_bytes"] < others * sum(found) + 4 * 64
  if wire is None:  # The same program sends rows in their own dtype.
    state, step = made(n, jnp.float32)
    assert step.lower(state, *batch).as_text() == lowered.as_text()


def test_the_wire_stays_with_the_table():
  """Through checkpoints and on other devices; arrays have none."""
  state, _ = made(4, jnp.int8)
  saved = zenjax.to_checkpoint(state)
  assert saved[0].wire_dtype == jnp.int8
  moved = zenjax.from_checkpoint(saved, runners.mesh(2), "data")
  assert moved[0].wire_dtype == jnp.int8 and moved[0].devices == 2
  assert isinstance(zenjax.tables.unshard(moved[0]), jax.Array)


@pytest.mark.parametrize("before", [None, "int4"])
def test_a_state_goes_on_with_another_wire(before, as_optax_computes):
  """Moments have a row for each row, but are never sent."""
  mesh, adam = runners.mesh(2), optax.adam(0.1)
  shard = functools.partial(
    zenjax.tables.shard, mesh=mesh, axis_name="data", tables=True
  )
  params, state = shard(
    {"t": table_of()},
    wire_dtype=before,
    opt_state=adam.init({"t": table_of()}),
  )
  tx = zenjax.sharded_optimizer(adam, "data", mesh=mesh)
  structure = jax.tree.structure(zenjax.init_state(tx, params, mesh, "data"))
  assert jax.tree.structure(state) == structure
  params = shard(zenjax.tables.unshard(params), wire_dtype=jnp.int8)
  loss = lambda params, *batch: loss_fn(params["t"], *batch)
  step = jax.jit(step_of(tx, loss))
  (params, after), _ = step((params, state), *split(batch_of(0), mesh))
  assert params["t"].wire_dtype == jnp.int8
  assert jax.tree.structure(after) == structure


@pytest.mark.parametrize(
  ("wire", "shape", "kind", "words"),
  [
    (jnp.int16, (R, D), TypeError, "`wire_dtype` .*jnp.int8"),
    (jnp.int8, (R, 2), ValueError, "`wire_dtype` int8 .*2 columns"),
    (jnp.float32, (R, D), ValueError, "wider than bfloat16"),
  ],
)
def test_wires_that_are_refused(wire, shape, kind, words):
  table = jnp.zeros(shape, jnp.bfloat16 if "wider" in words else jnp.float32)
  with pytest.raises(kind, match=words):
    zenjax.tables.shard(
      table, runners.mesh(2), "data", tables=True, wire_dtype=wire
    )

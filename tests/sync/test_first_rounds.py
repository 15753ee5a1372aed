"""First rounds between hosts: as large as earlier steps have needed."""

import re
from typing import Any

import cases
import forced
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners
import steps

import zenjax

N, ROWS = 4, 40_000


def stepping(tx, tables, arrays=False):
  """Returns a step of `tx`, of look-ups `{name: (ids, values)}` and a state."""
  split = jax.P("data")

  def step(batch, state):
    rows = {
      name: zenjax.SparseRows(ids[0], values[0], tables[name].shape[0])
      for name, (ids, values) in batch.items()
    }
    if arrays:
      updates, state = tx.update(
        {k: x.to_dense() for k, x in rows.items()}, state
      )
      return {k: x[None] for k, x in updates.items()}, state
    updates, state = tx.update(rows, state)
    return {k: x.to_dense()[None] for k, x in updates.items()}, state

  return jax.jit(
    jax.shard_map(
      step,
      mesh=runners.mesh(N),
      in_specs=(split, jax.P()),
      out_specs=(split, jax.P()),
    )
  )


def beside(tx):
  """A step of look-ups of one table and an array `[N, R, D]`; a state."""
  split = jax.P("data")

  def step(batch, array, state):
    rows = zenjax.SparseRows(batch[0][0], batch[1][0], ROWS)
    return tx.update({"table": rows, "array": array[0]}, state)[1]

  specs = (split, split, jax.P())
  mesh = runners.mesh(N)
  return jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P())
  )


def placed(state):
  """On all devices, as a step returns it: it is compiled once."""
  return jax.device_put(state, jax.NamedSharding(runners.mesh(N), jax.P()))


def drawn(rng, table, count, look_ups):
  """`count` rows of each device as look-ups, and their gradient whole."""
  values = rng.standard_normal((N, *table.shape)).astype(table.dtype)
  ids = [np.sort(cases.draw(rng, len(table), count)) for _ in range(N)]
  stack = cases.keep(values, ids)
  ids = np.stack([np.pad(x, (0, look_ups - count), "edge") for x in ids])
  values = stack[np.arange(N)[:, None], ids]
  values[:, count:] = 0  # These repeat the last one.
  return (ids.astype(np.int32), values), stack


def run(tx, tables, counts, look_ups=2048, arrays=False):
  """Yields what each step shows of each table; sums are those of the oracle."""
  step, state = stepping(tx, tables, arrays), placed(tx.init(tables))
  rng = np.random.default_rng(0)
  for number, count in enumerate(counts):
    batch, stacks = {}, {}
    for name, table in tables.items():
      batch[name], stacks[name] = drawn(rng, table, count, look_ups)
    got, state = step(batch, state)
    for name, stack in stacks.items():
      label = f"step {number}, {name}"
      oracle.check(np.asarray(got[name]), stack, label=label)
      oracle.check_replicas(np.asarray(got[name]), label=label)
    yield zenjax.stats(state)


@pytest.mark.parametrize(
  "partition", ["hash", pytest.param("columns", marks=pytest.mark.more)]
)
def test_a_first_round_is_what_steps_have_needed(partition, monkeypatch):
  forced.between_hosts(monkeypatch)
  tx = zenjax.zen_sync("data", partition=partition)
  counts = [500] * 4 + [50] * 9 + [1400, 50] + [1400] * 2
  tables = {"table": jnp.zeros((ROWS, 32))}
  rounds, over = [], []
  for count, seen in zip(counts, run(tx, tables, counts)):
    (seen,) = seen.values()
    rounds.append(seen["rounds"])
    rows = count + seen["union_density"] * ROWS
    over.append(seen["wire_bytes"] / seen["dense_bytes"] * 2 * ROWS / rows)
  # Once seen, one round brings all, at little more than its rows.
  assert set(rounds[1:4]) == {1}
  assert max(over[1:4]) < 1.35
  # Fewer rows: a large round for four steps, then a small one.
  assert set(rounds[4:13]) == {1}
  assert over[7] > 3 > 2.5 > over[8]
  # More than ever: what is left follows. Both are remembered.
  assert rounds[13] > 1
  assert set(rounds[14:]) == {1}


@pytest.mark.parametrize(
  "partition", ["hash", pytest.param("columns", marks=pytest.mark.more)]
)
def test_arrays_have_room_for_a_vocabulary(partition, monkeypatch):
  """Few rows take few bytes, and a full table sends nothing beside its sum."""
  forced.between_hosts(monkeypatch)
  tx = zenjax.zen_sync("data", partition=partition)
  rows = 20_000
  tables = {"table": jnp.zeros((rows, 128))}
  counts = [150] * 4 + [10] * 6 + [rows] * 3 + [150] * 2
  found = [seen["table"] for seen in run(tx, tables, counts, rows, arrays=True)]
  rounds = [x["rounds"] for x in found]
  assert rounds[0] > 1 and set(rounds[3:10]) == {1}
  bytes_ = [x["wire_bytes"] / x["dense_bytes"] for x in found]
  assert bytes_[9] < 0.25 * bytes_[3] < 0.25 * bytes_[0]
  dense = [bool(x["went_dense"]) for x in found]
  assert dense == [False] * 10 + [True] * 4 + [False]
  assert max(bytes_[11:13]) < 1.001


@pytest.mark.parametrize(
  "options",
  [
    pytest.param({"wire_dtype": jnp.bfloat16}, marks=pytest.mark.each_jax),
    pytest.param(
      {"tuning": zenjax.Tuning(ids_first=True)}, marks=pytest.mark.more
    ),
  ],
  ids=["16 bits", "ids first"],
)
def test_several_tables_share_a_first_round(options, monkeypatch):
  forced.between_hosts(monkeypatch, parts=(1, 8))
  tx = zenjax.zen_sync("data", **options)
  dtype = jnp.bfloat16 if "wire_dtype" in options else jnp.float32
  # Two travel as one, another beside them, and one has too few for slices.
  shapes = {"a": (ROWS, 31), "b": (ROWS // 2, 31), "c": (ROWS, 64)}
  tables = {k: jnp.zeros(x, dtype) for k, x in (shapes | {"d": (9, 3)}).items()}
  counts = [8, 8, 8, 9, 9]
  first, *known = run(tx, tables, counts, 1024)
  for seen in known:
    assert {x["rounds"] for x in seen.values()} == {1}
  last = known[-1].values()
  dense = sum([x["dense_bytes"] for x in last])
  assert sum([x["wire_bytes"] for x in last]) < 0.01 * dense
  assert sum([x["wire_bytes"] for x in first.values()]) > 0.01 * dense


def test_ids_are_cut_where_they_travel_as_a_list(monkeypatch):
  """Of a table with many slots, in which a bitmap would be longer."""
  forced.between_hosts(monkeypatch)
  tx = zenjax.zen_sync("data", partition="hash")
  tables = {"table": jnp.zeros((200_000, 16))}
  counts = (300, 300, 1200, 300)
  found = [seen["table"] for seen in run(tx, tables, counts)]
  assert [x["rounds"] > 1 for x in found] == [False, False, True, False]
  rows = counts[1] + found[1]["union_density"] * 200_000
  least = 0.75 * rows * (16 * 4 + 4)
  assert least < found[1]["wire_bytes"] < 1.4 * least


def test_arrays_beside_rows_leave_these_their_sizes(monkeypatch):
  """One part is sent of all buffers: what arrays need would decide it."""
  forced.between_hosts(monkeypatch, parts=(1, 4, 8))
  rows, array = jnp.zeros((ROWS, 32)), jnp.zeros((ROWS, 128))
  tx, rng = zenjax.zen_sync("data"), np.random.default_rng(0)
  step, state = stepping(tx, {"table": rows}), placed(tx.init({"table": rows}))
  both, many = beside(tx), placed(tx.init({"table": rows, "array": array}))
  batch, _ = drawn(rng, rows, 100, 2048)
  other = np.zeros((N, *array.shape), np.float32)  # Needs what was guessed.
  for _ in range(3):
    _, state = step({"table": batch}, state)
    many = both(batch, other, many)
  alone, joined = [
    zenjax.stats(x)["table"]["wire_bytes"] for x in (state, many)
  ]
  assert joined < 1.1 * alone


def test_few_look_ups_keep_their_buffers(monkeypatch):
  """Slices would make them longer: nothing is compiled for them."""
  forced.between_hosts(monkeypatch)
  tx = zenjax.zen_sync("data")
  tables = {"table": jnp.zeros((4_000, 64))}
  seen, again = run(tx, tables, (90, 10), 100)
  assert seen["table"]["wire_bytes"] == again["table"]["wire_bytes"]
  monkeypatch.undo()
  (alone,) = run(tx, tables, (90,), 100)
  assert seen == alone


@pytest.mark.more
def test_a_checkpoint_has_the_sizes(monkeypatch):
  """A state that went through the disk takes the same bytes."""
  forced.between_hosts(monkeypatch)
  tx, tables = zenjax.zen_sync("data"), {"table": jnp.zeros((ROWS, 32))}
  *_, before = run(tx, tables, [300] * 3)
  step, state = stepping(tx, tables), tx.init(tables)
  rng = np.random.default_rng(0)
  for _ in range(3):
    batch, _ = drawn(rng, tables["table"], 300, 2048)
    _, state = step({"table": batch}, jax.tree.map(np.asarray, state))
  assert zenjax.stats(state) == before


BESIDE = {
  "alone": {},
  "beside a wider": {"other": (1_100, 40)},
  "in a stack": {"other": (1_100, 24)},
  "beside a larger": {"other": (ROWS, 40)},
}


@pytest.mark.parametrize(
  "beside",
  [
    pytest.param("alone", marks=pytest.mark.more),
    pytest.param("beside a wider", marks=pytest.mark.more),
    pytest.param("in a stack", marks=pytest.mark.each_jax),
    pytest.param("beside a larger", marks=pytest.mark.more),
  ],
)
def test_rows_above_break_even_are_summed_whole(beside, monkeypatch):
  """They travel as arrays, which those of a larger table do not become."""
  forced.between_hosts(monkeypatch, parts=(8, 16))
  shapes = {"full": (1_500, 24), **BESIDE[beside]}
  tables = {name: jnp.zeros(x) for name, x in shapes.items()}
  counts = (1_000, 1_000, 900, 20, 20, 1_000)
  found = [*run(zenjax.zen_sync("data"), tables, counts, 1024)]
  full = [seen["full"] for seen in found]
  dense = [x["went_dense"] for x in full]
  for count, seen in zip(counts, full):
    assert seen["density"] == pytest.approx(count / 1_500, rel=1e-6)
  if beside == "beside a larger":  # Which never is full.
    assert not any(dense)
    return
  assert dense == [True, True, True, True, False, True]
  for step in (1, 2, 3):
    # The table as float32, and a byte that counts each row.
    whole = 2 * (N - 1) / N * 1_500 * (24 * 4 + 1)
    assert full[step]["wire_bytes"] == pytest.approx(whole, rel=1e-6)
    assert full[step]["rounds"] == 0
  union = full[2]["union_density"]
  assert union == pytest.approx(1 - (1 - 900 / 1_500) ** 4, abs=0.02)
  for seen in found:
    assert len({x["went_dense"] for x in seen.values()}) == 1


def test_fewer_look_ups_than_rows_compile_no_sum(monkeypatch):
  """Rows of all devices together that cannot be those of the whole table."""
  forced.between_hosts(monkeypatch, parts=(8, 16))
  tx, few, many = zenjax.zen_sync("data"), 250, 1024
  for look_ups, sums in ((few, 0), (many, 2)):
    tables = {"table": jnp.zeros((1_500, 24))}
    step, state = stepping(tx, tables), tx.init(tables)
    ids = jnp.zeros((N, look_ups), jnp.int32)
    batch = {"table": (ids, jnp.zeros((N, look_ups, 24)))}
    traced = step.trace(batch, state)
    text = traced.lower().as_text()
    assert text.count("stablehlo.all_reduce") == sums
    # Who holds which row is summed with what else a full table counts.
    always = steps.collectives_outside_cond(traced.jaxpr)
    assert not [name for name in always if name.startswith("psum")]


def test_rows_that_are_many_are_summed_whole_beside_fewer(monkeypatch):
  """All are arrays then, of which each takes the way that it needs."""
  forced.between_hosts(monkeypatch, parts=(8, 16))
  tables = {"full": jnp.zeros((4_000, 32)), "other": jnp.zeros((8_000, 40))}
  tx, rng = zenjax.zen_sync("data"), np.random.default_rng(0)
  step, state = stepping(tx, tables), placed(tx.init(tables))
  for _ in range(2):
    batch = {
      name: drawn(rng, tables[name], count, 2048)[0]
      for name, count in (("full", 2_000), ("other", 20))
    }
    _, state = step(batch, state)
  seen = zenjax.stats(state)
  assert seen["full"]["went_dense"] and not seen["other"]["went_dense"]


def test_rows_are_written_where_they_lie(monkeypatch):
  """XLA copies them first where it sees the dimension that a batch lost."""
  forced.between_hosts(monkeypatch, parts=(8, 16))
  tables = {"table": jnp.zeros((1_500, 128))}
  tx = zenjax.zen_sync("data")
  step, state = stepping(tx, tables), tx.init(tables)
  ids, values = np.zeros((N, 1024), np.int32), np.zeros((N, 1024, 128))
  batch = {"table": (ids, values.astype(np.float32))}
  text = str(step.lower(batch, state).compile().as_text())
  assert "f32[1024,1,128]" in text
  assert not re.search(r"f32\[1024,1,128\]\S* (copy|fusion)\(", text)


def looked_up(unique):
  """Ids of rows 3 (from the end), 5, 7 and 9 of 64, and padding."""
  rows, device = 64, np.arange(N)[:, None]
  ids = np.array([3 - rows, 5, 7, 9, rows, 3, -rows - 1] + 9 * [rows])
  ids = np.tile(ids, (N, 1))
  if unique:
    ids[:, 5] = rows
  ids[1:, 3] = rows  # One device alone holds row 9.
  values = np.random.default_rng(0).standard_normal((*ids.shape, 8))
  values[:, 1] = np.where(device == 0, 1 - N, 1)  # Row 5 sums to zero,
  values[:, 2] = 0  # and row 7 is zero on all.
  values[(ids == rows) | (ids < -rows)] = np.nan
  return rows, ids, values.astype(np.float32)


@pytest.mark.each_jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("unique", [True, False])
def test_rows_that_travel_as_arrays_are_those_looked_up(
  unique, dtype, monkeypatch
):
  """Sums of zero too; padding is nothing, whatever it holds.

  In one exchange, or in two of which the first counts for both.
  """
  forced.between_hosts(monkeypatch, parts=(8, 16))
  rows, ids, values = looked_up(unique)
  tables = {
    "table": jnp.zeros((rows, 8), dtype),
    "wider": jnp.zeros((rows, 16), dtype),
  }
  tuning = zenjax.Tuning(overlap=not unique)
  tx = zenjax.zen_sync("data", sparse=True, tuning=tuning)
  state = tx.init(tables)

  def step(ids, values, state):
    found: Any = {}
    for name, width in (("table", 8), ("wider", 16)):
      own = jnp.tile(values[0].astype(dtype), (1, width // 8))
      own = zenjax.SparseRows(ids[0], own, rows)
      found[name] = own.as_unique() if unique else own
    found, state = tx.update(found, state)
    return {k: (x.indices, x.values) for k, x in found.items()}, state

  split = jax.P("data")
  run = jax.shard_map(
    step,
    mesh=runners.mesh(N),
    in_specs=(split, split, jax.P()),
    out_specs=jax.P(),
  )
  found, state = jax.jit(run)(ids, values, state)
  given = np.asarray(jnp.asarray(values, dtype).astype(jnp.float32))
  want = np.zeros((rows, 8))
  for device in range(N):
    for i, value in zip(ids[device], given[device]):
      if -rows <= i < rows:
        want[i] += value.astype(np.float64) / N
  for name, width in (("table", 8), ("wider", 16)):
    at, sums = [np.asarray(x) for x in found[name]]
    assert at[at < rows].tolist() == [3, 5, 7, 9]
    near = 1e-6 if dtype == "float32" else 2e-2
    sums = sums.astype(np.float64)
    np.testing.assert_allclose(sums, np.tile(want, width // 8), near, near)
    assert not np.any(sums[[i for i in range(rows) if i not in (3, 9)]])
    seen = zenjax.stats(state)[name]
    assert seen["union_density"] == 4 / rows
    assert seen["pull_imbalance"] >= 1


@pytest.mark.each_jax
def test_no_look_ups_travel_as_an_array(monkeypatch):
  """Of a table with no more rows than there are devices."""
  forced.between_hosts(monkeypatch, parts=(8, 16))
  tx = zenjax.zen_sync("data", sparse=True)

  def step(ids, values):
    updates: Any = {"table": zenjax.SparseRows(ids[0], values[0], N)}
    state = tx.init({"table": jnp.zeros((N, 8))})
    found: Any = tx.update(updates, state)[0]
    return found["table"].indices, found["table"].values

  split = jax.P("data")
  run = jax.shard_map(
    step, mesh=runners.mesh(N), in_specs=(split, split), out_specs=jax.P()
  )
  none = np.zeros((N, 0), np.int32), np.zeros((N, 0, 8), np.float32)
  at, sums = jax.jit(run)(*none)
  assert np.all(np.asarray(at) == N) and not np.any(np.asarray(sums))


@pytest.mark.parametrize(
  "options",
  [{"capacities": (40, 64)}, {"scheme": "all_gather"}],
  ids=["pinned", "a scheme"],
)
def test_rows_of_which_something_is_said_stay_rows(options, monkeypatch):
  forced.between_hosts(monkeypatch, parts=(8, 16))
  tables = {"table": jnp.zeros((1_500, 24))}
  counts = (1_000, 1_000)
  for seen in run(zenjax.zen_sync("data", **options), tables, counts, 1024):
    assert not seen["table"]["went_dense"]

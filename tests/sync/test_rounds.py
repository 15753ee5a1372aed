"""Loops that send the rest: nothing is lost between pushes and pulls.

The tables have slots enough for chunks of both sizes, and densities from one
that the first round holds to one where the table is summed dense.
"""

import functools
import re

import cases
import declaring
import forced
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners
import scheme_names

import zenjax
from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.schemes import base
from zenjax.kernels.reference import Union

N, ROWS, WIDTH = 4, 6000, 2
DENSITIES = (0.0002, 0.004, 0.02, 0.05, 0.08, 0.12, 0.2, 0.6)


@pytest.mark.parametrize(
  "partition, sizes",
  [
    ("hash", "one"),
    ("hash", "two"),
    pytest.param("columns", "one", marks=pytest.mark.more),
    pytest.param("columns", "two", marks=pytest.mark.more),
  ],
)
def test_every_density_comes_back_whole(partition, sizes, monkeypatch):
  if sizes == "two":
    forced.two_sizes(monkeypatch)
  tx = zenjax.zen_sync("data", sparse=True, partition=partition)
  step = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data"))
  rng = np.random.default_rng(0)
  rounds, dense = [], []
  for density in DENSITIES:
    stack = rng.standard_normal((N, ROWS, WIDTH)).astype(np.float32)
    ids = [cases.draw(rng, ROWS, ROWS * density) for _ in range(N)]
    stack = cases.keep(stack, ids)
    got, state = step(stack)
    oracle.check(got, stack, label=f"density {density}")
    seen = zenjax.stats(jax.tree.map(lambda x: x[0], state))["leaf"]
    rounds.append(seen["rounds"])
    dense.append(bool(seen["went_dense"]))
    if not dense[-1]:
      union = len(np.unique(np.concatenate(ids))) / ROWS
      assert seen["union_density"] == pytest.approx(union, abs=1e-6)
  # All in the first, several turns of both sizes, dense.
  assert rounds[0] == 1
  assert max(rounds) >= 4
  assert dense[-1] and not any(dense[:4])


@pytest.mark.parametrize("runner", ["vmap", "shard_map_vma_replicated"])
def test_accelerators_sum_dense_tables_behind_one_condition(
  runner, monkeypatch
):
  """Some of tables that travel as one, and one of another width."""
  forced.for_accelerators(monkeypatch)
  rng = np.random.default_rng(0)
  wide = {"a": 0.6, "b": 0.002, "c": 0.6, "other": 0.6, "few": 0.002}
  stacks = {}
  for name, density in wide.items():
    width = 3 if name in ("other", "few") else WIDTH
    ids = [cases.draw(rng, ROWS, ROWS * density) for _ in range(N)]
    stack = rng.standard_normal((N, ROWS, width)).astype(np.float32)
    stacks[name] = cases.keep(stack, ids)
  tx = zenjax.zen_sync("data", sparse=True)

  step = lambda grads, axis: tx.update(grads, tx.init(grads))
  got, state = runners.RUNNERS[runner](step, N)(stacks)
  seen = zenjax.stats(jax.tree.map(lambda x: x[0], state))
  for name, density in wide.items():
    oracle.check(got[name], stacks[name], label=name)
    assert bool(seen[name]["went_dense"]) == (density > 0.1), name


@pytest.mark.each_jax
@pytest.mark.parametrize("scheme", scheme_names.SPARSE_NAMES)
def test_under_vmap_loops_turn_on_what_devices_agree_on(scheme):
  """On flags of each device every turn would select between whole tables."""
  tx = zenjax.zen_sync("data", sparse=True, scheme=scheme)
  stack = jnp.zeros((N, ROWS, WIDTH))
  state = jax.tree.map(lambda x: jnp.stack([x] * N), tx.init(stack[0]))
  step = jax.jit(jax.vmap(tx.update, axis_name="data"))
  text = step.lower(stack, state).as_text(debug_info=True)
  named = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.M))
  wide = rf"stablehlo.select .*tensor<{N}x{ROWS}x{WIDTH}xf32> loc\((.*?)\)"
  found = [named[at] for at in re.findall(wide, text)]
  # By its own flags a device clears signs of zeros, and reads no full table.
  assert found or scheme_names.in_blocks(scheme)
  assert not [name for name in found if "rounds" in name or "dense" in name]


def test_chunks_come_in_two_sizes_where_slots_are_many(monkeypatch):
  forced.two_sizes(monkeypatch)
  shape = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
  plan = declaring.declare(shape, ("data",), (N,), partition="hash").plans[0]
  large, small = plan.chunks
  assert large.push > 2 * small.push
  assert large.pull > 2 * small.pull


def test_large_chunks_carry_what_is_much(monkeypatch):
  """Turns are fewer by far than small chunks alone would need."""
  forced.two_sizes(monkeypatch)
  push, rows = 40, 720
  tx = zenjax.zen_sync("data", sparse=True, capacities=(push, 10 * push))
  step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
  rng = np.random.default_rng(0)
  stack = rng.standard_normal((N, ROWS, WIDTH)).astype(np.float32)
  stack = cases.keep(stack, [cases.draw(rng, ROWS, rows) for _ in range(N)])
  got, state = jax.jit(step)(stack)
  oracle.check(got, stack)
  seen = zenjax.stats(jax.tree.map(lambda x: x[0], state))["leaf"]
  # A small chunk is an eighth of what was pinned.
  small_turns = (rows // N - push) // (push // 8)
  assert 4 <= seen["rounds"] <= 2 * small_turns / 3


def test_a_table_that_travels_dense_returns_well_below_break_even():
  tx = zenjax.zen_sync("data", sparse=True, partition="hash")
  rng = np.random.default_rng(0)

  @jax.jit
  def step(stack, state):
    return jax.vmap(tx.update, axis_name="data")(stack, state)[1]

  def went(*densities):
    """Returns which steps of a run with these densities travelled dense."""
    state = tx.init(jnp.zeros((ROWS, WIDTH)))
    state = jax.tree.map(lambda x: jnp.stack([x] * N), state)
    dense = []
    for density in densities:
      ids = [cases.draw(rng, ROWS, ROWS * density) for _ in range(N)]
      stack = cases.keep(np.ones((N, ROWS, WIDTH), np.float32), ids)
      state = step(stack, state)
      seen = zenjax.stats(jax.tree.map(lambda x: x[0], state))["leaf"]
      dense.append(bool(seen["went_dense"]))
    return dense

  grid = np.linspace(0.1, 0.3, 21)
  least = next(density for density in grid if went(density)[0])
  assert least > grid[1]
  below, far_below = 0.9 * least, 0.6 * least
  assert went(below, below) == [False, False]
  assert went(0.6, below, below, below) == [True] * 4
  assert went(0.6, far_below, far_below) == [True, True, False]


def test_devices_agree_on_samples_of_a_round_that_was_not_sent():
  """One has all rows, the others none: each alone would decide otherwise."""
  tx = zenjax.zen_sync("data", sparse=True)
  step = jax.jit(jax.vmap(tx.update, axis_name="data"))
  state = tx.init(jnp.zeros((ROWS, WIDTH)))
  state = jax.tree.map(lambda x: jnp.stack([x] * N), state)
  full = np.ones((N, ROWS, WIDTH), np.float32)
  alone = cases.keep(full, [np.arange(ROWS), *[np.arange(0)] * (N - 1)])
  for stack in (full, full, alone):
    _, state = step(stack, state)
    for leaf in jax.tree.leaves(state):
      np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * N))
  seen = zenjax.stats(jax.tree.map(lambda x: x[0], state))["leaf"]
  assert seen["wire_bytes"] == seen["dense_bytes"]
  assert seen["density"] == pytest.approx(1 / N, rel=0.01)


# Of a step: densities of two tables, which travel dense, and whether both were
# known to.
STEPS = [
  ((1.0, 0.7), (True, True), False),
  ((1.0, 0.7), (True, True), True),
  ((0.9, 0.01), (True, True), True),  # Samples show that the second changed.
  ((1.0, 0.01), (True, False), False),
  ((0.01, 1.0), (True, True), False),
  ((0.01, 1.0), (False, True), False),
  ((1.0, 1.0), (True, True), False),
  ((1.0, 1.0), (True, True), True),
]


def stepping(tx):
  """Returns a step of `tx`, of a stack of gradients and a state."""
  spec = jax.P("data")

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=runners.mesh(N),
    in_specs=(spec, jax.P()),
    out_specs=(spec, jax.P()),
  )
  def step(stack, state):
    updates, state = tx.update(jax.tree.map(lambda x: x[0], stack), state)
    return jax.tree.map(lambda x: x[None], updates), state

  return step


@pytest.mark.usually("all_gather", "split_dense_gather")
@pytest.mark.parametrize("scheme", scheme_names.OF_ROWS)
def test_every_scheme_leaves_out_the_round_of_a_dense_table(scheme):
  tx = zenjax.zen_sync("data", sparse=True, scheme=scheme)
  step, state = stepping(tx), tx.init(jnp.zeros((ROWS, WIDTH)))
  rng = np.random.default_rng(0)
  over = []
  for density in (1.0, 1.0, 0.001, 0.001, 1.0):
    stack = rng.standard_normal((N, ROWS, WIDTH)).astype(np.float32)
    stack = cases.keep(
      stack, [cases.draw(rng, ROWS, ROWS * density) for _ in range(N)]
    )
    got, state = step(stack, state)
    oracle.check(np.asarray(got), stack, label=f"density {density}")
    oracle.check_replicas(np.asarray(got), label=f"density {density}")
    (seen,) = zenjax.stats(state).values()
    over.append(seen["wire_bytes"] / seen["dense_bytes"])
  first, known, changed, sparse, again = over
  assert known == changed == 1
  assert sparse < 1 < first == pytest.approx(again)


@pytest.mark.usually("2-3")
@pytest.mark.parametrize("widths", [(2, 3), (2, 2)], ids=["2-3", "stacked"])
def test_what_is_known_to_be_dense_sends_nothing_beside_its_sum(widths):
  tx = zenjax.zen_sync("data", sparse=True)
  step = stepping(tx)
  rng = np.random.default_rng(0)
  names = ["a", "b"]
  state = tx.init({k: jnp.zeros((ROWS, w)) for k, w in zip(names, widths)})
  for number, (densities, dense, known) in enumerate(STEPS):
    stack = {}
    for name, width, density in zip(names, widths, densities):
      ids = [cases.draw(rng, ROWS, ROWS * density) for _ in range(N)]
      values = rng.standard_normal((N, ROWS, width)).astype(np.float32)
      stack[name] = cases.keep(values, ids)
    got, state = step(stack, state)
    seen = zenjax.stats(state)
    for name, went in zip(names, dense):
      result = np.asarray(got[name])
      oracle.check(result, stack[name], label=f"step {number}")
      oracle.check_replicas(result, label=f"step {number}")
      assert bool(seen[name]["went_dense"]) == went, (number, name)
    sent = sum([x["wire_bytes"] for x in seen.values()])
    whole = sum([x["dense_bytes"] for x in seen.values()])
    if known:
      assert sent == whole, number
    elif all(dense):
      assert whole < sent < 1.12 * whole, number
    else:
      assert sent < 0.8 * whole, number


def test_sums_of_counts_stop_at_the_largest_int32():
  most = np.iinfo(np.int32).max
  for counts in ([3, 4], [2**30, 2**29 + 1], [2**30, 2**30], [most] * 5):
    total = wire.sum_counts(jnp.array(counts, jnp.int32))
    assert int(total) == min(sum(counts), most)


@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("level", [0, 12, len(wire.PARTS) - 1])
def test_slices_that_travel_come_where_they_belong(collective, level):
  """Cut sections come up to their slice and zeros follow; others come whole."""
  rng = np.random.default_rng(0)
  parts = N if collective == "all_to_all" else 1
  shapes = [(parts, 3), (parts, 64), (parts, 96, 5), (parts, 7)]
  is_cut = [False, True, True, False]
  sections = [rng.integers(1, 99, (N, *x), np.int32) for x in shapes]

  def swap(*sections):
    (came,) = wire.exchange(
      [[x[0] for x in sections]],
      getattr(collectives, collective),
      ("data",),
      cut=wire.Cut(jnp.int32(level), [is_cut]),
    )
    return [x[None] for x in came]

  split = jax.P("data")
  swap = jax.shard_map(
    swap, mesh=runners.mesh(N), in_specs=split, out_specs=split, check_vma=False
  )
  for sent, came, cut in zip(sections, jax.jit(swap)(*sections), is_cut):
    want = sent.swapaxes(0, 1) if parts == N else np.stack([sent[:, 0]] * N)
    if cut:
      end = want.shape[2] // wire.SLICES * wire.PARTS[level]
      want[:, :, end:] = 0
    np.testing.assert_array_equal(came, want)


@pytest.mark.parametrize("sent", [3, 5, 8])
@pytest.mark.parametrize("offset", [0, 2])
def test_a_part_of_a_section_ends_where_a_shorter_one_does(offset, sent):
  slots = jnp.array([1, 4, 5, 9, 12, 20, 20, 20, 20], jnp.int32)
  union = Union(
    slots=slots,
    rows=jnp.arange(9.0)[:, None] + 1,
    total=jnp.int32(5),
    limit=jnp.int32(20),
    merged=jnp.int32(7),
  )
  part = base.section(union, offset, 8, jnp.int32(sent))
  want = base.section(union, offset, sent)
  assert (part.total, part.limit) == (want.total, want.limit)
  np.testing.assert_array_equal(part.slots[:sent], want.slots)
  np.testing.assert_array_equal(part.rows[:sent], want.rows)
  assert np.all(part.slots[sent:] >= 20)

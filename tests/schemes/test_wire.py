"""What is sent: collectives and bytes of the lowered program, as declared."""

import itertools
from typing import Any

import declaring
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import pytest
import runners
import scheme_names
from stablehlo import collectives
import steps

import zenjax


def lower(tables: dict[str, jax.ShapeDtypeStruct], n: int, **kwargs: Any):
  """A step that only synchronizes, lowered for `n` devices."""
  return steps.lower_sync(tables, runners.mesh(n), **kwargs)


def table(rows: int, width: int, dtype: Any = jnp.float32):
  return jax.ShapeDtypeStruct((rows, width), dtype)


# A case with a constant stands where platforms differ: around the dense path,
# and around the first round, which CPUs may leave out.
DENSE = ("stablehlo.case", "stablehlo.while")


def first_round(found: list) -> list:
  """Collectives of the first round.

  Most schemes leave them out where all tables are known to be dense; samples
  of these are then summed.
  """
  may_rest = ("stablehlo.case", "stablehlo.case")
  sums = [f for f in found if f.inside == may_rest and f.op == "all_reduce"]
  assert all(f.words <= 8 * 32 and f.dtype == "i32" for f in sums)
  cases = [f for f in found if f.inside == may_rest and f not in sums]
  outside = [f for f in found if not f.inside]
  assert bool(sums) == bool(cases) and not (cases and outside)
  return cases or outside


def loops(found: list) -> list:
  """Collectives of the rounds that follow."""
  return [f for f in found if set(f.inside) == {"stablehlo.while"}]


# Small capacities travel as slots, large ones as a bitmap.
_FORMATS = _SLOTS, _BITMAP = (3, 5), (60, 120)
_NAMES = {_SLOTS: "slots", _BITMAP: "bitmap"}


_ZEN = [("zen", "hash"), ("zen", "columns"), ("zen", 2)]
_PEERS = [(name, "auto") for name in scheme_names.PEERS]


# These are for their format on the wire: not all of them would pay.
@pytest.mark.usually(
  "*-8-None",
  "*-auto-8-slots",
  "zen-hash-8-*",
  "zen-hash-2-bitmap",
  "zen-columns-?-slots",
  "zen-2-?-bitmap",
)
@pytest.mark.filterwarnings("ignore:`capacities` of leaf")
@pytest.mark.parametrize(
  ("scheme", "partition", "n", "pinned"),
  [
    *(
      (*s, *n)
      for s in _ZEN
      for n in [*itertools.product([2, 8], _FORMATS), (8, None)]
    ),
    *((*s, n, form) for s in _PEERS for n in (8, 2) for form in _FORMATS),
  ],
  ids=lambda x: _NAMES.get(x),
)
def test_lowered_program_sends_what_is_declared(scheme, partition, n, pinned):
  tables = {"a": table(2000, 24), "b": table(1111, 5, jnp.bfloat16)}
  unit = 8 if scheme_names.in_blocks(scheme) else "row"
  kwargs: Any = dict(
    scheme=scheme, partition=partition, capacities=pinned, unit=unit
  )
  seen = collectives(lower(tables, n, **kwargs))
  declared = declaring.declare(tables, ("data",), (n,), **kwargs)
  first, looped = first_round(seen), loops(seen)
  assert [(f.op, f.words, f.dtype) for f in first] == [
    (m.op, m.words, "ui32") for m in declared.first
  ]
  dense = [f for f in seen if f.inside == DENSE]
  assert [(f.op, f.words) for f in dense] == [
    (m.op, m.words) for turn in declared.dense for m in turn
  ]
  assert [(f.op, f.words) for f in looped] == [
    (m.op, m.words) for turn in declared.loops for m in turn
  ]
  told = [f for f in seen if set(f.inside) == {"stablehlo.case"}]
  rest = [f for f in seen if f not in [*first, *looped, *dense]]
  assert rest == [f for f in told if f.op == "all_reduce"]
  assert declared.received_bytes > 0


@pytest.mark.usually("*-True")
@pytest.mark.parametrize(
  ("scheme", "partition", "ids_first"),
  [
    *((*s, first) for s in _ZEN for first in (False, True)),
    *((*s, False) for s in _PEERS if s[0] in scheme_names.OF_ROWS),
  ],
)
def test_rows_send_what_is_declared(scheme, partition, ids_first):
  """Look-ups of a large table beside an array; no dense path for them."""

  def tables(ids, values):
    return {
      "rows": zenjax.SparseRows(ids, values, 1_000_000),
      "array": jnp.zeros((2000, 24)),
    }

  args = (jax.ShapeDtypeStruct((96,), jnp.int32), table(96, 16))
  kwargs: Any = dict(
    scheme=scheme,
    partition=partition,
    tuning=zenjax.Tuning(ids_first=ids_first),
  )
  sync = zenjax.zen_sync("data", sparse=True, **kwargs)
  state = jax.eval_shape(sync.init, jax.eval_shape(tables, *args))
  step = jax.shard_map(
    lambda i, v, s: sync.update(zenjax.unreduced(tables(i, v), "data"), s),
    mesh=runners.mesh(8),
    in_specs=P(),
    out_specs=P(),
  )
  seen = collectives(jax.jit(step).lower(*args, state))
  shapes = jax.eval_shape(tables, *args)
  declared = declaring.declare(shapes, ("data",), (8,), **kwargs)
  first = [(f.op, f.words) for f in seen if not f.inside]
  assert first == [(m.op, m.words) for m in declared.first]
  if ids_first:
    one, more, *_ = declared.first
    # Of 96 look-ups some words; the array's rows go with the values.
    assert one.words <= 8 * (2 + 96) and more.words > one.words
  looped = [f for f in seen if set(f.inside) == {"stablehlo.while"}]
  assert [(f.op, f.words) for f in looped] == [
    (m.op, m.words) for turn in declared.loops for m in turn
  ]
  dense = [f for f in seen if f.inside and f not in looped]
  assert len(dense) == len([m for turn in declared.dense for m in turn])


def test_overlap_sends_each_table_by_itself():
  tables = {"a": table(2000, 24), "b": table(1111, 5, jnp.bfloat16)}
  seen = collectives(lower(tables, 4, tuning=zenjax.Tuning(overlap=True)))
  first = [(f.op, f.words) for f in first_round(seen)]
  declared = declaring.declare(
    tables, ("data",), (4,), tuning=zenjax.Tuning(overlap=True)
  )
  # All pushes are sent before the first of them is summed.
  ops = ["all_to_all"] * 2 + ["all_gather"] * 2
  assert [op for op, _ in first] == ops
  assert sorted(first) == sorted((m.op, m.words) for m in declared.first)
  each = [
    declaring.declare({name: tables[name]}, ("data",), (4,)) for name in "ab"
  ]
  assert declared.first == [m for part in each for m in part.first]
  assert len(first) == 2 * len(declaring.declare(tables, ("data",), (4,)).first)


@pytest.mark.parametrize("n", [3, 5, 6])
def test_recursive_doubling_folds_what_is_no_power_of_two(n):
  tables = {"a": table(2000, 24)}
  kwargs: Any = dict(scheme="recursive_doubling", capacities=_SLOTS)
  seen = collectives(lower(tables, n, **kwargs))
  declared = declaring.declare(tables, ("data",), (n,), **kwargs)
  first = [(f.op, f.words) for f in first_round(seen)]
  assert first == [(m.op, m.words) for m in declared.first]
  doublings = n.bit_length() - 1
  assert len(first) == doublings + 2


@pytest.mark.parametrize("scheme", scheme_names.DENSE_NAMES)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_dense_schemes_send_what_they_declare(scheme, n):
  tables = {"a": table(2000, 24), "b": table(1111, 5, jnp.bfloat16)}
  seen = collectives(lower(tables, n, scheme=scheme))
  declared = declaring.declare(tables, ("data",), (n,), scheme=scheme)
  assert [(f.op, f.words) for f in seen if not f.inside] == [
    (m.op, m.words) for m in declared.first
  ]
  assert [(f.op, f.words) for f in seen if f.inside] == [
    (m.op, m.words) for turn in declared.loops for m in turn
  ]
  assert all(f.dtype == "f32" for f in seen)


@pytest.mark.usually("columns-3", "hash-7")
@pytest.mark.parametrize(
  ("partition", "count"),
  [("hash", 1), ("hash", 7), ("columns", 3), (4, 1), (4, 3)],
)
def test_any_number_of_tables_shares_one_exchange(partition, count):
  tables = {f"t{i}": table(600 + i, 16 + i) for i in range(count)}
  seen = collectives(lower(tables, 8, partition=partition))
  first = [f.op for f in first_round(seen)]
  assert first == ["all_to_all", "all_gather"]


def test_bitmap_is_chosen_where_it_is_smaller():
  tables = {"a": table(2000, 8)}
  for push, pull in (_SLOTS, _BITMAP):
    declared = declaring.declare(
      tables, ("data",), (8,), partition="hash", capacities=(push, pull)
    )
    slots_a_group = 256
    index = min(push, slots_a_group // 32)
    assert declared.first[0].words == 8 * (2 + index + push * 8)


def test_no_collective_over_the_table_outside_the_dense_path():
  rows, width = 400_001, 31  # no whole share for each device: in chunks
  seen = collectives(lower({"a": table(rows, width)}, 8))
  for found in seen:
    if found.op == "all_reduce" and found.words > 8:
      assert found.inside == DENSE
      assert found.words <= rows * width // 3
    else:
      assert found.words < rows * width // 4


def test_small_leaf_takes_psum_by_default():
  lowered = lower_default({"bias": jax.ShapeDtypeStruct((32,), jnp.float32)})
  assert [f.op for f in collectives(lowered)] == ["all_reduce"]


def lower_default(tables: dict[str, jax.ShapeDtypeStruct]):
  tx = zenjax.zen_sync("data")
  mesh = Mesh(jax.devices(), ("data",))
  step = jax.shard_map(
    lambda g: tx.update(zenjax.unreduced(g, "data"), tx.init(g))[0],
    mesh=mesh,
    in_specs=P(),
    out_specs=P(),
  )
  return jax.jit(step).lower(tables)

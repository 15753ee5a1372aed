"""What is sent: collectives and bytes of the lowered program, as declared."""

from typing import Any

import declaring
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest
import row_wires
import runners
import scheme_names
from stablehlo import collectives
import steps

import zenjax

# Where a table is all-reduced if its rows would cost more: a loop of one turn.
DENSE = ("stablehlo.while", "stablehlo.while")


def table(rows: int, width: int, dtype: Any = jnp.float32):
  return jax.ShapeDtypeStruct((rows, width), dtype)


TWO = {"a": table(2000, 24), "b": table(1111, 5, jnp.bfloat16)}


def check(lowered, tables: Any, axes, sizes, **options: Any) -> list:
  """The program holds the collectives that are declared, and no others."""
  seen = collectives(lowered)
  declared = declaring.declare(tables, axes, sizes, **options)
  told = lambda messages: [(m.op, m.words) for m in messages]
  first = [f for f in seen if not f.inside]
  inside = [(f.op, f.words) for f in seen if f.inside]
  assert [(f.op, f.words) for f in first] == told(declared.first)
  turns = [*declared.loops, *declared.dense]
  assert inside == [m for turn in turns for m in told(turn)]
  assert declared.received_bytes > 0
  return first


# Small buffers have a list of slots, large ones a bitmap.
SLOTS, BITMAP = (3, 5), (60, 120)


@pytest.mark.parametrize(
  ("scheme", "partition", "n", "capacities"),
  [
    ("zen", "hash", 8, SLOTS),
    ("zen", "hash", 2, BITMAP),
    ("zen", "columns", 2, SLOTS),
    ("zen", 2, 8, BITMAP),
    *((name, "hash", 8, SLOTS) for name in scheme_names.PEERS),
    ("recursive_doubling", "hash", 5, SLOTS),  # no power of two
  ],
)
def test_lowered_program_sends_what_is_declared(
  scheme, partition, n, capacities
):
  unit = 8 if scheme_names.in_blocks(scheme) else "row"
  options: Any = dict(
    scheme=scheme, partition=partition, capacities=capacities, unit=unit
  )
  lowered = steps.lower_sync(TWO, runners.mesh(n), **options)
  first = check(lowered, TWO, ("data",), (n,), **options)
  summed = {f.dtype for f in first if f.op == "reduce_scatter"}
  assert {f.dtype for f in first} - summed == {"ui32"}
  assert bool(summed) == (scheme == "dense_inside")
  if scheme == "zen":  # All tables share one exchange.
    assert [f.op for f in first] == ["all_to_all", "all_gather"]


def test_flat_is_zen_along_one_axis():
  """The same program, so the other tests run it along two axes only."""

  def program(scheme):
    mapped = jax.shard_map(
      lambda x: zenjax.sparse_pmean(x[0], "data", scheme=scheme),
      mesh=runners.mesh(8),
      in_specs=P("data"),
      out_specs=P(),
    )
    stack = jax.ShapeDtypeStruct((8, 300, 4), jnp.float32)
    return jax.jit(mapped).lower(stack).as_text()

  assert program("flat") == program("zen") != program("split_all_gather")


# Rows of 24 and 13 elements: whole words, and words that are padded.
ROUNDED = {"a": table(2000, 24), "b": table(1111, 13)}


@pytest.mark.parametrize(
  ("wire", "scheme", "partition", "n"),
  [
    *((wire, "zen", "hash", 8) for wire in row_wires.SCALED),
    ("bfloat16", "zen", "hash", 8),
    ("int8", "zen", "columns", 2),
    ("int4", "zen", 2, 8),
    *(
      pytest.param("int8", name, "hash", 2, marks=pytest.mark.more)
      for name in scheme_names.PEERS
    ),
    ("int4", "recursive_doubling", "hash", 5),
  ],
)
def test_rounded_rows_send_what_is_declared(wire, scheme, partition, n):
  unit = 8 if scheme_names.in_blocks(scheme) else "row"
  options: Any = dict(
    scheme=scheme, partition=partition, capacities=SLOTS, unit=unit
  )
  options["wire_dtype"] = jnp.dtype(wire)
  lowered = steps.lower_sync(ROUNDED, runners.mesh(n), **options)
  check(lowered, ROUNDED, ("data",), (n,), **options)


def test_bytes_of_rounded_rows():
  """A row of 24 numbers is 24 words, or 6 or 3 and a scale."""
  words = lambda wire: (
    declaring.declare(
      {"a": table(2000, 24)},
      ("data",),
      (8,),
      capacities=(3, 5),
      wire_dtype=wire,
    )
    .first[0]
    .words
  )
  got = [words(x) for x in (None, "bfloat16", "float8_e5m2", "int8", "int4")]
  assert got == [8 * (1 + 3 + 3 * k) for k in (24, 12, 7, 7, 4)]


@pytest.mark.parametrize("n", [2, 3])
def test_dense_schemes_send_what_they_declare(n):
  lowered = steps.lower_sync(TWO, runners.mesh(n), scheme="dense")
  first = check(lowered, TWO, ("data",), (n,), scheme="dense")
  assert {f.dtype for f in first} == {"f32"}


@pytest.mark.parametrize(
  "options", [{"partition": "columns"}, {"scheme": "all_gather"}]
)
def test_rows_send_what_is_declared(options):
  """Look-ups of a large table beside an array; no dense path for them."""

  def tables(ids, values):
    return {
      "rows": zenjax.SparseRows(ids, values, 1_000_000),
      "array": jnp.zeros((2000, 24)),
    }

  args = (jax.ShapeDtypeStruct((96,), jnp.int32), table(96, 16))
  sync = zenjax.zen_sync("data", sparse=True, **options)
  state = jax.eval_shape(sync.init, jax.eval_shape(tables, *args))
  step = jax.shard_map(
    lambda i, v, s: sync.update(zenjax.unreduced(tables(i, v), "data"), s),
    mesh=runners.mesh(8),
    in_specs=P(),
    out_specs=P(),
  )
  lowered = jax.jit(step).lower(*args, state)
  shapes = jax.eval_shape(tables, *args)
  check(lowered, shapes, ("data",), (8,), **options)


def test_bitmap_is_chosen_where_it_is_smaller():
  for push, pull in (SLOTS, BITMAP):
    declared = declaring.declare(
      {"a": table(2000, 8)}, ("data",), (8,), capacities=(push, pull)
    )
    slots_a_group = 256
    index = min(push, slots_a_group // 32)
    assert declared.first[0].words == 8 * (1 + index + push * 8)


def test_small_leaf_takes_psum_by_default():
  tx = zenjax.zen_sync("data")
  step = jax.shard_map(
    lambda g: tx.update(zenjax.unreduced(g, "data"), tx.init(g))[0],
    mesh=runners.mesh(8),
    in_specs=P(),
    out_specs=P(),
  )
  lowered = jax.jit(step).lower({"bias": table(1, 32)})
  assert [f.op for f in collectives(lowered)] == ["all_reduce"]

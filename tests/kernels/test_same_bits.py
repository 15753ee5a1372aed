"""Kernels give the bits of their references, interpreted."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import kernel_cases
from kernel_cases import indexing
from kernel_cases import Shape
import numpy as np
import pytest

from zenjax.kernels.operations import OPERATIONS
from zenjax.kernels.reference import plus_zero_where
from zenjax.kernels.reference import row_mask

# Rows across lanes where 128 does not divide the width, along sublanes where it
# does; several steps of several blocks; one row; groups that divide nothing;
# words that end within a program, more pieces than are unrolled.
TABLES = {
  "tpu": [
    Shape(1, 1, 8),
    Shape(20_001, 16, 8),
    Shape(700, 33, 4, contiguous=True),
    Shape(1500, 130, 64),
    Shape(2000, 40, 8, "bfloat16"),
    Shape(5001, 128, 8),
    Shape(600, 128, 4, "float8_e4m3fn"),
  ],
  "cuda": [
    Shape(1, 1, 8),
    Shape(999, 7, 5),
    Shape(700, 33, 4, contiguous=True),
    Shape(300, 300, 3),
    Shape(2000, 40, 8, "float16"),
    Shape(700, 384, 6, "bfloat16"),
  ],
}
# A table with the rows of a buffer: fewer than a program has, more, more than
# the table has; rows that share words, of which the last may be alone.
BUFFERS = {
  "tpu": [
    (Shape(1, 128, 8), 3),
    (Shape(700, 256, 4, contiguous=True), 300),
    (Shape(50, 4096, 3), 129),
    (Shape(2005, 128, 8, "bfloat16"), 256),
    (Shape(303, 384, 5, "float8_e5m2"), 64),
  ],
  "cuda": [
    (Shape(1, 1, 8), 3),
    (Shape(999, 7, 5), 40),
    (Shape(700, 33, 4, contiguous=True), 64),
    (Shape(777, 300, 3, "bfloat16"), 300),
  ],
}
# Sources, rows of each, width, slots, capacity of the union, dtype: unions that
# are full and not, found by a sort, ranges that start and end within a word.
RECEIVED = {
  "tpu": [
    (8, 40, 128, 640, 100, "float32"),
    (1, 7, 128, 32, 7, "float32"),
    (3, 100, 128, 100_000, 300, "bfloat16"),
    (2, 11, 4096, 32, 1, "bfloat16"),
  ],
  "cuda": [
    (1, 7, 1, 32, 7, "float32"),
    (5, 33, 130, 64, 64, "float32"),
    (3, 100, 7, 100_000, 300, "bfloat16"),
    (4, 64, 128, 2048, 1, "float16"),
  ],
}

SEEDS = st.integers(0, 2**32 - 1)
DENSITIES = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
examples = hypothesis.settings(max_examples=16)


def each_of(shapes):
  cases = [(name, case) for name, of in shapes.items() for case in of]
  return pytest.mark.parametrize("platform, case", cases, ids=str)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  """Makes kernels for TPUs cut small tables into several blocks."""
  monkeypatch.setattr("zenjax.kernels.tpu.words.MOST_ROWS", 64)
  monkeypatch.setattr("zenjax.kernels.tpu.blocks.BLOCK", 32 << 10)


def both(name, platform, *static):
  """The kernel and the reference of an operation, compiled."""
  operation = OPERATIONS[name]
  kernel = functools.partial(operation.kernel(platform), interpret=True)
  runs = kernel, operation.reference
  return [jax.jit(lambda *x, run=run: run(*x, *static)) for run in runs]


@each_of(TABLES)
def test_mask_pack(platform, case):
  kernel, reference = both("mask_pack", platform, case.layout)

  @examples
  @hypothesis.given(SEEDS, DENSITIES, st.sampled_from([0.0, 0.01, 1.0]))
  def check(seed, density, negative):
    table = kernel_cases.table(case, seed, density, negative)
    kernel_cases.assert_same_bits(kernel(table), reference(table))

  check()


@each_of(BUFFERS)
def test_compact(platform, case):
  shape, capacity = case

  def run(implementation, table, first):
    words = OPERATIONS["mask_pack"].reference(table, shape.layout).words
    bitmap = indexing.index(words)
    return implementation(table, bitmap, shape.layout, first, capacity)

  operation = OPERATIONS["compact"]
  kernel = functools.partial(operation.kernel(platform), interpret=True)
  kernel = jax.jit(functools.partial(run, kernel))
  reference = jax.jit(functools.partial(run, operation.reference))

  @examples
  @hypothesis.given(SEEDS, DENSITIES)
  def check(seed, density):
    table = kernel_cases.table(shape, seed, density, 0.1)
    # From the first row, in the midst and past the last one.
    most = max(1, round(2 * density * shape.rows / shape.groups))
    first = np.random.default_rng(seed).integers(0, most, shape.groups)
    first = jnp.asarray(first * (seed % 2), jnp.int32)
    kernel_cases.assert_same_bits(kernel(table, first), reference(table, first))

  check()


@each_of(BUFFERS)
def test_expand(platform, case):
  shape, capacity = case
  kernel, reference = both("expand", platform)

  @examples
  @hypothesis.given(SEEDS, DENSITIES)
  def check(seed, density):
    table = kernel_cases.table(shape, seed, density, 0.1)
    values = shape._replace(rows=capacity)
    values = kernel_cases.table(values, seed + 1, 1.0, 0.0)
    # Rows in any order, padding between them.
    rng = np.random.default_rng(seed)
    row = np.full(capacity, shape.rows)
    count = round(density * min(capacity, shape.rows))
    at = rng.choice(capacity, count, replace=False)
    row[at] = rng.choice(shape.rows, count, replace=False)
    args = table, jnp.asarray(row, jnp.int32), values
    kernel_cases.assert_same_bits(kernel(*args), reference(*args))

  check()


@each_of(RECEIVED)
def test_merge(platform, case):
  kernel, reference = both("merge", platform, *case[3:5], jnp.float32)

  @examples
  @hypothesis.given(SEEDS, DENSITIES, st.sampled_from([0.0, 0.3, 1.0]))
  def check(seed, density, limit):
    slots, rows = kernel_cases.received(seed, case, density)
    limit = jnp.int32(limit * case[3])
    kernel_cases.assert_same_bits(
      kernel(slots, rows, limit), reference(slots, rows, limit)
    )

  check()


def test_nan_is_not_zero_where_it_has_the_bits_of_a_negative_one():
  table = jnp.array([[0.0, jnp.nan], [0.0, 0.0]], "float8_e4m3fnuz")
  mask = row_mask(table)
  assert mask.nonzero.tolist() == mask.written.tolist() == [True, False]
  cleared = plus_zero_where(jnp.array(True), table)
  assert jnp.isnan(cleared).tolist() == [[False, True], [False, False]]


def received(capacity, width):
  return 8, 40, width, 640, capacity, "float32"


@pytest.mark.parametrize(
  ("platform", "name", "args", "words"),
  [
    ("tpu", "mask_pack", (Shape(9, 128, 8, "float16"),), "float32, bfloat16"),
    ("tpu", "mask_pack", (Shape(9, 128, 8, "float8_e4m3fnuz"),), "negative"),
    ("tpu", "mask_pack", (Shape(999, 1 << 15, 8),), "bytes"),
    ("tpu", "mask_pack", (Shape(999, 128, 1000),), "groups"),
    ("cuda", "mask_pack", (Shape(9, 128, 8, "float8_e5m2"),), "float16"),
    ("cuda", "compact", (Shape(99, 128, 8, "float8_e5m2"), 8), "float16"),
    ("cuda", "compact", (Shape(99, 128, 8), 0), "at least"),
    ("tpu", "compact", (Shape(99, 64, 8), 8), "zenjax.packed"),
    ("tpu", "compact", (Shape(7, 128, 8, "bfloat16"), 1), "at least 8 rows"),
    ("tpu", "expand", (Shape(99, 64, 8, "float16"), 8), "zenjax.packed"),
    ("tpu", "expand", (Shape(99, 128, 8), 0), "at least"),
    ("cuda", "merge", (received(0, 16),), "at least"),
    ("cuda", "merge", (received(3, 16), 24, jnp.bfloat16), "sums"),
    ("tpu", "merge", (received(3, 16),), "zenjax.packed"),
    ("tpu", "merge", (received(3, 128), 24, jnp.bfloat16), "sums"),
  ],
)
def test_refuses_and_says_what_it_serves(platform, name, args, words):
  made = kernel_cases.arguments(name, *args)
  with pytest.raises(NotImplementedError, match=words):
    OPERATIONS[name].kernel(platform)(*made, interpret=True)

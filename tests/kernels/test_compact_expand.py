"""`compact` and `expand` by kernels: the bits of the reference, interpreted."""

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

from zenjax.kernels import operations
from zenjax.kernels.operations import compact
from zenjax.kernels.operations import expand

# Shapes with the rows of a buffer: fewer than a program has, more, none left
# over, more than the table has.
CUDA = [
  (Shape(1, 1, 8), 3),
  (Shape(999, 7, 5), 40),
  (Shape(20_001, 16, 8), 257),
  (Shape(700, 33, 4, contiguous=True), 64),
  (Shape(1500, 130, 64), 7),
  (Shape(777, 300, 3, "bfloat16"), 300),
  (Shape(2000, 40, 8, "float16"), 65),
  (Shape(5001, 128, 8), 128),
]
TPU = [
  (Shape(1, 128, 8), 3),
  (Shape(5001, 128, 8), 40),
  (Shape(700, 256, 4, contiguous=True), 300),
  (Shape(1500, 128, 64), 7),
  (Shape(50, 4096, 3), 129),
  (Shape(999, 128, 1), 512),
  # Rows that share words, of which the last may be alone.
  (Shape(2005, 128, 8, "bfloat16"), 256),
  (Shape(300, 256, 4, "bfloat16", contiguous=True), 100),
  (Shape(2, 128, 1, "bfloat16"), 3),
  (Shape(303, 384, 5, "float8_e5m2"), 64),
]
KERNELS = [
  *(("cuda", shape, capacity) for shape, capacity in CUDA),
  *(("tpu", shape, capacity) for shape, capacity in TPU),
]
EXAMPLES = 63

DRAWN = {
  "seed": st.integers(0, 2**32 - 1),
  "density": st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
}
each_kernel = pytest.mark.parametrize(
  "platform, shape, capacity", KERNELS, ids=str
)


def test_at_least_500_examples():
  for platform in {*compact.kernels, *expand.kernels}:
    assert EXAMPLES * sum(p == platform for p, *_ in KERNELS) >= 500


@functools.cache
def compact_programs(platform, shape, capacity):
  def run(implementation, table, first):
    words = operations.mask_pack.reference(table, shape.layout).words
    bitmap = indexing.index(words)
    return implementation(table, bitmap, shape.layout, first, capacity)

  kernel = functools.partial(compact.kernel(platform), interpret=True)
  return (
    jax.jit(functools.partial(run, kernel)),
    jax.jit(functools.partial(run, compact.reference)),
  )


@pytest.mark.usually(
  "*rows=303,*",
  "*rows=777,*",
  "*rows=1,*",
  "*contiguous=True*-64",
  "*contiguous=True*-300",
)
@each_kernel
def test_compact_gives_the_bits_of_the_reference(platform, shape, capacity):
  @hypothesis.settings(max_examples=EXAMPLES)
  @hypothesis.given(**DRAWN)
  def check(seed, density):
    table = kernel_cases.table(shape, seed, density, 0.1)
    # From the first row, in the midst and past the last one.
    most = max(1, round(2 * density * shape.rows / shape.groups))
    first = np.random.default_rng(seed).integers(0, most, shape.groups)
    first = jnp.asarray(first * (seed % 2), jnp.int32)
    kernel, reference = compact_programs(platform, shape, capacity)
    kernel_cases.assert_same_bits(kernel(table, first), reference(table, first))

  check()


@functools.cache
def expand_programs(platform):
  kernel = functools.partial(expand.kernel(platform), interpret=True)
  return jax.jit(kernel), jax.jit(expand.reference)


@pytest.mark.usually(
  "*rows=303,*", "*rows=777,*", "*rows=1,*", "*contiguous=True*-64", "*rows=2,*"
)
@each_kernel
def test_expand_gives_the_bits_of_the_reference(platform, shape, capacity):
  @hypothesis.settings(max_examples=EXAMPLES)
  @hypothesis.given(**DRAWN)
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
    kernel, reference = expand_programs(platform)
    kernel_cases.assert_same_bits(kernel(*args), reference(*args))

  check()


@pytest.mark.parametrize(
  "shape, capacity, served",
  [
    (Shape(1000, 128, 8, "float8_e5m2"), 8, "float32, bfloat16"),
    (Shape(1000, 64, 8, "float16"), 8, "zenjax.packed"),
    (Shape(7, 128, 8, "bfloat16"), 1, "at least 8 rows .* share words"),
    (Shape(1000, 128, 8), 0, "at least"),
  ],
)
def test_refuses_and_says_what_it_serves(shape, capacity, served):
  table = kernel_cases.table(shape, 0, 0.1, 0.0)
  bitmap = indexing.index(jnp.zeros((8, shape.layout.words), jnp.uint32))
  first = jnp.zeros(8, jnp.int32)
  with pytest.raises(NotImplementedError, match=served):
    compact(table, bitmap, shape.layout, first, capacity, kernels="pallas")
  with pytest.raises(NotImplementedError, match=served):
    row = jnp.zeros(capacity, jnp.int32)
    expand(table, row, table[:capacity], kernels="pallas")

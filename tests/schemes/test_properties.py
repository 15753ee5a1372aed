"""Thousands of drawn gradients against a float64 oracle, zero wrong.

The data is drawn, the shapes are fixed: one compiled program for each pair of
`SHAPES` and `WAYS`. Under `vmap` every device's algorithm runs on its own row
of a batch, which is the quickest way to run eight of them.
"""

import functools

import cases
import drawn
import hypothesis
from hypothesis import strategies as st
import numpy as np
import oracle
import pytest
import runners

import zenjax

# Several words of a bitmap and slots to spare; fewer rows than devices with
# odd width; a width of one, and slots enough for chunks of two sizes; a wide
# table of an odd number of devices.
SHAPES = (
  drawn.Shape(8, 70, 5, cases.FLOAT32),
  drawn.Shape(5, 4, 3, cases.FLOAT16),
  drawn.Shape(2, 2600, 1, cases.FLOAT32),
  drawn.Shape(3, 33, 12, cases.BFLOAT16),
)
WAYS = {
  "dense": {"scheme": "dense"},
  "all_gather": {"scheme": "all_gather"},
  "default": {},
  "hash": {"partition": "hash"},
  "hash, one row a round": {"partition": "hash", "capacities": (1, 1)},
  "columns": {"partition": "columns"},
  "columns, two rows a round": {"partition": "columns", "capacities": (2, 2)},
}
# Sums of these, means of the others: both would double what is compiled.
SUMMED = ("all_gather", "hash", "columns, two rows a round")
EXAMPLES = 36


@functools.cache
def program(shape: drawn.Shape, way: str, op: oracle.Op):
  """One compiled program, kept over all examples."""
  f = {"mean": zenjax.sparse_pmean, "sum": zenjax.sparse_psum}[op]
  options = WAYS[way]
  return runners.RUNNERS["vmap"](lambda x, axis: f(x, axis, **options), shape.n)


def op_of(way: str) -> oracle.Op:
  return "sum" if way in SUMMED else "mean"


@pytest.mark.parametrize(
  ("shape", "way"),
  # Every way. Programs of the first shape serve other tests too.
  [(SHAPES[i], way) for i, way in zip((1, 1, 0, 2, 0, 0, 3), WAYS)],
  ids=str,
)
def test_drawn_gradients(shape, way):
  run = program(shape, way, op_of(way))

  @hypothesis.settings(max_examples=EXAMPLES)
  @hypothesis.given(drawn.gradients(shape))
  def holds(stack):
    result = run(stack)
    oracle.check(result, stack, op_of(way))
    oracle.check_same_bits(run(stack), result, "repeated")

  holds()


def test_paths_agree_to_the_bit():
  """Sums run rank by rank: rounds, partitions and schemes do not change them.

  `lax.psum` and `lax.all_gather` promise no order, so "dense" is left out, and
  XLA none between the operands of an addition: which NaN comes of two is free.
  """
  ways = ("default", "hash, one row a round", "columns")
  shape = SHAPES[0]
  runs = [program(shape, way, "mean") for way in ways]

  @hypothesis.settings(max_examples=EXAMPLES // 3)
  @hypothesis.given(drawn.gradients(shape))
  def holds(stack):
    results = [np.abs(run(stack)) for run in runs]
    nan = np.array(np.nan, shape.dtype)
    first, *others = [np.where(np.isnan(r), nan, r) for r in results]
    for way, other in zip(ways[1:], others, strict=True):
      oracle.check_same_bits(other, first, f"{way} against {ways[0]}")

  holds()


def test_devices_may_be_permuted_when_sums_are_exact():
  """Small integers add without rounding, in whatever order."""
  shape = SHAPES[0]
  run = program(shape, "default", op_of("default"))

  @hypothesis.settings(max_examples=EXAMPLES // 3)
  @hypothesis.given(
    st.integers(0, 2**32 - 1), st.permutations(list(range(shape.n)))
  )
  def holds(seed, order):
    rng = np.random.default_rng(seed)
    size = (shape.n, shape.rows, shape.width)
    stack = rng.integers(-3, 4, size) * (rng.random(size) < 0.2)
    stack = stack.astype(shape.dtype)
    here, there = run(stack), run(stack[np.asarray(order)])
    oracle.check_same_bits(np.abs(here), np.abs(there), f"{order}")

  holds()

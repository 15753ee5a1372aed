"""Thousands of drawn gradients against a float64 oracle, zero wrong.

The data is drawn, the shapes are fixed: one compiled program for each pair of
`SHAPES` and `WAYS`. Under `vmap` every device's algorithm runs on its own row
of a batch, which is the quickest way to run eight of them.
"""

import functools
from typing import Any

import cases
import drawn
import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners
import steps

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
  "auto": {},
  "hash": {"partition": "hash"},
  "hash, one row a round": {"partition": "hash", "capacities": (1, 1)},
  "columns": {"partition": "columns"},
  "columns, two rows a round": {"partition": "columns", "capacities": (2, 2)},
}
EXAMPLES = 72  # times 2 shapes (with `more` 4) times 7 ways: 1,008 under vmap
EXAMPLES_ON_DEVICES = 40


@functools.cache
def program(shape: drawn.Shape, way: str, runner: str, op: oracle.Op):
  """One compiled program, kept over all examples."""
  f = {"mean": zenjax.sparse_pmean, "sum": zenjax.sparse_psum}[op]
  options = WAYS[way]
  return runners.RUNNERS[runner](lambda x, axis: f(x, axis, **options), shape.n)


def op_of(way: str) -> oracle.Op:
  """Sums and means by turns: each would double what is compiled."""
  return "mean" if list(WAYS).index(way) % 2 == 0 else "sum"


@pytest.mark.usually("5x4x3-float16-*")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
  "shape",
  SHAPES[:2],
  ids=str,
)
def test_drawn_gradients(shape, way):
  run = program(shape, way, "vmap", op_of(way))

  @hypothesis.settings(max_examples=EXAMPLES)
  @hypothesis.given(drawn.gradients(shape))
  def holds(stack):
    result = run(stack)
    oracle.check(result, stack, op_of(way))
    oracle.check_same_bits(run(stack), result, "repeated")

  holds()


@pytest.mark.usually("3x33x12-*one row*", "8x70x5*columns")
@pytest.mark.parametrize("way", ["auto", "hash, one row a round", "columns"])
@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_drawn_gradients_on_devices(shape, way):
  """Each device holds its own copy here, and all copies are the same."""
  run = program(shape, way, "shard_map_vma_replicated", op_of(way))

  @hypothesis.settings(max_examples=EXAMPLES_ON_DEVICES)
  @hypothesis.given(drawn.gradients(shape))
  def holds(stack):
    oracle.check(run(stack), stack, op_of(way))

  holds()


@functools.cache
def trainer() -> tuple[steps.Trainer, Any]:
  """Two tables whose state remembers the steps before; and its first state."""
  tx = zenjax.zen_sync("data", sparse=True)
  params = {
    "narrow": jnp.zeros((200, 3), jnp.float32),
    "half": jnp.zeros((64, 8), jnp.bfloat16),
  }
  made = steps.Trainer(tx, params, runners.mesh(4))
  return made, made.state


NARROW = drawn.gradients(drawn.Shape(4, 200, 3, cases.FLOAT32))
HALF = drawn.gradients(drawn.Shape(4, 64, 8, cases.BFLOAT16))


@pytest.mark.usually("5x4x3*")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paths_agree_to_the_bit(shape):
  """Sums run rank by rank: rounds, partitions and schemes do not change them.

  `lax.psum` and `lax.all_gather` promise no order, so "dense" is left out, and
  XLA none between the operands of an addition: which NaN comes of two is free.
  """
  ways = ("auto", "hash, one row a round", "columns")
  ways = [way for way in ways if op_of(way) == "mean"]
  runs = [program(shape, way, "vmap", "mean") for way in ways]

  @hypothesis.settings(max_examples=EXAMPLES // 3)
  @hypothesis.given(drawn.gradients(shape))
  def holds(stack):
    results = [np.abs(run(stack)) for run in runs]
    nan = np.array(np.nan, shape.dtype)
    first, *others = [np.where(np.isnan(r), nan, r) for r in results]
    for way, other in zip(ways[1:], others, strict=True):
      oracle.check_same_bits(other, first, f"{way} against {ways[0]}")

  holds()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_devices_may_be_permuted_when_sums_are_exact(shape):
  """Small integers add without rounding, in whatever order."""
  run = program(shape, "auto", "vmap", op_of("auto"))

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

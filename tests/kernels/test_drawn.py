"""Kernels against their references on drawn shapes, dtypes and densities.

The shapes of `test_kernel_*.py` are chosen; these are drawn, a few of them in
every run of the suite. More of them, 500 cases a kernel in 50 shapes, by

    ZENJAX_KERNEL_CASES=500 python -m pytest tests/test_kernels_drawn.py
"""

from collections.abc import Callable
import functools
import os
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import kernel_cases
from kernel_cases import indexing
from kernel_cases import Shape
import numpy as np
import pytest

from zenjax.kernels.mask_pack import _tpu_sizes
from zenjax.kernels.operations import mask_pack
from zenjax.kernels.operations import OPERATIONS

# Contents of a shape, which share its compiled programs.
CONTENTS = 10
CASES = int(os.environ.get("ZENJAX_KERNEL_CASES", CONTENTS))

DENSITIES = (0.0, 0.003, 0.03, 0.3, 0.9, 1.0)


class Drawn(NamedTuple):
  """One shape: what is known when a program is traced, and contents for it."""

  described: str
  static: tuple[Any, ...]
  contents: Callable[[np.random.Generator], tuple[Any, ...]]
  prepare: Callable[..., tuple[Any, ...]] = lambda *arrays: arrays


def table_shape(rng: np.random.Generator) -> Shape:
  """One row and many, one column, odd ones, lanes, tiles and their borders."""
  width = rng.choice(
    [1, rng.integers(2, 40), rng.integers(40, 300), 2 ** rng.integers(1, 8)]
    + [128 * rng.integers(1, 4)] * 3
  )
  rows = rng.choice([1, rng.integers(2, 70), *rng.integers(70, 3000, 4)])
  groups = rng.choice([1, 2, 8, rng.integers(3, 80), 2 ** rng.integers(1, 7)])
  dtypes = ["float32"] * 3 + ["bfloat16", "float16", "float8_e4m3fn"]
  return Shape(
    rows=int(rows),
    width=int(width),
    groups=int(groups),
    dtype=str(rng.choice(dtypes)),
    contiguous=bool(rng.random() < 0.2),
  )


def _table(shape: Shape, rng: np.random.Generator) -> jax.Array:
  density, negative = rng.choice(DENSITIES), rng.choice([0.0, 0.01, 1.0])
  return kernel_cases.table(shape, int(rng.integers(2**32)), density, negative)


def _capacity(rng: np.random.Generator) -> int:
  return int(rng.choice([1, rng.integers(2, 40), rng.integers(40, 400)]))


def draw_mask_pack(rng: np.random.Generator) -> Drawn:
  shape = table_shape(rng)
  return Drawn(str(shape), (shape.layout,), lambda rng: (_table(shape, rng),))


def draw_compact(rng: np.random.Generator) -> Drawn:
  shape, capacity = table_shape(rng), _capacity(rng)
  layout = shape.layout

  def prepare(table, first):
    bitmap = indexing.index(mask_pack.reference(table, layout).words)
    return table, bitmap, first

  def contents(rng):
    # From the first row, in the midst and past the last one.
    most = rng.choice([1, 4, max(2, shape.rows // shape.groups)])
    first = rng.integers(0, most, shape.groups)
    return _table(shape, rng), jnp.asarray(first, jnp.int32)

  described = f"{shape}, capacity {capacity}"
  return Drawn(described, (layout, capacity), contents, prepare)


def draw_expand(rng: np.random.Generator) -> Drawn:
  shape, count = table_shape(rng), _capacity(rng)

  def contents(rng):
    values = kernel_cases.table(
      shape._replace(rows=count), int(rng.integers(2**32)), 1.0, 0.0
    )
    # Rows in any order, padding between them.
    row = np.full(count, shape.rows)
    some = round(rng.choice(DENSITIES) * min(count, shape.rows))
    at = rng.choice(count, some, replace=False)
    row[at] = rng.choice(shape.rows, some, replace=False)
    return _table(shape, rng), jnp.asarray(row, jnp.int32), values

  return Drawn(f"{shape}, {count} rows", (), contents)


def draw_merge(rng: np.random.Generator) -> Drawn:
  n = int(rng.choice([1, 2, 3, 8, rng.integers(2, 20)]))
  count, capacity = _capacity(rng), _capacity(rng)
  num_slots = 32 * int(rng.choice([1, rng.integers(2, 60), 4000]))
  width = table_shape(rng).width
  dtype = str(rng.choice(["float32", "bfloat16", "float16"]))
  # Of one source alone XLA, which interprets kernels, makes 0 + x plain x.
  zero = -0.0 if n > 1 else 0.0
  # Sums of subnormals are the platform's own.
  numbers = [1.5, -1.5, 1e-3, zero, 0.0, 3e4, np.inf]

  def contents(rng):
    slots = np.full((n, count), num_slots)
    rows = np.zeros((n, count, width), np.float32)
    density = rng.choice(DENSITIES)
    for source in range(n):
      some = rng.binomial(min(count, num_slots), density)
      slots[source, :some] = np.sort(rng.choice(num_slots, some, replace=False))
      rows[source, :some] = rng.choice(numbers, (some, width))
    limit = rng.choice([0, num_slots // 3, num_slots])
    return (
      jnp.asarray(slots, jnp.int32),
      jnp.asarray(rows).astype(dtype),
      jnp.int32(limit),
    )

  described = f"{n} of {count} x {width} {dtype}, {num_slots=}, {capacity=}"
  return Drawn(described, (num_slots, capacity, jnp.float32), contents)


DRAW = {
  "mask_pack": draw_mask_pack,
  "compact": draw_compact,
  "expand": draw_expand,
  "merge": draw_merge,
}
KERNELS = [(name, on) for name in DRAW for on in OPERATIONS[name].kernels]


def _arguments(name, drawn, arrays):
  """In the order of the reference: `compact` has an array after the layout."""
  arrays = drawn.prepare(*arrays)
  if name == "compact":
    (layout, capacity), (table, bitmap, first) = drawn.static, arrays
    return table, bitmap, layout, first, capacity
  return *arrays, *drawn.static


def served(name: str, platform: str, seed: int) -> Drawn:
  """The first shape of many that the kernel does not refuse."""
  rng = np.random.default_rng([seed, zlib.crc32(f"{name} {platform}".encode())])
  for _ in range(1000):
    drawn = DRAW[name](rng)
    shapes = jax.eval_shape(
      lambda d=drawn: d.contents(np.random.default_rng(0))
    )
    zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    args = _arguments(name, drawn, zeros)
    if not OPERATIONS[name].refusal(platform, *args):
      return drawn
  raise AssertionError(f"the kernel of {name} for {platform} serves nothing")


@pytest.mark.usually("compact-cuda*", "merge-tpu*", "mask_pack-tpu*", "expand*")
@pytest.mark.parametrize("seed", range(-(-CASES // CONTENTS)))
@pytest.mark.parametrize("name, platform", KERNELS)
def test_same_bits_on_drawn_shapes(name, platform, seed, monkeypatch):
  if seed % 2 == 0:  # Several blocks of a small table.
    monkeypatch.setattr(_tpu_sizes, "_BLOCK", 32 << 10)
  drawn = served(name, platform, seed)
  operation = OPERATIONS[name]
  kernel = functools.partial(operation.kernel(platform), interpret=True)

  def program(implementation):
    return jax.jit(
      lambda *arrays: implementation(*_arguments(name, drawn, arrays))
    )

  by_kernel, by_reference = program(kernel), program(operation.reference)
  rng = np.random.default_rng(seed)
  for _ in range(CONTENTS):
    arrays = drawn.contents(rng)
    try:
      kernel_cases.assert_same_bits(by_kernel(*arrays), by_reference(*arrays))
    except AssertionError as error:
      raise AssertionError(
        f"{name} on {platform}: {drawn.described}"
      ) from error


@pytest.mark.parametrize("name", DRAW)
def test_drawn_shapes_differ(name):
  shapes = {DRAW[name](np.random.default_rng(i)).described for i in range(50)}
  assert len(shapes) >= 48

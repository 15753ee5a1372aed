"""`local`: what one device does before anything is sent, against one read.

The nonzero rows of a gradient are found, packed to a hash bitmap, selected and
gathered. The measure is `jnp.sum(g, axis=0)`, which reads the gradient once.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from benchmarks import table
from benchmarks.harness import Built
from benchmarks.harness import Case
from zenjax._src.core import bitmaps
from zenjax._src.core.partition import Layout
from zenjax.kernels.compact.reference import compact
from zenjax.kernels.mask_pack.reference import mask_pack

DEVICES = 8
SHAPES = ((1_000_000, 16), (200_000, 128))
DENSITIES = (0.004, 0.02)

COLUMNS = (
  table.fact("gradient\nMB", "gradient_bytes", unit=1e6),
  table.fact("rows\nfound", "found", ".0f"),
  table.fact("capacity\nan owner", "capacity", ".0f"),
  table.WRONG,
  table.COMPILE,
  table.TIME,
  table.SPREAD,
  table.time_over("sum", "over\nsum"),
)


def cases(options: argparse.Namespace) -> list[Case]:
  """One read, the mask alone, and everything: for each shape and density."""
  del options
  return [
    Case(
      group=f"{rows:,} x {width}  {density:.1%}",
      name=name,
      build=functools.partial(build, rows, width, density),
    )
    for rows, width in SHAPES
    for density in DENSITIES
    for name, build in VARIANTS.items()
  ]


@functools.lru_cache(maxsize=1)
def _gradient(rows, width, density):
  """`[R, D]` with nonzero rows at random, and their sorted indices."""
  rng = np.random.default_rng(rows)
  found = np.sort(rng.choice(rows, round(rows * density), replace=False))
  values = oracle.values(rng, (len(found), width))
  gradient = jnp.zeros((rows, width), jnp.float32).at[found].set(values)
  return jax.block_until_ready(gradient), found, values


def _layout(rows):
  return Layout(num_rows=rows, groups=DEVICES)


def _build_sum(rows, width, density):
  gradient, found, values = _gradient(rows, width, density)
  run, seconds = _compile(lambda g: jnp.sum(g, axis=0), gradient)
  want = values.astype(np.float64).sum(axis=0)
  wrong = oracle.count_wrong(np.asarray(run()), want)
  return _built(run, wrong, seconds, gradient, len(found))


def _build_mask(rows, width, density):
  gradient, found, _ = _gradient(rows, width, density)
  layout = _layout(rows)
  run, seconds = _compile(lambda g: mask_pack(g, layout).words, gradient)
  words = np.asarray(run())
  bits = np.unpackbits(words.view(np.uint8), bitorder="little")
  group, slot = np.nonzero(bits.reshape(DEVICES, -1))
  marked = np.sort(np.asarray(layout.row(jnp.array(group), jnp.array(slot))))
  wrong = len(np.setxor1d(marked, found))
  return _built(run, wrong, seconds, gradient, len(found))


def _build_rows(rows, width, density):
  gradient, found, values = _gradient(rows, width, density)
  layout = _layout(rows)
  mean = len(found) / DEVICES
  capacity = int(mean + 5 * mean**0.5)  # What the fullest of 8 owners needs.

  def pack(g):
    bitmap = bitmaps.index(mask_pack(g, layout).words)
    first = jnp.zeros(DEVICES, jnp.int32)
    return compact(g, bitmap, layout, first, capacity)

  run, seconds = _compile(pack, gradient)
  slots, packed = (np.asarray(x) for x in run())
  wrong = _count_wrong(slots, packed, layout, found, values)
  built = _built(run, wrong, seconds, gradient, len(found))
  built.facts["capacity"] = capacity
  return built


def _count_wrong(slots, packed, layout, found, values):
  """Elements of `packed: [m, C, D]` that are not the rows `found`, in place."""
  group = np.broadcast_to(np.arange(DEVICES)[:, None], slots.shape)
  row = np.asarray(layout.row(jnp.array(group), jnp.array(slots)))
  real = row < layout.num_rows
  # Capacity beyond a group's rows is zero; every row arrives exactly once.
  wrong = int(np.count_nonzero(packed[~real]))
  order = np.argsort(row[real])
  if not np.array_equal(row[real][order], found):
    return wrong + values.size
  return wrong + oracle.count_different(packed[real][order], values)


def _compile(function, gradient):
  start = time.perf_counter()
  compiled = jax.jit(function).lower(gradient).compile()
  seconds = time.perf_counter() - start
  return functools.partial(compiled, gradient), seconds


def _built(run, wrong, seconds, gradient, found):
  facts = {"gradient_bytes": float(gradient.nbytes), "found": float(found)}
  return Built(run=run, wrong=wrong, compile_s=seconds, facts=facts)


VARIANTS = {
  "sum": _build_sum,
  "mask, pack": _build_mask,
  "mask, pack, select, gather": _build_rows,
}

"""`local`: what one device does before anything is sent, against one read.

The nonzero rows of a gradient are found, packed to a hash bitmap, selected and
gathered. The measure is `jnp.sum(g, axis=0)`, which reads the gradient once.
"""

import argparse
import functools

import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks import library
from benchmarks import oracle
from benchmarks import table
from benchmarks.cases import kernels
from zenjax.kernels.reference import compact
from zenjax.kernels.reference import mask_pack

# Rows, width, density.
SHAPES = [
  (*size, density)
  for size in ((1_000_000, 16), (200_000, 128))
  for density in (0.004, 0.02)
]

COLUMNS = (
  table.fact("gradient\nMB", "gradient_bytes", unit=1e6),
  table.fact("rows\nfound", "found", ".0f"),
  table.fact("capacity\nan owner", "capacity", ".0f"),
  *table.MEASURED,
  table.time_over("sum", "over\nsum"),
)


def cases(options: argparse.Namespace) -> list[harness.Case]:
  """Returns one read, the mask alone, and all: of each shape and density."""
  del options
  return [
    harness.case("{:,} x {}  {:.1%}".format(*shape), name, _build, made, *shape)
    for shape in SHAPES
    for name, made in VARIANTS.items()
  ]


def _build(variant, rows, width, density):
  gradient = kernels.draw(rows, width, density)
  function, wrong, facts = variant(gradient)
  facts |= {
    "gradient_bytes": float(gradient.table.nbytes),
    "found": float(len(gradient.found)),
  }
  return kernels.checked(function, [gradient.table], wrong, facts)


def _sum(gradient):
  want = gradient.values.astype(np.float64).sum(axis=0)
  wrong = lambda got: oracle.count_wrong(np.asarray(got), want)
  return (lambda g: jnp.sum(g, axis=0)), wrong, {}


def _mask(gradient):
  wrong = functools.partial(kernels.wrong_bits, gradient)
  return (lambda g: mask_pack(g, gradient.layout).words), wrong, {}


def _rows(gradient):
  layout, found, values = gradient.layout, gradient.found, gradient.values
  mean = len(found) / kernels.DEVICES
  capacity = int(mean + 5 * mean**0.5)  # What the fullest of 8 owners needs.

  def pack(g):
    bitmap = library.indexing.index(mask_pack(g, layout).words)
    first = jnp.zeros(kernels.DEVICES, jnp.int32)
    return compact(g, bitmap, layout, first, capacity)

  def wrong(answer):
    """Elements of `[m, C, D]` that are not the rows `found`, in place."""
    slots, packed = map(np.asarray, answer)
    group = np.broadcast_to(np.arange(kernels.DEVICES)[:, None], slots.shape)
    row = np.asarray(layout.row(jnp.array(group), jnp.array(slots)))
    real = row < layout.num_rows
    # Capacity beyond a group's rows is zero; every row arrives exactly once.
    unused = int(np.count_nonzero(packed[~real]))
    order = np.argsort(row[real])
    if not np.array_equal(row[real][order], found):
      return unused + values.size
    return unused + oracle.count_different(packed[real][order], values)

  return pack, wrong, {"capacity": capacity}


# Each returns its function of the gradient, the number of wrong elements of an
# answer, and facts.
VARIANTS = {
  "sum": _sum,
  "mask, pack": _mask,
  "mask, pack, select, gather": _rows,
}

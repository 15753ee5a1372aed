"""Kernels compiled for the chips they are for, with none attached.

What a compiler tells of memory traffic is a count of bytes, never a time.
"""

import functools
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from kernel_cases import Shape
import pytest

from benchmarks import targets
from zenjax.kernels._dispatch import Implementation
from zenjax.kernels.operations import mask_pack


def device(name: str) -> Any:
  """One device of a TPU slice or of `targets.TARGETS`."""
  try:
    if name in targets.TPUS:
      return targets.tpu(name)[0]
    return targets.TARGETS[name]()[0]
  except ImportError as error:
    return pytest.skip(str(error))


@functools.cache
def compiled(name: str, shape: Shape, implementation: Implementation) -> Any:
  """`mask_pack` of a table on one device, chosen when it is lowered."""
  on = SingleDeviceSharding(device(name))
  table = jax.ShapeDtypeStruct(
    (shape.rows, shape.width), shape.dtype, sharding=on
  )
  run = functools.partial(
    mask_pack, layout=shape.layout, implementation=implementation
  )
  return jax.jit(run).lower(table).compile()


WIDE, NARROW = Shape(1 << 20, 128, 8), Shape(1 << 20, 16, 8)
EVERYWHERE = [WIDE, NARROW, Shape(4999, 7, 5, "bfloat16")]
ON_ONE = [
  Shape(70_001, 1, 3),
  Shape(9000, 256, 8, "bfloat16"),
  Shape(3000, 128, 4, "float8_e4m3fn"),
  Shape(9000, 2048, 8),  # the largest blocks
  Shape(50_000, 128, 128),  # the largest weights
]


@pytest.mark.parametrize(
  "topology, shape",
  [(name, shape) for name in targets.TPUS for shape in EVERYWHERE]
  # The least memory of all that are sold.
  + [("v4:2x2x1", shape) for shape in ON_ONE],
  ids=str,
)
def test_mask_pack_compiles_for_every_tpu(topology, shape):
  text = compiled(topology, shape, "pallas").as_text()
  assert "zenjax_mask_pack" in text and "tpu_custom_call" in text


@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=str)
def test_mask_pack_moves_little_more_than_the_table_on_tpu(shape):
  """XLA counts its own instructions; the kernel declares one read, which
  `test_every_block_is_read_once` shows."""
  table = shape.rows * shape.width * 4
  # What is not the table: weights, and words that turn.
  aside = 12 << 20
  by_hand = compiled("v5e:2x4", shape, "pallas")
  assert by_hand.cost_analysis()["bytes accessed"] < table + aside
  assert by_hand.memory_analysis().temp_size_in_bytes < 1 << 20
  by_xla = compiled("v5e:2x4", shape, "xla")
  assert by_xla.cost_analysis()["bytes accessed"] > table + aside

"""Kernels compiled for the chips they are for, with none attached."""

from typing import Any

import chips
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_cases import indexing
from kernel_cases import Shape
import numpy as np
import pytest

from benchmarks import targets
import zenjax
from zenjax.kernels.operations import OPERATIONS

# JAX 0.12 announces that Pallas will leave Triton.
pytestmark = pytest.mark.filterwarnings(
  "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

H200 = "gpu-h200"
TPU = {
  "mask_pack": [
    Shape(1 << 20, 128, 8),
    Shape(1 << 20, 16, 8),
    Shape(4999, 7, 5, "bfloat16"),
    Shape(9000, 2048, 8),  # the largest blocks
    Shape(50_000, 128, 128),  # the largest weights
  ],
  "compact": [
    Shape(1 << 20, 128, 8),
    Shape(1_000_003, 128, 8, "bfloat16"),
    Shape(1001, 1 << 16, 8, "bfloat16"),  # in pieces of a row
  ],
  # Rows that each group receives.
  "merge": [
    Shape(1000, 128, 8, "bfloat16"),
    Shape(1001, 1 << 16, 2, "bfloat16"),  # the largest blocks
  ],
}
TPU["expand"] = TPU["compact"]
GPU = {
  "mask_pack": [
    Shape(70_000_000, 32, 8),  # more than 32 bits of bytes
    Shape(9000, 40, 8, "float16"),
    Shape(70_001, 1, 3),
  ],
  "compact": [Shape(70_000_000, 32, 8), Shape(4999, 7, 5, "bfloat16")],
  "merge": [Shape(1000, 128, 8), Shape(1000, 7, 8, "bfloat16")],
}
GPU["expand"] = GPU["compact"]
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def program(name: str, shape: Shape) -> tuple[Any, list[Any]]:
  """An operation as a function of arrays, and the types of these."""
  struct = jax.ShapeDtypeStruct
  table = struct((shape.rows, shape.width), shape.dtype)
  some = 16 if shape.width > 384 else 1000
  layout, operation = shape.layout, OPERATIONS[name]
  if name == "mask_pack":
    return lambda x: operation(x, layout, kernels="pallas"), [table]
  if name == "compact":

    def compact(table, words, first):
      bitmap = indexing.index(words)
      return operation(table, bitmap, layout, first, some, kernels="pallas")

    words = struct((shape.groups, layout.words), jnp.uint32)
    return compact, [table, words, struct((shape.groups,), jnp.int32)]
  if name == "expand":
    values = struct((some, shape.width), shape.dtype)
    expand = lambda *args: operation(*args, kernels="pallas")
    return expand, [table, struct((some,), jnp.int32), values]

  def merge(*args):
    return operation(*args, 3200, 2000, jnp.float32, kernels="pallas")

  slots = struct((shape.groups, shape.rows), jnp.int32)
  rows = struct((*slots.shape, shape.width), shape.dtype)
  return merge, [slots, rows, struct((), jnp.int32)]


def _cases():
  for shapes_of, each in ((TPU, targets.TPUS), (GPU, (H200,))):
    for name, shapes in shapes_of.items():
      for chip in each:
        for shape in shapes:
          often = chip in ("v5e:2x4", H200)
          marks = () if often else pytest.mark.every_target
          yield pytest.param(chip, name, shape, marks=marks)


@pytest.mark.parametrize(("chip", "name", "shape"), [*_cases()], ids=str)
def test_kernel_compiles(chip, name, shape):
  """Registers of a GPU do not spill, and no table is copied."""
  mesh = Mesh(np.array(chips.devices(chip)[:1]), ("one",))
  run, args = program(name, shape)
  placed = [chips.placed(x, mesh, P()) for x in args]
  mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
  donated = (0,) if name == "expand" else ()
  compiled: Any = (
    jax.jit(mapped, donate_argnums=donated)
    .lower(*placed)
    .compile(compiler_options=NO_SPILLS if chip == H200 else {})
  )
  assert f"zenjax_{name}" in compiled.as_text()
  if name in ("compact", "expand") and shape.rows > 100_000:
    table = shape.rows * shape.width * jnp.dtype(shape.dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < table // 10


@pytest.mark.parametrize(
  ("chip", "dtype", "kernels", "taken"),
  [
    (H200, jnp.float32, "xla", False),
    (H200, jnp.bfloat16, "pallas", True),
    ("v5e:2x4", jnp.float32, "xla", False),
    ("v5e:2x4", jnp.float32, "pallas", True),
  ],
)
def test_what_a_sync_takes(chip, dtype, kernels, taken):
  mesh = Mesh(np.array(chips.devices(chip)), ("data",))
  tx = zenjax.zen_sync("data", sparse=True, partition="hash", kernels=kernels)
  step = jax.shard_map(
    lambda grads: tx.update(grads, tx.init(grads))[0],
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P(),
  )
  table = jax.ShapeDtypeStruct((10_000 * mesh.size, 128), dtype)
  text = jax.jit(step).lower(chips.placed(table, mesh, P("data"))).as_text()
  found = {x for x in OPERATIONS if f"zenjax_{x}" in text}
  assert found == (set(OPERATIONS) if taken else set())

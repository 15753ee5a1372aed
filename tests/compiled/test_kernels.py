"""Kernels compiled for the chips they are for, with none attached.

What a compiler tells of memory traffic is a count of bytes, never a time.
"""

import functools
import math
import types
from typing import Any

import chips
from chips import lowered
from chips import lowered_mask_pack
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp
from kernel_cases import compat
from kernel_cases import indexing
from kernel_cases import Shape
import numpy as np
import pytest

from benchmarks import targets
from benchmarks.cases import gpu
import zenjax
from zenjax.kernels import _dispatch
from zenjax.kernels import operations
from zenjax.kernels import reference
from zenjax.kernels._dispatch import Kernels

# JAX 0.12 announces that Pallas will leave Triton.
pytestmark = pytest.mark.filterwarnings(
  "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


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
  text = lowered_mask_pack(topology, shape, "pallas").compile().as_text()
  assert "zenjax_mask_pack" in text and "tpu_custom_call" in text


@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=str)
def test_mask_pack_moves_little_more_than_the_table_on_tpu(shape):
  """XLA counts its own instructions; the kernel declares one read, which
  `test_every_block_is_read_once` shows."""
  table = shape.rows * shape.width * 4
  # What is not the table: weights, and words that turn.
  aside = 12 << 20
  by_hand = lowered_mask_pack("v5e:2x4", shape, "pallas").compile()
  assert by_hand.cost_analysis()["bytes accessed"] < table + aside
  assert by_hand.memory_analysis().temp_size_in_bytes < 1 << 20
  by_xla = lowered_mask_pack("v5e:2x4", shape, "xla").compile()
  assert by_xla.cost_analysis()["bytes accessed"] > table + aside


NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def ptx(program: Any, directory: Any, name: str) -> str:
  """What Triton makes of the kernel `name`; an error if registers spill."""
  program.compile(
    compiler_options={
      **NO_SPILLS,
      "xla_dump_to": str(directory),
      "xla_dump_emitter_re": ".*",
    }
  )
  texts = [path.read_text() for path in directory.glob("*.ptx")]
  (text,) = [text for text in texts if f".entry {name}" in text]
  # JAX 0.10 has all kernels of a program in one text.
  start = text.index(f".entry {name}")
  return text[start : text.index("\n}", start)]


@pytest.mark.parametrize(
  "shape, accesses",
  [
    (WIDE, 8),
    (Shape(70_000_000, 32, 8), 2),  # more than 32 bits of bytes
    (Shape(9000, 40, 8, "float16"), 1),
  ],
  ids=str,
)
def test_mask_pack_reads_16_bytes_at_once_on_h200(shape, accesses, tmp_path):
  program = lowered_mask_pack("gpu-h200", shape, "pallas")
  text = ptx(program, tmp_path, "zenjax_mask_pack")
  loads = [line for line in text.splitlines() if "ld.global" in line]
  assert len(loads) >= accesses
  assert all("ld.global.v4.b32" in line for line in loads)


@pytest.mark.parametrize(
  "shape", [Shape(70_001, 1, 3), Shape(4999, 7, 5, "bfloat16")], ids=str
)
def test_mask_pack_of_odd_widths_compiles_for_h200(shape, tmp_path):
  program = lowered_mask_pack("gpu-h200", shape, "pallas")
  assert "ld.global" in ptx(program, tmp_path, "zenjax_mask_pack")


def lowered_compact(
  name: str,
  shape: Shape,
  capacity: int,
  implementation: Kernels = "pallas",
) -> Any:
  table = jax.ShapeDtypeStruct((shape.rows, shape.width), shape.dtype)
  words = jax.ShapeDtypeStruct((shape.groups, shape.layout.words), jnp.uint32)
  first = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)

  def run(table, words, first):
    return operations.compact(
      table,
      indexing.index(words),
      shape.layout,
      first,
      capacity,
      kernels=implementation,
    )

  return lowered(name, run, table, words, first)


def lowered_expand(
  name: str,
  shape: Shape,
  rows: int,
  implementation: Kernels = "pallas",
) -> Any:
  table = jax.ShapeDtypeStruct((shape.rows, shape.width), shape.dtype)
  row = jax.ShapeDtypeStruct((rows,), jnp.int32)
  values = jax.ShapeDtypeStruct((rows, shape.width), shape.dtype)
  run = functools.partial(operations.expand, kernels=implementation)
  return lowered(name, run, table, row, values)


ROWS_EVERYWHERE = [WIDE, Shape(1_000_003, 128, 8, "bfloat16")]
ROWS_ON_ONE = [
  Shape(1001, 1 << 16, 8),  # in pieces of a row
  Shape(1001, 1 << 16, 8, "bfloat16"),
  Shape(50_003, 384, 8, "float8_e5m2"),
]


@pytest.mark.parametrize(
  "topology, shape",
  [(name, shape) for name in targets.TPUS for shape in ROWS_EVERYWHERE]
  + [("v4:2x2x1", shape) for shape in ROWS_ON_ONE],
  ids=str,
)
def test_rows_alone_move_on_every_tpu(topology, shape):
  compact = lowered_compact(
    topology, shape, 16 if shape.width > 384 else 1000
  ).compile()
  assert "zenjax_compact" in compact.as_text()
  table = shape.rows * shape.width * jnp.dtype(shape.dtype).itemsize
  assert compact.memory_analysis().temp_size_in_bytes < table // 10
  expand = lowered_expand(topology, shape, 1000).compile()
  assert "zenjax_expand" in expand.as_text()


@pytest.mark.parametrize(
  "shape, vector",
  [
    (WIDE, ".v4"),
    pytest.param(  # more than 32 bits of bytes
      Shape(70_000_000, 32, 8), ".v4", marks=pytest.mark.every_target
    ),
    (Shape(70_001, 1, 3), ""),
    pytest.param(
      Shape(4999, 7, 5, "bfloat16"), "", marks=pytest.mark.every_target
    ),
  ],
  ids=str,
)
def test_rows_move_by_16_bytes_at_once_on_h200(shape, vector, tmp_path):
  program = lowered_compact("gpu-h200", shape, 1000)
  text = ptx(program, tmp_path / "compact", "zenjax_compact")
  assert f"st.global{vector}" in text and f"ld.global{vector}" in text
  program = lowered_expand("gpu-h200", shape, 1000)
  text = ptx(program, tmp_path / "expand", "zenjax_expand")
  assert f"st.global{vector}" in text and f"ld.global{vector}" in text


@pytest.mark.parametrize("operation", [lowered_compact, lowered_expand])
def test_xla_counts_more_bytes_than_the_rows_kernels_declare(operation):
  def counted(implementation):
    program = operation("v5e:2x4", WIDE, 1000, implementation).compile()
    return program.cost_analysis()["bytes accessed"]

  assert counted("pallas") < counted("xla")


def test_no_view_packs_a_narrow_table_for_free():
  """Why kernels that move rows refuse it; figures are in the benchmarks'
  README."""
  table = jax.ShapeDtypeStruct((1 << 23, 16), jnp.float32)
  nbytes = table.size * 4

  def compiled(run, *args):
    program = lowered("v5e:2x4", run, *args).compile()
    temporary = program.memory_analysis().temp_size_in_bytes
    return program.cost_analysis()["bytes accessed"], temporary

  def strided(x):
    return x.reshape(8, -1, 16).transpose(1, 0, 2).reshape(-1, 128)

  for view in (lambda x: x.reshape(-1, 128), strided):
    accessed, temporary = compiled(view, table)
    assert accessed > 2 * nbytes and temporary >= nbytes
  row = jax.ShapeDtypeStruct((8, 10_000), jnp.int32)
  _, temporary = compiled(lambda x, row: x.at[row].get(mode="fill"), table, row)
  assert temporary < nbytes // 100


def lowered_merge(
  name: str,
  shape: tuple[int, int, int],
  dtype: str,
  implementation: Kernels = "pallas",
) -> Any:
  """Of 3200 slots, into rows for 2000."""
  slots = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
  rows = jax.ShapeDtypeStruct(shape, dtype)
  limit = jax.ShapeDtypeStruct((), jnp.int32)

  def run(slots, rows, limit):
    merge = functools.partial(operations.merge, kernels=implementation)
    return merge(slots, rows, limit, 3200, 2000, jnp.float32)

  return lowered(name, run, slots, rows, limit)


@pytest.mark.parametrize(
  "width, dtype", [(128, "float32"), (7, "bfloat16")], ids=str
)
def test_merge_has_no_atomics_on_h200(width, dtype, tmp_path):
  program = lowered_merge("gpu-h200", (8, 1000, width), dtype)
  text = ptx(program, tmp_path, "zenjax_merge")
  assert "atom" not in text and "red.global" not in text
  assert width % 4 or "ld.global.v4" in text


@pytest.mark.parametrize(
  "topology, shape, dtype",
  [(name, (8, 1000, 128), "bfloat16") for name in targets.TPUS]
  + [
    ("v4:2x2x1", (64, 1000, 384), "float32"),
    ("v4:2x2x1", (2, 1001, 1 << 16), "bfloat16"),  # the largest blocks
  ],
  ids=str,
)
def test_merge_compiles_for_every_tpu(topology, shape, dtype):
  text = lowered_merge(topology, shape, dtype).compile().as_text()
  assert "zenjax_merge" in text and "tpu_custom_call" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_moves_fewer_bytes_than_xla_on_tpu(dtype, monkeypatch):
  """XLA counts the body of a loop once, so its sum over sources has none."""

  def counted(implementation):
    program = lowered_merge("v5e:2x4", (8, 1000, 128), dtype, implementation)
    return program.compile().cost_analysis()["bytes accessed"]

  by_hand, one_source = counted("pallas"), counted("xla")
  without_loop = types.SimpleNamespace(**vars(lax) | {"fori_loop": _unrolled})
  monkeypatch.setattr(reference, "lax", without_loop)
  sources = 8 * 1000 * 128 * jnp.dtype(dtype).itemsize
  all_sources = counted("xla")
  assert all_sources > one_source + sources * 7 // 8
  # Both find places in the union, in the same way, for most of the bytes.
  assert by_hand < all_sources - sources


def _unrolled(lower, upper, body, carry):
  for i in range(lower, upper):
    carry = body(i, carry)
  return carry


def test_spills_are_found():
  """A warp that holds 16,384 numbers at once: 512 registers a thread."""

  def kernel(x, out):
    whole = x[...]
    out[...] = whole * jnp.max(whole)

  def run(x):
    return pl.pallas_call(
      kernel,
      out_shape=compat.struct(x.shape, x.dtype, x),
      compiler_params=plgpu.CompilerParams(num_warps=1),
    )(x)

  x = jax.ShapeDtypeStruct((1 << 14,), jnp.float32)
  program = lowered("gpu-h200", run, x)
  with pytest.raises(jax.errors.JaxRuntimeError, match="spilling"):
    program.compile(compiler_options=NO_SPILLS)


@pytest.mark.parametrize("work", ["hash", "columns", "rows"])
def test_all_of_a_sync_copies_no_table_on_a_gpu(work):
  """As `benchmarks.run gpu` runs it, for 8 devices on one by `vmap`.

  By XLA alone JAX 0.12 transposes the tables, for a scatter to all of them.
  """
  rows, width = 1 << 20, 128
  one = jax.sharding.Mesh(np.array([chips.device("gpu-h200")]), ("one",))
  placed = jax.NamedSharding(one, jax.P())
  struct = functools.partial(jax.ShapeDtypeStruct, sharding=placed)
  tables = struct((gpu.DEVICES, rows, width), jnp.float32)
  grads, donated = tables, (0,)
  if gpu.WORK[work].rows:
    ids = struct((gpu.DEVICES, 10_000), jnp.int32)
    values = struct((*ids.shape, width), jnp.float32)
    listed = lambda ids, values: zenjax.SparseRows(ids, values, rows)
    grads, donated = jax.eval_shape(jax.vmap(listed), ids, values), ()
    grads = jax.tree.map(lambda x: struct(x.shape, x.dtype), grads)
  step = gpu.step(gpu.WORK[work].partition, (10_000, 40_000))
  # Triton asks the mesh around it what device that is.
  mapped = jax.shard_map(
    step, mesh=one, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
  )
  with _dispatch.forced("cuda"):
    compiled = jax.jit(mapped, donate_argnums=donated).lower(grads).compile()
  memory: Any = compiled.memory_analysis()
  text = compiled.as_text() or ""
  size = math.prod(tables.shape) * 4
  if donated:
    assert memory.alias_size_in_bytes >= size
  assert memory.temp_size_in_bytes < size / 3
  for name in operations.OPERATIONS if donated else ["merge"]:
    assert f"zenjax_{name}" in text


@pytest.mark.parametrize(
  "target, tables, dtype, goes, taken",
  [
    ("gpu-h200", 1, jnp.float32, False, set(operations.OPERATIONS)),
    ("gpu-h200", 2, jnp.float32, False, {"merge"}),  # They travel as one.
    ("gpu-h200", 1, jnp.bfloat16, False, set()),
    ("gpu-h200", 1, jnp.float32, True, set()),
    ("tpu-v5e", 1, jnp.float32, False, set()),
  ],
)
def test_kernels_that_nobody_asked_for(
  target, tables, dtype, goes, taken, monkeypatch
):
  monkeypatch.setattr(_dispatch.compat, "TRITON_GOES", goes)
  mesh = jax.sharding.Mesh(chips.devices(target), ("data",))
  tx = zenjax.zen_sync("data", sparse=True)
  step = jax.shard_map(
    lambda grads: tx.update(grads, tx.init(grads))[0],
    mesh=mesh,
    in_specs=jax.P("data"),
    out_specs=jax.P(),
  )
  split = jax.NamedSharding(mesh, jax.P("data"))
  shape = 10_000 * mesh.size, 128
  table = jax.ShapeDtypeStruct(shape, dtype, sharding=split)
  grads = {f"table {i}": table for i in range(tables)}
  text = jax.jit(step).lower(grads).as_text()
  found = {x for x in operations.OPERATIONS if f"zenjax_{x}" in text}
  assert found == taken

"""`mask_pack` by kernels: the reference's bits, in interpret mode."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.extend.core
import jax.numpy as jnp
import kernel_cases
from kernel_cases import Shape
import pytest

from zenjax.kernels.mask_pack import _tpu_sizes
from zenjax.kernels.mask_pack import pallas_tpu
from zenjax.kernels.operations import mask_pack
from zenjax.kernels.reference import plus_zero_where
from zenjax.kernels.reference import row_mask

# Rows across lanes where 128 does not divide the width, along sublanes where it
# does; several steps of several blocks; one row; groups that divide nothing.
TPU = [
  Shape(1, 1, 8),
  Shape(45_000, 1, 1),
  Shape(999, 7, 5),
  Shape(20_001, 16, 8),
  Shape(700, 33, 4, contiguous=True),
  Shape(1500, 130, 64),
  Shape(777, 9, 3, "bfloat16"),
  Shape(2000, 40, 8, "bfloat16"),
  Shape(600, 37, 2, "float8_e5m2"),
  Shape(5001, 128, 8),
  Shape(300, 256, 3),
  Shape(700, 384, 6, "bfloat16"),
  Shape(600, 128, 4, "float8_e4m3fn"),
]
# One group and many, words that end within a program, widths that end within a
# piece, more pieces than are unrolled.
CUDA = [
  Shape(1, 1, 8),
  Shape(45_000, 1, 1),
  Shape(999, 7, 5),
  Shape(20_001, 16, 8),
  Shape(700, 33, 4, contiguous=True),
  Shape(1500, 130, 64),
  Shape(300, 300, 3),
  Shape(777, 9, 3, "bfloat16"),
  Shape(2000, 40, 8, "float16"),
  Shape(5001, 128, 8),
  Shape(300, 256, 100),
  Shape(700, 384, 6, "bfloat16"),
  Shape(600, 128, 2, "float16"),
]
KERNELS = [("tpu", s) for s in TPU] + [("cuda", s) for s in CUDA]
EXAMPLES = 40

DRAWN = {
  "seed": st.integers(0, 2**32 - 1),
  "density": st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
  "negative": st.sampled_from([0.0, 0.01, 1.0]),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  """Several blocks of a small table, and short programs."""
  monkeypatch.setattr(_tpu_sizes, "_BLOCK", 32 << 10)


@functools.cache
def programs(platform: str, shape: Shape):
  kernel = functools.partial(
    mask_pack.kernel(platform), layout=shape.layout, interpret=True
  )
  reference = functools.partial(mask_pack.reference, layout=shape.layout)
  return jax.jit(kernel), jax.jit(reference)


@pytest.mark.usually(
  "*rows=600,*", "*rows=1500,*", "*rows=700,*", "*rows=45000,*"
)
@pytest.mark.parametrize("platform, shape", KERNELS, ids=str)
def test_same_bits_as_the_reference(platform, shape):
  @hypothesis.settings(max_examples=EXAMPLES)
  @hypothesis.given(**DRAWN)
  def check(seed, density, negative):
    table = kernel_cases.table(shape, seed, density, negative)
    kernel, reference = programs(platform, shape)
    kernel_cases.assert_same_bits(kernel(table), reference(table))

  check()


def test_at_least_500_tables():
  for platform in mask_pack.kernels:
    assert EXAMPLES * sum(p == platform for p, _ in KERNELS) >= 500


def _blocks(shape):
  """Blocks in the order in which they are read, repeats read once."""
  table = jax.ShapeDtypeStruct((shape.rows, shape.width), shape.dtype)
  jaxpr = jax.make_jaxpr(
    functools.partial(pallas_tpu.mask_pack, layout=shape.layout)
  )(jnp.zeros(table.shape, table.dtype))
  (call,) = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
  mapping = call.params["grid_mapping"]
  index = mapping.block_mappings[0].index_map_jaxpr
  grid = [
    (i, s) for i in range(mapping.grid[0]) for s in range(mapping.grid[1])
  ]
  at = [
    tuple(int(x) for x in jax.extend.core.jaxpr_as_fun(index)(*g)) for g in grid
  ]
  return [a for i, a in enumerate(at) if i == 0 or a != at[i - 1]]


@pytest.mark.parametrize("shape", [TPU[1], TPU[3], TPU[9]], ids=str)
def test_every_block_is_read_once(shape):
  blocks = _blocks(shape)
  assert len(blocks) > 2 and len(set(blocks)) == len(blocks)


def test_nan_is_no_zero_where_it_has_the_bits_of_a_negative_one():
  table = jnp.array([[0.0, jnp.nan], [0.0, 0.0]], "float8_e4m3fnuz")
  mask = row_mask(table)
  assert mask.nonzero.tolist() == mask.written.tolist() == [True, False]
  (cleared,) = plus_zero_where(jnp.array(True), [table])
  assert jnp.isnan(cleared).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
  "platform, shape, served",
  [
    ("tpu", Shape(1000, 128, 8, "float16"), "float32, bfloat16"),
    ("tpu", Shape(1000, 128, 8, "float8_e4m3fnuz"), "negative zero"),
    ("tpu", Shape(1000, 1 << 15, 8), "bytes"),
    ("tpu", Shape(1000, 128, 1000), "groups"),
    ("cuda", Shape(1000, 128, 8, "float8_e5m2"), "float32, bfloat16"),
  ],
)
def test_refuses_and_says_what_it_serves(platform, shape, served):
  table = kernel_cases.table(shape, 0, 0.1, 0.0)
  with pytest.raises(NotImplementedError, match=served):
    mask_pack.kernel(platform)(table, shape.layout, interpret=True)
  with pytest.raises(NotImplementedError, match=served):
    mask_pack(table, shape.layout, kernels="pallas")

"""`merge` by kernels: the reference's bits, in interpret mode."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import kernel_cases
import pytest

from zenjax.kernels.operations import merge

# Sources, rows of each, width, slots, capacity of the union, dtype.
CUDA = [
  (8, 40, 16, 640, 100, "float32"),
  (1, 7, 1, 32, 7, "float32"),
  (5, 33, 130, 64, 64, "float32"),
  (3, 100, 7, 100_000, 300, "bfloat16"),  # found by a sort
  (4, 64, 128, 2048, 1, "float16"),
  (2, 1, 300, 32, 5, "float32"),
  (16, 9, 33, 320, 40, "bfloat16"),
  (8, 300, 4, 992, 992, "float32"),
]
# Blocks of the union that are full and not, sources that have more than they
# hold, several pieces of a row, ranges that start and end within a word.
TPU = [
  (8, 40, 128, 640, 100, "float32"),
  (1, 7, 128, 32, 7, "float32"),
  (3, 100, 128, 100_000, 300, "bfloat16"),  # found by a sort
  (2, 11, 4096, 32, 1, "bfloat16"),
  (16, 9, 128, 320, 40, "bfloat16"),
  (8, 301, 384, 992, 992, "float32"),
]
KERNELS = [
  *(("cuda", shape) for shape in CUDA),
  *(("tpu", shape) for shape in TPU),
]
EXAMPLES = {"cuda": 63, "tpu": 84}


def test_at_least_500_examples():
  for platform in merge.kernels:
    shapes = sum(p == platform for p, _ in KERNELS)
    assert EXAMPLES[platform] * shapes >= 500


@functools.cache
def programs(platform, num_slots, capacity):
  rest = {"num_slots": num_slots, "capacity": capacity, "dtype": jnp.float32}
  kernel = functools.partial(merge.kernel(platform), interpret=True, **rest)
  return jax.jit(kernel), jax.jit(functools.partial(merge.reference, **rest))


@pytest.mark.usually("*16, 9*", "*1, 7*", "tpu-(3, 100*", "cuda-(5, 33*")
@pytest.mark.parametrize("platform, shape", KERNELS, ids=str)
def test_same_bits_as_the_reference(platform, shape):
  @hypothesis.settings(max_examples=EXAMPLES[platform])
  @hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    limit=st.sampled_from([0.0, 0.3, 1.0]),
  )
  def check(seed, density, limit):
    slots, rows = kernel_cases.received(seed, shape, density)
    limit = jnp.int32(limit * shape[3])
    kernel, reference = programs(platform, *shape[3:5])
    kernel_cases.assert_same_bits(
      kernel(slots, rows, limit), reference(slots, rows, limit)
    )

  check()


@pytest.mark.parametrize(
  "capacity, dtype, served",
  [
    (0, "float32", "at least"),
    (3, "bfloat16", "sums"),
    (3, "float32", "on tpu: .*zenjax.packed"),
  ],
)
def test_refuses_and_says_what_it_serves(capacity, dtype, served):
  slots, rows = kernel_cases.received(0, CUDA[0], 0.5)
  args = slots, rows, jnp.int32(9), CUDA[0][3], capacity, jnp.dtype(dtype)
  with pytest.raises(NotImplementedError, match=served):
    merge(*args, kernels="pallas")

"""The oracle itself: it passes `lax.pmean`, and it can fail."""

import cases
from jax import lax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import runners

F32 = np.dtype(np.float32)


def right(stack, op: oracle.Op = "mean"):
  """A result in the middle of what is right, on every device."""
  with np.errstate(over="ignore", invalid="ignore"):
    return np.stack([oracle.exact(stack, op).astype(stack.dtype)] * len(stack))


def sync_in_float32(x, axis):
  return lax.pmean(x.astype(jnp.float32), axis).astype(x.dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_pmean_in_float32_passes_every_case(dtype):
  run = runners.RUNNERS["vmap"](sync_in_float32, 3)
  for name, stack in cases.every_case(3, 37, 5, dtype):
    oracle.check(run(stack), stack, label=name)


def test_pmean_in_16_bits_fails_where_it_overflows():
  run = runners.RUNNERS["vmap"](lax.pmean, 8)
  stack = cases.large(np.random.default_rng(0), 8, 37, 5, cases.FLOAT16)
  with pytest.raises(AssertionError, match="wrong"):
    oracle.check(run(stack), stack)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_two_units_in_the_last_place_are_too_many(n, dtype):
  """On one shard, one element: where one device alone has a value."""
  rng = np.random.default_rng(0)
  stack = cases.disjoint_ids(rng, n, 37, 5, dtype)
  result = right(stack)
  oracle.check(result, stack)
  words = oracle.bits(result)
  words[n - 1, 11, 3] += 2
  with pytest.raises(AssertionError, match="1 of .* are wrong"):
    oracle.check(words.view(dtype), stack)


def test_a_single_contribution_to_a_sum_is_exact():
  stack = cases.disjoint_ids(np.random.default_rng(0), 3, 37, 5, F32)
  result = right(stack, "sum")
  oracle.check(result, stack, "sum")
  oracle.bits(result)[1, 11, 3] += 1
  with pytest.raises(AssertionError, match="wrong"):
    oracle.check(result, stack, "sum")


def test_replicas_must_agree_on_the_sign_of_zero_and_on_subnormals():
  stack = cases.minus_zero(np.random.default_rng(0), 2, 3, 2, F32)
  result = np.zeros_like(stack)
  oracle.check(result, stack)
  oracle.check(-result, stack)
  result[1, 2, 1] = -0.0
  with pytest.raises(AssertionError, match="replicas: 1 elements differ"):
    oracle.check_replicas(result)
  stack = cases.keep(np.full((2, 3, 2), 1e-40, F32), [[1], []])
  flushed, kept = np.zeros_like(stack), right(stack)
  oracle.check(flushed, stack)
  oracle.check(kept, stack)
  with pytest.raises(AssertionError, match="replicas: .* differ"):
    oracle.check(np.stack([flushed[0], kept[0]]), stack)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_must_come_through(value):
  stack = np.zeros((2, 4, 2), np.float32)
  stack[1, 2, 1] = value
  result = right(stack)
  oracle.check(result, stack)
  for other in (0.0, np.nan, np.inf, -np.inf):
    if not np.array_equal(other, value, equal_nan=True):
      spoiled = result.copy()
      spoiled[:, 2, 1] = other
      with pytest.raises(AssertionError, match="wrong"):
        oracle.check(spoiled, stack)


def test_nonzero_rows_are_told_by_bits():
  rows = np.array(
    [[0, 0], [-0.0, 0], [1, -1], [1e-45, 0], [np.nan, 0], [0, -np.inf]],
    np.float32,
  )
  want = [False, False, True, True, True, True]
  np.testing.assert_array_equal(oracle.nonzero_rows(rows), want)

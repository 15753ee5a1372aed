"""Kernels for TPUs under a detector of races: every copy is awaited in time."""

import dataclasses
from typing import Any

import jax

# What the detector found is told by nothing public on JAX 0.10.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import kernel_cases
from kernel_cases import indexing
from kernel_cases import Shape
import numpy as np
import pytest

from zenjax.kernels import operations

# Rows that are words, and that share them.
TABLES = [Shape(301, 128, 2), Shape(301, 256, 2, "bfloat16")]
MERGED = [
  (3, 19, 256, 64, 50, "float32"),
  (3, 19, 128, 64, 50, "bfloat16"),
]


def compact(shape):
  table = kernel_cases.table(shape, 1, 0.1, 0.0)
  words = operations.mask_pack.reference(table, shape.layout).words
  first = jnp.zeros(shape.groups, jnp.int32)
  return table, indexing.index(words), shape.layout, first, 24


def expand(shape):
  table = kernel_cases.table(shape, 1, 0.1, 0.0)
  values = kernel_cases.table(shape._replace(rows=24), 2, 1.0, 0.0)
  # Neighbours, the last row among them.
  row = np.random.default_rng(0).permutation(np.arange(278, 302))
  return table, jnp.asarray(row, jnp.int32), values


def merge(shape):
  slots, rows = kernel_cases.received(1, shape, 0.9)
  return slots, rows, jnp.int32(shape[3]), *shape[3:5], jnp.float32


CASES = [
  *((case, shape) for case in (compact, expand) for shape in TABLES),
  *((merge, shape) for shape in MERGED),
]
NAMES = [f"{case.__name__}-{shape}" for case, shape in CASES]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  monkeypatch.setattr("zenjax.kernels.tpu.words.MOST_ROWS", 16)


def run(case, shape, **options: Any):
  """The result of the kernel, of the reference, and whether there is a race."""
  names = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
  if "on_race" in names:  # newer ones raise
    options["on_race"] = "warn"
  params = pltpu.InterpretParams(detect_races=True, **options)
  operation, args = operations.OPERATIONS[case.__name__], case(shape)
  kernel = jax.jit(lambda: operation.kernel("tpu")(*args, interpret=params))
  got = jax.block_until_ready(kernel())
  races = interpret_pallas_call.races
  assert races is not None and any(races.writes.values())
  return got, jax.jit(lambda: operation.reference(*args))(), races.races_found


@pytest.mark.parametrize("case, shape", CASES, ids=NAMES)
def test_no_race_and_the_bits_of_the_reference(case, shape):
  got, want, raced = run(case, shape)
  assert not raced
  kernel_cases.assert_same_bits(got, want)


@pytest.mark.parametrize("case", [compact, expand, merge])
def test_copies_that_nobody_awaits_are_found(case, monkeypatch):
  copy = pltpu.make_async_copy

  class Unawaited:
    def __init__(self, *args):
      self.start = copy(*args).start

    def wait(self):
      pass

  monkeypatch.setattr(pltpu, "make_async_copy", Unawaited)
  shape = next(shape for each, shape in CASES if each is case)
  *_, raced = run(case, shape, dma_execution_mode="eager")
  assert raced

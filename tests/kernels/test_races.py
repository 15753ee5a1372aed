"""Kernels for TPUs under a detector of races: every copy is awaited in time."""

import dataclasses
from typing import Any

import jax

# What the detector found is told by nothing public on JAX 0.10.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import kernel_cases
from kernel_cases import Shape
import pytest

from zenjax.kernels.operations import OPERATIONS

# Rows that are words, and that share them.
TABLES = [Shape(301, 128, 2), Shape(301, 256, 2, "bfloat16")]
MERGED = [
  (3, 19, 256, 64, 50, "float32"),
  (3, 19, 128, 64, 50, "bfloat16"),
]


CASES = [
  *((name, shape) for name in ("compact", "expand") for shape in TABLES),
  *(("merge", shape) for shape in MERGED),
]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  monkeypatch.setattr("zenjax.kernels.tpu.words.MOST_ROWS", 16)


def run(name, shape, **options: Any):
  """The result of the kernel, of the reference, and whether there is a race."""
  names = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
  if "on_race" in names:  # newer ones raise
    options["on_race"] = "warn"
  params = pltpu.InterpretParams(detect_races=True, **options)
  operation = OPERATIONS[name]
  args = kernel_cases.arguments(name, shape)
  kernel = jax.jit(lambda: operation.kernel("tpu")(*args, interpret=params))
  got = jax.block_until_ready(kernel())
  races = interpret_pallas_call.races
  assert races is not None and any(races.writes.values())
  return got, jax.jit(lambda: operation.reference(*args))(), races.races_found


@pytest.mark.parametrize("name, shape", CASES, ids=str)
def test_no_race_and_the_bits_of_the_reference(name, shape):
  got, want, raced = run(name, shape)
  assert not raced
  kernel_cases.assert_same_bits(got, want)


@pytest.mark.parametrize("name", ["compact", "expand", "merge"])
def test_copies_that_nobody_awaits_are_found(name, monkeypatch):
  copy = pltpu.make_async_copy

  class Unawaited:
    def __init__(self, *args):
      self.start = copy(*args).start

    def wait(self):
      pass

  monkeypatch.setattr(pltpu, "make_async_copy", Unawaited)
  *_, raced = run(name, dict(reversed(CASES))[name], dma_execution_mode="eager")
  assert raced

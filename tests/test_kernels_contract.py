"""The contract of `test_contract.py` with kernels on in all of a sync.

Interpreted: `interpret=True` runs the kernels for TPUs and GPUs as XLA
programs, which know neither types that vary over a mesh nor semaphores;
`InterpretParams` does, for TPUs alone, and takes seconds a table.
"""

import functools
from typing import Any, NamedTuple

import cases
from jax.experimental.pallas import tpu as pltpu
import numpy as np
import oracle
import pytest
import runners

import zenjax
from zenjax.kernels import _dispatch
from zenjax.kernels.operations import OPERATIONS


class Program(NamedTuple):
  """One program in which every operation takes its kernel, if it has one."""

  platform: str
  runner: str
  dtype: np.dtype
  n: int
  shape: tuple[int, int]
  options: dict[str, Any]
  interpret: Any = True

  def __str__(self):
    rows, width = self.shape
    return f"{self.platform}-{self.runner}-{self.dtype}-n{self.n}-{rows}x{width}"


PROGRAMS = [
  # A first round of a few rows, and loops for the rest.
  Program(
    "cuda",
    "vmap",
    cases.FLOAT32,
    8,
    (300, 16),
    {"partition": "hash", "capacities": (4, 12)},
  ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_case_with_kernels(program):
  sync = functools.partial(zenjax.sparse_pmean, **program.options)
  run = runners.RUNNERS[program.runner](sync, program.n)
  found = []
  with _dispatch.forced(program.platform, interpret=program.interpret):
    for name, stack in cases.every_case(program.n, *program.shape, program.dtype):
      try:
        oracle.check(run(stack), stack, "mean", label=name)
      except AssertionError as error:
        found.append(str(error))
  assert not found, "\n".join(found)

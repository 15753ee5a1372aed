"""The contract of `zen_sync` with kernels in all of it, interpreted.

`interpret=True` runs kernels as XLA programs, which know neither types that
vary over a mesh nor semaphores. `InterpretParams` does, for TPUs alone, and
takes seconds a table.
"""

from typing import Any, NamedTuple

import cases
from jax.experimental.pallas import tpu as pltpu
import numpy as np
import oracle
import pytest
import runners
from usual import usual

import zenjax
from zenjax.kernels._dispatch import interpreted


class Program(NamedTuple):
  """A program in which every operation takes its kernel."""

  platform: str
  runner: str
  dtype: np.dtype
  n: int
  shape: tuple[int, int]
  options: dict[str, Any]
  interpret: Any = True


# First rounds of a guessed size, of one row and of a few, with loops for what
# does not fit; arrays and rows out; owners of rows and of columns.
FEW = {"partition": "hash", "capacities": (4, 12)}
ONE = {"partition": "columns", "capacities": (1, 1)}
ALL = {"partition": "hash", "capacities": (32, 32)}
PROGRAMS = {
  "cuda": Program("cuda", "pmap", cases.BFLOAT16, 3, (257, 7), {}),
  "cuda-columns": Program(
    "cuda", "shard_map_replicated", cases.FLOAT16, 2, (41, 33), ONE
  ),
  "cuda-rows": Program(
    "cuda", "vmap", cases.BFLOAT16, 1, (41, 5), {"output": "rows"}
  ),
  "tpu": Program("tpu", "vmap", cases.FLOAT32, 3, (97, 128), FEW),
}
# Types that vary, and copies and semaphores one by one. All rows fit the first
# round: a loop that turns takes the simulator a minute.
SIMULATED = Program(
  "tpu",
  "shard_map_vma_replicated",
  cases.FLOAT32,
  2,
  (33, 128),
  ALL,
  pltpu.InterpretParams(),
)


def check(program: Program, named_stacks) -> None:
  def run_with(kernels):
    def sync(x, axis_name):
      synced = zenjax.sparse_pmean(
        x, axis_name, kernels=kernels, **program.options
      )
      rows = isinstance(synced, zenjax.SparseRows)
      return synced.to_dense() if rows else synced

    return runners.RUNNERS[program.runner](sync, program.n)

  by_kernels, plain = run_with("pallas"), run_with("xla")
  for name, stack in named_stacks:
    with interpreted(program.platform, program.interpret):
      got = by_kernels(stack)
    oracle.check(got, stack, "mean", label=name)
    oracle.check_same_bits(got, plain(stack), label=name, any_nan=True)


@pytest.mark.parametrize("name", usual(PROGRAMS, "cuda", "tpu"))
def test_every_case_with_kernels(name):
  """They give the bits of plain JAX."""
  program = PROGRAMS[name]
  check(program, cases.every_case(program.n, *program.shape, program.dtype))


@pytest.mark.filterwarnings("ignore:`capacities` of leaf:UserWarning")
def test_kernels_in_a_simulated_tpu():
  rng = np.random.default_rng(0)
  n, (rows, width) = SIMULATED.n, SIMULATED.shape
  check(SIMULATED, [("half", cases.half(rng, n, rows, width, SIMULATED.dtype))])

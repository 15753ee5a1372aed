"""The contract of `test_contract.py` with kernels on in all of a sync.

Interpreted: `interpret=True` runs the kernels for TPUs and GPUs as XLA
programs, which know neither types that vary over a mesh nor semaphores;
`InterpretParams` does, for TPUs alone, and takes seconds a table.
"""

from typing import Any, NamedTuple

import cases
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import oracle
import pytest
import runners

import zenjax
from zenjax.kernels import _dispatch
from zenjax.kernels.operations import OPERATIONS


class Program(NamedTuple):
  """One program in which every operation takes its kernel, if it has one.

  `kernels` are those that it must take at least.
  """

  platform: str
  kernels: set[str]
  runner: str
  dtype: np.dtype
  n: int
  shape: tuple[int, int]
  options: dict[str, Any]
  interpret: Any = True

  def __str__(self):
    rows, width = self.shape
    how = "plain" if self.interpret is True else "simulated"
    return (
      f"{self.platform}-{how}-{self.runner}-{self.dtype}-n{self.n}"
      f"-{rows}x{width}"
    )


ALL, ROWS = set(OPERATIONS), {"mask_pack", "compact", "expand"}
# First rounds of a guessed size, of one row and of a few, with loops for what
# does not fit; arrays and rows out; owners of rows and of columns.
FEW = {"partition": "hash", "capacities": (4, 12)}
ONE = {"partition": "columns", "capacities": (1, 1)}
PROGRAMS = [
  Program("cuda", ALL, "vmap", cases.FLOAT32, 8, (300, 16), FEW),
  Program("cuda", ALL, "pmap", cases.BFLOAT16, 3, (257, 7), {}),
  Program("cuda", ALL, "shard_map_replicated", cases.FLOAT16, 2, (41, 33), ONE),
  Program(
    "cuda",
    {"mask_pack", "merge"},
    "vmap",
    cases.BFLOAT16,
    1,
    (41, 5),
    {"output": "rows"},
  ),
  Program("tpu", ROWS, "vmap", cases.FLOAT32, 8, (97, 128), FEW),
  Program(
    "tpu", {"mask_pack"}, "shard_map_shards", cases.BFLOAT16, 3, (257, 7), {}
  ),
]
# Types that vary, and copies and semaphores one by one. All rows fit the first
# round: a loop that turns takes the simulator a minute.
SIMULATED = Program(
  "tpu",
  ROWS,
  "shard_map_vma_replicated",
  cases.FLOAT32,
  2,
  (33, 128),
  {"partition": "hash", "capacities": (32, 32)},
  pltpu.InterpretParams(),
)


def failures(program: Program, named_stacks) -> list[str]:
  """The messages of all cases that break the contract."""

  def sync(x, axis_name):
    synced = zenjax.sparse_pmean(x, axis_name, **program.options)
    rows = isinstance(synced, zenjax.SparseRows)
    return synced.to_dense() if rows else synced

  run = runners.RUNNERS[program.runner](sync, program.n)
  found = []
  with (
    _dispatch.forced(program.platform, interpret=program.interpret),
    _dispatch.recording() as calls,
  ):
    for name, stack in named_stacks:
      try:
        oracle.check(run(stack), stack, "mean", label=name)
      except AssertionError as error:
        found.append(str(error))
  ran = {call.name for call in calls if call.kernels}
  assert program.kernels <= ran
  return found


@pytest.mark.usually("tpu-plain-shard*", "cuda-plain-shard*")
@pytest.mark.parametrize(
  "program",
  [
    *PROGRAMS[:-3],
    pytest.param(PROGRAMS[-3], marks=pytest.mark.more),
    *PROGRAMS[-2:],
  ],
  ids=str,
)
def test_every_case_with_kernels(program):
  rows, width = program.shape
  stacks = cases.every_case(program.n, rows, width, program.dtype)
  found = failures(program, stacks)
  assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore:`capacities` of leaf:UserWarning")
def test_kernels_in_a_simulated_tpu():
  rng = np.random.default_rng(0)
  n, (rows, width) = SIMULATED.n, SIMULATED.shape
  stack = cases.half(rng, n, rows, width, SIMULATED.dtype)
  found = failures(SIMULATED, [("half", stack)])
  assert not found, "\n".join(found)


def test_plain_interpreter_leaves_varying_types_to_the_reference():
  n, shape = SIMULATED.n, SIMULATED.shape
  mapped = jax.shard_map(
    lambda x: zenjax.sparse_pmean(x[0], runners.AXIS, partition="hash"),
    mesh=runners.mesh(n),
    in_specs=P(runners.AXIS),
    out_specs=P(),
  )
  with (
    _dispatch.forced("cuda", interpret=True),
    _dispatch.recording() as calls,
  ):
    jax.eval_shape(mapped, jnp.zeros((n, *shape)))
  assert calls and not any(call.kernels for call in calls)

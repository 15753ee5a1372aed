"""What XLA makes of it: collectives of the compiled program, per backend.

TPU and GPU programs are compiled where their compilers are installed
(`pip install -e '.[aot]'`), with no such device attached.
"""

import functools
from typing import Any

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest
import steps

from benchmarks import targets

ROWS, WIDTH = 20_000, 32

# What the dense path's loop holds.
_DENSE = {"cpu": ["reduce-scatter", "all-gather"]}


@functools.cache
def program(target: str, partition: Any) -> str:
  """HLO of a step that only synchronizes, for eight devices of a target."""
  try:
    devices = targets.TARGETS[target]()
  except ImportError as error:
    pytest.skip(str(error))
  mesh = Mesh(np.array(devices), ("data",))
  table = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
  lowered = steps.lower_sync(table, mesh, partition=partition)
  text = lowered.compile().as_text()
  assert text is not None
  return text


# `test_ahead_of_time.py` has CI count them in whole steps for GPUs.
_TARGETS = [
  pytest.param(
    target,
    marks=[pytest.mark.every_target] if target == "gpu-h200" else [],
  )
  for target in targets.TARGETS
]


@pytest.mark.parametrize(
  "partition", ["hash", pytest.param("columns", marks=pytest.mark.more)]
)
@pytest.mark.parametrize("target", _TARGETS)
def test_only_the_dense_path_sends_the_table(target, partition):
  seen = hlo.collectives(program(target, partition))
  dense = [f for f in seen if f.inside == ("while",)]
  assert [f.op for f in dense] == _DENSE.get(target, ["all-reduce"])
  for found in seen:
    assert found in dense or found.elements < ROWS * WIDTH // 2
    assert target == "cpu" or "branch" not in found.inside


@pytest.mark.parametrize("target", _TARGETS)
def test_first_round_alone_is_outside_the_loops(target):
  """XLA may not hoist a push out of its loop: it would run at every step."""
  seen = hlo.collectives(program(target, "hash"))
  # CPUs, which overlap nothing, leave it out where all tables are dense, and
  # sum their samples.
  alone = ("branch",) if target == "cpu" else ()
  first = [f.op for f in seen if f.inside == alone]
  told = ["all-reduce"] if target == "cpu" else []
  assert first == ["all-to-all", "all-gather", *told]
  rest = [f for f in seen if len(f.inside) > 1]
  assert {f.op for f in rest} == {"all-to-all", "all-gather"}
  assert all(f.inside == ("while", "while") for f in rest)

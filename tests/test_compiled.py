"""What XLA makes of it: collectives of the compiled program, per backend.

TPU and GPU programs are compiled where their compilers are installed
(`pip install -e '.[aot]'`), with no such device attached.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest
import steps

from benchmarks import targets

ROWS, WIDTH = 20_000, 32

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
  r" = (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter"
  r"|ragged-all-to-all|collective-permute|collective-broadcast)"
  r"(?:-start)?\("
)
_CALLED = re.compile(
  r"(body|calls|to_apply|branch_computations|true_computation"
  r"|false_computation)=(\{[^}]*\}|[%\w.\-]+)"
)
_SHAPE = re.compile(r"[a-z]+\d+\[([\d,]*)\]")

# What the dense path's loop holds.
_DENSE = {"cpu": ["reduce-scatter", "all-gather"]}


class Found(NamedTuple):
  """A collective of a compiled program."""

  op: str
  elements: int  # of all its results
  inside: tuple[str, ...]  # loops and branches around it, outermost first


def collectives(text: str) -> list[Found]:
  """Every collective in HLO text, calls followed from the entry."""
  computations: dict[str, list[str]] = {}
  entry, lines = "", []
  for line in text.splitlines():
    if header := _HEADER.match(line):
      lines = computations.setdefault(header[1], [])
      entry = header[1] if line.startswith("ENTRY") else entry
    else:
      lines.append(line)
  found: list[Found] = []

  def walk(name, inside):
    for line in computations[name]:
      if match := _COLLECTIVE.search(line):
        shapes = (s.split(",") for s in _SHAPE.findall(match[1]))
        sizes = (math.prod(int(d) for d in dims if d) for dims in shapes)
        found.append(Found(match[2], sum(sizes), inside))
      for how, names in _CALLED.findall(line):
        kind = {"body": ("while",), "calls": (), "to_apply": ()}
        around = kind.get(how, ("branch",))
        for called in names.strip("{}").split(", "):
          walk(called.removeprefix("%"), (*inside, *around))

  walk(entry, ())
  return found


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


@pytest.mark.parametrize("partition", ["hash", "columns"])
@pytest.mark.parametrize("target", targets.TARGETS)
def test_only_the_dense_path_sends_the_table(target, partition):
  seen = collectives(program(target, partition))
  dense = [f for f in seen if f.inside == ("while",)]
  assert [f.op for f in dense] == _DENSE.get(target, ["all-reduce"])
  for found in seen:
    assert found in dense or found.elements < ROWS * WIDTH // 2
    assert "branch" not in found.inside


@pytest.mark.parametrize("target", targets.TARGETS)
def test_first_round_alone_is_outside_the_loops(target):
  """XLA may not hoist a push out of its loop: it would run at every step."""
  seen = collectives(program(target, "hash"))
  first = [f.op for f in seen if not f.inside]
  assert first == ["all-to-all", "all-gather"]
  rest = [f for f in seen if len(f.inside) > 1]
  assert {f.op for f in rest} == {"all-to-all", "all-gather"}
  assert all(f.inside == ("while", "while") for f in rest)

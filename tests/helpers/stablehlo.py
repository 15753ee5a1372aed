"""What stands in a lowered program: collectives, and where."""

import itertools
import math
from typing import Any, NamedTuple

_COLLECTIVES = (
  "stablehlo.all_to_all",
  "stablehlo.all_gather",
  "stablehlo.all_reduce",
  "stablehlo.reduce_scatter",
  "stablehlo.collective_permute",
)
_BRANCHES = ("stablehlo.while", "stablehlo.case", "stablehlo.if")


class Found(NamedTuple):
  """A collective in the lowered program."""

  op: str
  words: int  # of the operand
  dtype: str
  inside: tuple[str, ...]  # branches and loops around it


def _functions(lowered: Any) -> dict[str, Any]:
  """The functions of a lowered program, by name."""
  module = lowered.compiler_ir("stablehlo")
  return {
    op.attributes["sym_name"].value: op.operation
    for op in module.body.operations
    if op.operation.name == "func.func"
  }


def _blocks(op: Any) -> list[list[Any]]:
  """The operations that are directly in an operation, block by block."""
  blocks = [block for region in op.regions for block in region.blocks]
  return [[inner.operation for inner in block.operations] for block in blocks]


def collectives(lowered: Any) -> list[Found]:
  """Every collective of a lowered program, calls followed."""
  functions = _functions(lowered)
  found: list[Found] = []

  def walk(op, inside):
    for inner in itertools.chain(*_blocks(op)):
      if inner.name in _COLLECTIVES:
        found.append(_describe(inner, inside))
      elif inner.name in ("func.call", "call"):
        walk(functions[inner.attributes["callee"].value], inside)
      else:
        deeper = (*inside, inner.name) if inner.name in _BRANCHES else inside
        walk(inner, deeper)

  walk(functions["main"], ())
  return found


def _describe(op: Any, inside: tuple[str, ...]) -> Found:
  text = str(op.operands[0].type).removeprefix("tensor<").removesuffix(">")
  *shape, dtype = text.split("x")
  name = op.name.removeprefix("stablehlo.")
  return Found(name, math.prod(map(int, shape)), dtype, inside)


def unordered(lowered: Any) -> list[str]:
  """Pairs of collectives over different groups between which no data flows.

  Devices may run such a pair in different orders, and wait for each other.
  """
  functions = _functions(lowered)

  def inside(op):
    """All operations of an operation, itself included, calls followed."""
    yield op
    if op.name in ("func.call", "call"):
      yield from inside(functions[op.attributes["callee"].value])
    for inner in itertools.chain(*_blocks(op)):
      yield from inside(inner)

  def groups(op):
    over = lambda x: [
      str(x.attributes[name])
      for name in ("replica_groups", "source_target_pairs")
      if name in x.attributes
    ]
    return {(x.name, *over(x)) for x in inside(op) if x.name in _COLLECTIVES}

  found = []
  every = [x for op in functions.values() for x in inside(op)]
  for block in itertools.chain(*map(_blocks, every)):
    before, maker, seen = {}, {}, []
    for op in block:
      used = [value for x in inside(op) for value in x.operands]
      direct = {maker[value] for value in used if value in maker}
      number = len(before)
      before[number] = direct.union(*[before[i] for i in direct])
      maker |= dict.fromkeys(op.results, number)
      if mine := groups(op):
        for other, theirs in seen:
          if (
            len({over for _, over in mine | theirs}) > 1
            and other not in before[number]
          ):
            found.append(f"{sorted(theirs)} and {sorted(mine)}")
        seen.append((number, mine))
  return found

"""What stands in a lowered program: collectives, and where."""

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


def collectives(lowered: Any) -> list[Found]:
  """Every collective of a lowered program, calls followed."""
  module = lowered.compiler_ir("stablehlo")
  functions = {
    op.attributes["sym_name"].value: op
    for op in module.body.operations
    if op.operation.name == "func.func"
  }
  found: list[Found] = []

  def walk(op, inside):
    for region in op.operation.regions:
      for block in region.blocks:
        for inner in block.operations:
          name = inner.operation.name
          if name in _COLLECTIVES:
            found.append(_describe(inner, inside))
          elif name in ("func.call", "call"):
            callee = inner.operation.attributes["callee"].value
            walk(functions[callee], inside)
          else:
            deeper = (*inside, name) if name in _BRANCHES else inside
            walk(inner, deeper)

  walk(functions["main"], ())
  return found


def _describe(op: Any, inside: tuple[str, ...]) -> Found:
  operand = jax_shape(op.operation.operands[0].type)
  size = math.prod(operand[0])
  name = op.operation.name.removeprefix("stablehlo.")
  return Found(name, size, operand[1], inside)


def jax_shape(tensor: Any) -> tuple[tuple[int, ...], str]:
  *dims, dtype = (
    str(tensor).removeprefix("tensor<").removesuffix(">").split("x")
  )
  return tuple(int(d) for d in dims), dtype


def unordered(lowered: Any) -> list[str]:
  """Pairs of collectives over different groups between which no data flows.

  Devices may run such a pair in different orders, and wait for each other.
  """
  module = lowered.compiler_ir("stablehlo")
  functions = {
    op.attributes["sym_name"].value: op.operation
    for op in module.body.operations
    if op.operation.name == "func.func"
  }

  def inside(op):
    """All operations of an operation, itself included, calls followed."""
    yield op
    if op.name in ("func.call", "call"):
      yield from inside(functions[op.attributes["callee"].value])
    for block in blocks(op):
      for inner in block.operations:
        yield from inside(inner.operation)

  def blocks(op):
    return [block for region in op.regions for block in region.blocks]

  def groups(op):
    over = lambda x: [
      str(x.attributes[name])
      for name in ("replica_groups", "source_target_pairs")
      if name in x.attributes
    ]
    return {(x.name, *over(x)) for x in inside(op) if x.name in _COLLECTIVES}

  found = []
  every = [x for op in functions.values() for x in inside(op)]
  for block in [block for op in every for block in blocks(op)]:
    before, maker, seen = {}, {}, []
    for op in [x.operation for x in block.operations]:
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

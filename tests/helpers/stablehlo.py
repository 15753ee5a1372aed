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

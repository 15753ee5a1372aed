"""What stands in the text of a compiled program."""

import math
import re
from typing import NamedTuple

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
  r" = (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter"
  r"|ragged-all-to-all|collective-permute|collective-broadcast)"
  r"(-start)?\("
)
_CALLED = re.compile(
  r"(body|calls|to_apply|branch_computations|true_computation"
  r"|false_computation)=(\{[^}]*\}|[%\w.\-]+)"
)
_SHAPE = re.compile(r"[a-z]+\d+\[([\d,]*)\]")
# One collective that a TPU runs beside other work is written several times.
_CHAIN = re.compile(r'chain_id="(\d+)"')


class Found(NamedTuple):
  """A collective of a compiled program."""

  op: str
  elements: int  # of all its results
  inside: tuple[str, ...]  # loops and branches around it, outermost first


def computations(text: str) -> dict[str, list[str]]:
  """The lines of every computation; the entry's also under ""."""
  found: dict[str, list[str]] = {}
  lines: list[str] = []
  for line in text.splitlines():
    if header := _HEADER.match(line):
      lines = found.setdefault(header[1], [])
      if line.startswith("ENTRY"):
        found[""] = lines
    else:
      lines.append(line)
  return found


def collectives(text: str, devices: int = 8) -> list[Found]:
  """Every collective, calls followed from the entry."""
  bodies = computations(text)
  found: list[Found] = []
  chains: set[tuple[str, ...]] = set()

  def walk(name, inside):
    for line in bodies[name]:
      if match := _COLLECTIVE.search(line):
        chain = _CHAIN.search(line)
        seen = chain and (match[2], chain[1], *inside)
        if not seen or seen not in chains:
          chains.add(seen or ())
          found.append(Found(match[2], _elements(match, devices), inside))
      for how, names in _CALLED.findall(line):
        kind = {"body": ("while",), "calls": (), "to_apply": ()}
        around = kind.get(how, ("branch",))
        for called in names.strip("{}").split(", "):
          walk(called.removeprefix("%"), (*inside, *around))

  walk("", ())
  return found


def _total(result):
  shapes = (s.split(",") for s in _SHAPE.findall(result))
  return sum(math.prod(int(d) for d in dims if d) for dims in shapes)


def _elements(match, devices):
  total = _total(match[1])
  # A start names its operands as well; a sum's does not in JAX 0.10.
  operands = match[3] and match[1].startswith("(")
  if not operands or (match[2] == "all-reduce" and match[1][1] != "("):
    return total
  gathered = match[2] == "all-gather"
  return total * devices // (devices + 1) if gathered else total // 2

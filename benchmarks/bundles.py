"""Counts of every operation by the compiler for TPUs: no time, none attached.

`python -m benchmarks.bundles` compiles the operations by XLA and by Pallas, and
tells the bytes that XLA's cost model has a program access, the instructions
that read the table, and the bundles of machine code, with the registers that
had to be stored to make room. What is in a loop counts once, bundles and bytes,
whatever its turns: XLA's `merge` adds source by source in a loop, of which one
counts, and a kernel declares all. Bytes in fast memory count as those in slow
memory do, and every number gathered as the tile that it is in.
"""

import argparse
import functools
import itertools
import os
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from benchmarks import harness
from benchmarks import table
from benchmarks import targets
from benchmarks.cases import kernels
from zenjax.kernels._dispatch import Kernels
from zenjax.kernels.operations import OPERATIONS

_WAYS: tuple[Kernels, ...] = ("xla", "pallas")
_TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")
# Vector and scalar registers stored to make room.
_SPILL = re.compile(r"\b[vs]st \[[vs]mem:\[#allocation\d+_spill")
_PARAMETER = re.compile(r"%([\w.\-]+) = \S+ parameter\((\d+)\)")


class Dump(NamedTuple):
  """Machine code of what was compiled, by name of its instruction."""

  bundles: dict[str, int]
  spills: dict[str, int]


def read(directory: pathlib.Path) -> Dump:
  """Returns the dump in `directory`, without control around instructions."""
  bundles, spills = {}, {}
  for path in directory.glob("*final_bundles.txt"):
    # <time>-<instruction>-<number of the pass>-<pass>.txt
    _, _, rest = path.name.partition("-")
    name = re.split(r"-\d+-", rest)[0]
    if name.startswith("<") or name == "TLP":
      continue
    text = path.read_text()
    if "schedule-analysis" in path.name:
      if total := _TOTAL.search(text):
        bundles[name] = int(total[1])
    else:
      spills[name] = len(_SPILL.findall(text))
  return Dump(bundles, spills)


def reads(text: str) -> int:
  """Instructions of the entry of HLO text that take its first argument.

  What only gives it another shape counts as those that take that.
  """
  lines = text[text.index("\nENTRY") :].splitlines()
  names = {m[1] for m in map(_PARAMETER.search, lines) if m and m[2] == "0"}
  count = 0
  for line in lines:
    name, _, operands = line.partition(" = ")
    if names.isdisjoint(re.findall(r"%([\w.\-]+)[,)]", operands)):
      continue
    if re.search(r" (bitcast|copy-done|get-tuple-element)\(", operands):
      names.add(name.strip().removeprefix("ROOT ").removeprefix("%"))
    else:
      count += 1
  return count


def _count(work, name, way, device, directory):
  """Compiles an operation for one device; returns the cells of its row."""
  mesh = Mesh(np.array([device]), ("one",))
  on = NamedSharding(mesh, P())
  run = functools.partial(OPERATIONS[name], kernels=way)
  call = lambda *arrays: run(*arrays, *work.static)
  mapped = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P())
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), work.arrays
  )
  donated = (0,) if work.in_place else ()
  for old in directory.iterdir():
    old.unlink()
  compiled, _ = harness.compiled(mapped, *arguments, donate_argnums=donated)
  dump, text = read(directory), compiled.as_text()
  assert text is not None
  cost: Any = compiled.cost_analysis()
  return (
    f"{work.bytes / 1e6:.1f}",
    f"{cost['bytes accessed'] / 1e6:.1f}",
    str(reads(text)),
    str(len(dump.bundles)),
    f"{sum(dump.bundles.values()):,}",
    str(sum(dump.spills.values())),
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.bundles", description=__doc__
  )
  add = parser.add_argument
  add("--rows", type=int, default=1 << 20)
  add("--width", type=int, default=128)
  add("--density", type=float, default=0.01)
  add("--topologies", nargs="+", choices=targets.TPUS, default=["v5e:2x4"])
  add("--operations", nargs="+", choices=OPERATIONS, default=[*OPERATIONS])
  options = parser.parse_args()
  console = table.console()
  gradient = kernels.draw(options.rows, options.width, options.density)
  with tempfile.TemporaryDirectory() as directory:
    # What libtpu compiles it leaves here, if it is told before it is loaded.
    asked = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{asked} --xla_jf_dump_to={directory}"
    for topology in options.topologies:
      device = targets.tpu(topology)[0]
      shown = table.made(
        f"{topology}  {options.rows:,} x {options.width} float32,"
        f" {options.density:.1%} of rows",
        *("", "must move\nMB", "accessed\nMB", "table\nreads"),
        *("instruc-\ntions", "bundles", "spills"),
      )
      for name, way in itertools.product(options.operations, _WAYS):
        work = kernels.WORK[name](gradient)
        try:
          cells = _count(work, name, way, device, pathlib.Path(directory))
        except NotImplementedError as error:
          console.print(f"{name} {way}: {error}")
          continue
        shown.add_row(f"{name} {way}", *cells)
      console.print(shown)


if __name__ == "__main__":
  main()

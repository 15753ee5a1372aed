"""`memory`: temporary memory of a training step, compiled and never run."""

import argparse

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from benchmarks import harness
from benchmarks import table
from benchmarks import targets
from benchmarks.cases import sync

ROWS, WIDTH, LOOKUPS = 1_000_000, 128, 4096
_VARIANTS = (*sync.BASELINES, *sync.SPARSE)


def _over_pmean(result, peers):
  if "pmean" not in peers:
    return float("nan")
  return result.facts["temporary"] / peers["pmean"].facts["temporary"]


COLUMNS = (
  table.fact("table\nMB", "table_bytes", unit=1e6),
  table.fact("temporary\nMB", "temporary", unit=1e6),
  table.fact("code\nMB", "code", unit=1e6),
  table.COMPILE,
  table.Column("over\npmean", _over_pmean, ".2f"),
)


def cases(options: argparse.Namespace) -> list[harness.Case]:
  """A case for each target that can be compiled for, and each variant."""
  found = []
  for name in options.targets or targets.TARGETS:
    try:
      mesh = Mesh(np.array(targets.TARGETS[name]()), (sync.AXIS,))
    except ImportError as error:
      print(f"{name}: skipped, {error}")
      continue
    group = f"{name}  {ROWS:,} x {WIDTH}"
    found += [
      harness.case(group, v.name, _build, v, mesh)
      for v in sync.chosen(_VARIANTS, options.variants)
    ]
  return found


def _build(variant, mesh):
  def abstract(shape, dtype, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  ids = abstract((mesh.size, LOOKUPS), "int32", sync.AXIS)
  values = abstract((*ids.shape, WIDTH), "float32", sync.AXIS)
  params = {sync.LEAF: abstract((ROWS, WIDTH), "float32")}
  made, of_look_up = variant.make(None), sync.GRADIENTS["scatter-add"]
  given = made, of_look_up, mesh, params, (ids, values)
  compiled, _, seconds = sync.compile_sgd(*given)
  usage = compiled.memory_analysis()
  facts = {
    "table_bytes": float(ROWS * WIDTH * 4),
    "temporary": float(usage.temp_size_in_bytes),
    "code": float(usage.generated_code_size_in_bytes),
  }
  return harness.Built(lambda: None, 0, seconds, facts)

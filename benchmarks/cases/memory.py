"""`memory`: temporary memory of a training step, compiled and never run."""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from benchmarks import table
from benchmarks import targets
from benchmarks.cases import sync
from benchmarks.cases.sync import AXIS
from benchmarks.cases.sync import GRADIENTS
from benchmarks.cases.sync import LEAF
from benchmarks.harness import Built
from benchmarks.harness import Case

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


def cases(options: argparse.Namespace) -> list[Case]:
  """A case for each target that can be compiled for, and each variant."""
  return [
    Case(
      group=f"{name}  {ROWS:,} x {WIDTH}",
      name=variant.name,
      build=functools.partial(_build, variant, devices),
    )
    for name in options.targets or targets.TARGETS
    for devices in _devices(name)
    for variant in sync.chosen(_VARIANTS, options.variants)
  ]


def _devices(name):
  """The target's devices in a list, or an empty list: skipped, with a word."""
  try:
    return [targets.TARGETS[name]()]
  except ImportError as error:
    print(f"{name}: skipped, {error}")
    return []


def _build(variant, devices):
  mesh = Mesh(np.array(devices), (AXIS,))
  n = mesh.size
  abstract = functools.partial(_abstract, mesh)
  compiled = sync.compile_step(
    variant.make(None),
    GRADIENTS["scatter-add"],
    mesh,
    {LEAF: abstract((ROWS, WIDTH), jnp.float32, P())},
    (
      abstract((n, LOOKUPS), jnp.int32, P(AXIS)),
      abstract((n, LOOKUPS, WIDTH), jnp.float32, P(AXIS)),
    ),
  )
  usage = compiled.compiled.memory_analysis()
  facts = {
    "table_bytes": float(ROWS * WIDTH * 4),
    "temporary": float(usage.temp_size_in_bytes),
    "code": float(usage.generated_code_size_in_bytes),
  }
  return Built(
    run=lambda: None, wrong=0, compile_s=compiled.seconds, facts=facts
  )


def _abstract(mesh, shape, dtype, spec):
  sharding = NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

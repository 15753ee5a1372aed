"""Chips that tests compile for, with none attached."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
import pytest

from benchmarks import targets

CHIPS = ("cpu", *targets.TPUS, "gpu-h200")


def devices(chip: str) -> Any:
  """Returns the devices of a chip; skips the test without its compiler."""
  try:
    if chip in targets.TPUS:
      return targets.tpu(chip)
    return targets.TARGETS[chip]()
  except ImportError as error:
    return pytest.skip(str(error))


def cases(names: Iterable[str], default: set[tuple[str, str]]) -> list[Any]:
  """Returns all names with all chips, marked `every_target` if no default."""
  every = pytest.mark.every_target
  return [
    pytest.param(*case, marks=() if case in default else every)
    for case in ((name, chip) for name in names for chip in CHIPS)
  ]


def placed(x: Any, mesh: Mesh, spec: Any) -> jax.ShapeDtypeStruct:
  """Returns the type of an array on a mesh."""
  sharding = NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

"""Programs of kernels, lowered for chips with none attached."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import Shape
import numpy as np
import pytest

from benchmarks import targets
from zenjax.kernels._dispatch import Kernels
from zenjax.kernels.operations import mask_pack


def devices(name: str) -> Any:
  """Those of a TPU slice or of `targets.TARGETS`."""
  try:
    if name in targets.TPUS:
      return targets.tpu(name)
    return targets.TARGETS[name]()
  except ImportError as error:
    return pytest.skip(str(error))


def device(name: str) -> Any:
  """One of `devices`."""
  return devices(name)[0]


def lowered(name: str, run: Callable[..., Any], *args: Any) -> Any:
  """`run` on one device; Triton asks the mesh around it what that is."""
  mesh = Mesh(np.array([device(name)]), ("one",))
  on = NamedSharding(mesh, P())
  placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on) for x in args]
  mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
  return jax.jit(mapped).lower(*placed)


def lowered_mask_pack(name: str, shape: Shape, implementation: Kernels) -> Any:
  table = jax.ShapeDtypeStruct((shape.rows, shape.width), shape.dtype)
  run = functools.partial(
    mask_pack, layout=shape.layout, kernels=implementation
  )
  return lowered(name, run, table)

"""The devices and the processes that train together.

Every process, one a host, runs the same program on the same flags but
--process-id. It draws the same batches and keeps its own devices' part. The
first process prints and plots.
"""

import argparse
from collections.abc import Iterator
import contextlib
import os
from typing import Any, TypeVar
import zlib

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np

AXIS = "data"

_CPU_DEVICES = 8

_Tree = TypeVar("_Tree")


def make_mesh(count: int | None = None) -> Mesh:
  """Returns devices in a row; a CPU plays several, or nothing would be sent.

  Args:
    count: Takes the first so many; by default all.

  Raises:
    ValueError: There are fewer.
  """
  # Must precede the first use of a device; accelerators do not mind it.
  _set_cpu_devices(max(_CPU_DEVICES, count or 0))
  devices = jax.devices()
  if count is not None and count > len(devices):
    raise ValueError(f"must be at most {len(devices)}, got {count}")
  return Mesh(np.array(devices[:count]), (AXIS,))


def _set_cpu_devices(count: int) -> None:
  chosen = "xla_force_host_platform_device_count" in os.getenv("XLA_FLAGS", "")
  if jax.config.jax_num_cpu_devices < 0 and not chosen:
    jax.config.update("jax_num_cpu_devices", count)


def join(flags: argparse.Namespace) -> None:
  """Finds the other processes, if `flags` name a coordinator.

  Must precede the first use of a device. A CPU is then one device of its
  process, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES say otherwise.
  """
  if flags.coordinator is None:
    return
  _set_cpu_devices(1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      flags.coordinator, flags.num_processes, flags.process_id
    )
  except (RuntimeError, ValueError) as error:
    raise SystemExit(f"--coordinator {flags.coordinator}: {error}") from error


@contextlib.contextmanager
def only_first_prints(flags: argparse.Namespace) -> Iterator[None]:
  """Lets stdout of process 0 through and no other's; errors go everywhere."""
  # `jax.process_index()` would be a use of devices.
  if not flags.process_id:
    yield
    return
  with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    yield


def place(tree: _Tree, sharding: jax.sharding.Sharding) -> _Tree:
  """Puts arrays that every process holds whole where `sharding` has them."""
  if sharding.is_fully_addressable:
    return jax.device_put(tree, sharding)

  # Unlike `device_put`, which compares them over the network first.
  def put(x: Any) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

  return jax.tree.map(put, tree)


def gathered(array: jax.Array) -> np.ndarray:
  """Returns an array that all processes hold parts of, whole on each."""
  if array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def any_process(mine: bool) -> bool:
  """Tells every process whether it is so in one of them."""
  if jax.process_count() == 1:
    return mine
  return bool(np.any(multihost_utils.process_allgather(np.array(mine))))


def require_same(what: str, array: np.ndarray) -> None:
  """Ends every process if they hold different arrays."""
  if jax.process_count() == 1:
    return
  mine = np.array([len(array), zlib.crc32(np.ascontiguousarray(array))])
  theirs = multihost_utils.process_allgather(mine)
  if not (theirs == theirs[0]).all():
    raise SystemExit(
      f"{what} must be the same on every host, but hosts read {theirs[:, 0]}"
      " of other checksums: give all of them one file"
    )

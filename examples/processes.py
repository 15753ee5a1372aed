"""One training run in several processes, one a host, each its own devices.

Every process runs the same program on the same flags but --process-id, draws
the same batches and keeps its devices' part. The first one prints and plots.
"""

import argparse
from collections.abc import Iterator
import contextlib
import os
from typing import Any, TypeVar
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

_FLAGS = ("coordinator", "num_processes", "process_id")

_Tree = TypeVar("_Tree")


def add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group(
    "on several hosts, all three on each of them"
  )
  group.add_argument("--coordinator", help="host:port of process 0")
  group.add_argument("--num-processes", type=int)
  group.add_argument("--process-id", type=int)


def broken_rule(flags: argparse.Namespace) -> str | None:
  """The rule that the flags of `add_flags` break, if one does."""
  given = [getattr(flags, name) for name in _FLAGS]
  if all(x is None for x in given):
    return None
  if None in given:
    return "--coordinator, --num-processes and --process-id go together"
  _, count, index = given
  if count < 1:
    return f"--num-processes must be at least 1, got {count}"
  if not 0 <= index < count:
    return (
      f"--process-id must be 0 to {count - 1}, one below --num-processes at"
      f" most, got {index}"
    )
  return None


def join(flags: argparse.Namespace) -> None:
  """Finds the other processes; nothing where there are none.

  Must precede the first use of a device. A CPU is one device of its process
  then, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES say otherwise.
  """
  if flags.coordinator is None:
    return
  chosen = "xla_force_host_platform_device_count" in os.getenv("XLA_FLAGS", "")
  if jax.config.jax_num_cpu_devices < 0 and not chosen:
    jax.config.update("jax_num_cpu_devices", 1)
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


def any_of_them(mine: bool) -> bool:
  """Whether it is so in some process; all get the same answer."""
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


def whole(array: jax.Array) -> np.ndarray:
  """An array of every process's devices, on each of them."""
  if array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return np.asarray(multihost_utils.process_allgather(array, tiled=True))

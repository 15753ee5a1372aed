"""A program on every host of a testbed that does what it is asked.

One line of JSON asks, one answers. `Served` is the side that asks, `Worker` the
program. On the hosts one compiles for all (`SharedCompiler`), and all begin at
one instant of the clock that they share (`CommonStart`).
"""

from collections.abc import Callable
import os
import pathlib
import sys
import time
from typing import Any

import jax
from jax.experimental import serialize_executable
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from benchmarks import harness
from benchmarks.testbed import hosts
from benchmarks.testbed.testbed import Testbed
import zenjax

AXIS = "data"
_POLL_S = 0.02
_LONGEST_S = 900.0
SLOW_S = 1200.0  # Eight hosts may share two cores while they compile.


class SharedCompiler:
  """Compiles in turns; all hosts ask for the same programs in one order.

  They see one directory, of this run alone; `host` is the index of this one.
  """

  def __init__(self, directory: pathlib.Path, host: int):
    self._directory, self._host = directory, host
    # A GPU's programs are compiled together: hosts tell each other what they
    # have found to be fast.
    self._for_all = jax.default_backend() == "cpu"
    self._turn = 0

  def compile(self, lowered: jax.stages.Lowered) -> harness.Compiled:
    """The executable, and the seconds that host 0 took to compile it."""
    if not self._for_all:
      return harness.compile_here(lowered)
    path = self._directory / f"program-{self._turn}"
    self._turn += 1
    if self._host:
      return _load(path, lowered), 0.0
    start = time.perf_counter()
    serialized = b""
    try:
      compiled = lowered.compile()
      seconds = time.perf_counter() - start
      serialized, _, _ = serialize_executable.serialize(compiled)
      return compiled, seconds
    finally:
      # After an error too: the others must not wait. Whole or not there.
      half = path.with_suffix(".half")
      half.write_bytes(serialized)
      os.rename(half, path)


def _load(path, lowered):
  deadline = time.monotonic() + _LONGEST_S
  while not path.exists():
    if time.monotonic() > deadline:
      raise TimeoutError(f"Host 0 has not compiled within {_LONGEST_S:.0f} s.")
    time.sleep(_POLL_S)
  if not (serialized := path.read_bytes()):
    raise RuntimeError("Host 0 has failed to compile; its log says why.")
  return serialize_executable.deserialize_and_load(
    serialized, lowered.in_tree, lowered.out_tree
  )


def here(x: jax.Array) -> np.ndarray:
  """Returns the shard that this host has."""
  return np.asarray(x.addressable_shards[0].data)


# int32 holds 59 hours of these.
_TICK_S = 1e-4
# Longer than a barrier's last message is under way, and than a link's bucket
# takes to fill.
_LEAD_S = 0.05


class CommonStart:
  """Agrees with the other hosts on when to begin.

  A barrier alone lets hosts go as its messages reach them, ten milliseconds
  apart where eight of them share two cores: the first would count its wait for
  the last as time of the exchange, and local work would be timed without the
  others beside it. The mesh is of all hosts, one device each, with one axis;
  `epoch` an instant of `time.monotonic`, the same on all.
  """

  def __init__(self, mesh: Mesh, epoch: float):
    self._epoch = epoch
    self._split = NamedSharding(mesh, P(mesh.axis_names))
    self._shape = (mesh.size,)
    (axis,) = mesh.axis_names
    latest = lambda x: jax.lax.pmax(x, axis)
    self._latest = jax.jit(
      jax.shard_map(latest, mesh=mesh, in_specs=P(axis), out_specs=P())
    )
    self()

  def __call__(self) -> float:
    """Returns at an instant of `time.monotonic`, and says which."""
    ticks = int((time.monotonic() - self._epoch) / _TICK_S)
    mine = jax.make_array_from_process_local_data(
      self._split, np.array([ticks], np.int32), self._shape
    )
    latest = int(jnp.squeeze(self._latest(mine)))
    start = self._epoch + latest * _TICK_S + _LEAD_S
    while (left := start - time.monotonic()) > 0:
      time.sleep(left)
    return start


# Of a host's log, where it does not answer.
_LOG_LINES = 8
# glibc's names for what `benchmarks.run` sets with mallopt.
_KEPT = {
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(1 << 60),
}


class Served:
  """The processes on a testbed's hosts.

  On a bed that is entered, and on which nothing else runs. Their module calls
  `main`, `cache` is a directory of this run alone, and with `keep_memory` they
  keep what they free, as `run --keep-memory`. With `one_gpu` they share the GPU
  of this machine, and NCCL joins them by the links of the bed.
  """

  def __init__(
    self,
    bed: Testbed,
    module: str,
    cache: str,
    *,
    keep_memory: bool = False,
    one_gpu: bool = False,
  ):
    self.bed, self.cache = bed, cache
    env = {"ZENJAX_HOST_EPOCH": str(time.monotonic())}
    env |= {"ZENJAX_HOST_CACHE": cache, **(_KEPT if keep_memory else {})}
    env["ZENJAX_HOST_PLATFORM"] = "cuda" if one_gpu else "cpu"
    self._hosts = bed.start([sys.executable, "-m", module], env)

  def ask(self, do: str, *, timeout: float = SLOW_S, **arguments) -> list[Any]:
    """Has every host do one thing; returns what each replies."""
    try:
      return self.bed.ask({"do": do, **arguments}, timeout)
    except TimeoutError as error:
      said = [f"`{do}` of {arguments}: {error}"]
      for host in self._hosts:
        said.append(f"log of host {host.index} ends:\n{host.tail(_LOG_LINES)}")
      raise RuntimeError("\n".join(said)) from error


class Worker:
  """A host's share of a run; subclasses add methods that can be asked for."""

  def __init__(self, compiler: SharedCompiler, epoch: float):
    self.compiler = compiler
    self.programs: dict[str, Any] = {}  # That were built, by name.
    self.cases: list[Callable[[], Any]] = []  # Of `campaign.cases`, in order.
    self.mesh = Mesh(np.array(jax.devices()), (AXIS,))
    self.start = CommonStart(self.mesh, epoch)

  def time(self, program: str) -> float:
    """Seconds of one step of what was built by that name."""
    return self.programs[program].time(self.start)

  def device(self) -> str:
    """The kind of this host's device."""
    return self.mesh.devices.flat[0].device_kind

  def step(self, number: int) -> float:
    """Takes a step of what was built so many builds after the first."""
    return harness.seconds_of(self.cases[number])

  def links(self, repeats: int, sizes: list[int]) -> str:
    """Returns the machine as measured, as JSON."""
    found = zenjax.planner.measure_links(
      self.mesh, AXIS, sizes=sizes, repeats=repeats
    )
    return found.to_json()


def main(worker: Callable[[SharedCompiler, float], Worker]) -> None:
  """Joins the other hosts and does what is asked until stdin ends."""
  # One device a host; before the first use of it.
  told = lambda key: os.environ[f"ZENJAX_HOST_{key}"]
  index, count = int(told("INDEX")), int(told("COUNT"))
  jax.config.update("jax_platforms", told("PLATFORM"))
  if told("PLATFORM") == "cuda":
    _share_gpu(index, count)
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # What JAX reads back from its cache cannot be handed on to other hosts: it
  # lacks functions there ("wrapped_tanh not found").
  jax.config.update("jax_enable_compilation_cache", False)
  jax.distributed.initialize(
    os.environ["ZENJAX_COORDINATOR"],
    num_processes=count,
    process_id=index,
    local_device_ids=[0],
  )
  jax.devices()
  compiler = SharedCompiler(pathlib.Path(told("CACHE")), index)
  served = worker(compiler, float(told("EPOCH")))
  hosts.answer(served)


def _share_gpu(index, count):
  """Lets this process use a part of a GPU, and NCCL a link between parts."""
  # NCCL refuses two ranks on one GPU if both report the same host, and takes
  # sockets where hosts are different.
  loopback = os.environ["ZENJAX_HOST_ADDRESS"] == "127.0.0.1"
  os.environ |= {
    "NCCL_HOSTID": f"host{index}",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo" if loopback else "eth0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / count:.3f}",
  }
  # As float32 on CPUs, which the answers are compared with.
  jax.config.update("jax_default_matmul_precision", "highest")

"""Devices to compile for, attached or not.

libtpu and the CUDA plugin compile for a described machine: `pip install
'zenjax[aot]'` brings both. Nothing here runs on such a machine.
"""

from collections.abc import Callable
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

# What XLA's GPU compiler asks about a device; the numbers are an H200's, as the
# specifications shipped with XLA give them. Both supported versions of JAX
# accept these fields.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def tpu(topology: str) -> list[Any]:
  """The devices of a TPU slice: "v5e:2x4", one of `TPUS`."""
  _require("libtpu")
  # A second process that loads libtpu would abort on its lock file.
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  # Without these libtpu complains that this is no TPU machine.
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
  return topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  ).devices


def _gpu():
  _require("jax_cuda13_plugin")
  return topologies.get_topology_desc(
    platform="cuda",
    topology_name="",
    target_config=_H200,
    topology="1x1x8",  # partitions x hosts x GPUs of a host
  ).devices


def _require(module):
  if importlib.util.find_spec(module) is None:
    raise ImportError(f"{module} is not installed: pip install 'zenjax[aot]'")


# Eight devices each. `JAX_PLATFORMS` must be "cpu": the CUDA plugin otherwise
# looks for a GPU.
TARGETS: dict[str, Callable[[], list[Any]]] = {
  "cpu": lambda: jax.devices("cpu")[:8],
  "tpu-v5e": lambda: tpu("v5e:2x4"),
  "gpu-h200": _gpu,
}

# One slice of every generation that is sold.
TPUS = ("v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:4x4", "tpu7x:2x2x1")

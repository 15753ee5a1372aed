"""Lists known machines with their published figures.

Vendors publish peaks; how much of a peak collectives reach must be measured. A
bandwidth here counts the bytes that one device receives while it sends as many,
but vendors publish the sum of both directions. A latency is for one message
between two devices.
"""

import dataclasses

from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work

# The latency of a hop of the ring protocol "Simple", from the table `hwLat`
# by which NCCL chooses its algorithms (NVIDIA/nccl, src/graph/tuning.cc).
_NCCL_NVLINK_S = 3.4e-6
_NCCL_PCI_S = 5.7e-6
NCCL_NETWORK_S = 14e-6
# This figure is not published. It is an assumption for neighboring chips.
_ICI_S = 1e-6

_GB, _GIB = 1e9, 2.0**30
_FLOOR = "the device's own work is a lower bound, from its memory's peak"


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
  """Devices that one fabric connects.

  Attributes:
    bandwidth: Bytes per second between two devices.
    latency_s: Latency of a message between two devices, in seconds.
    memory_bytes: Memory of a device.
    memory_gb_s: Peak of this memory, in GB/s.
    published: The publication of these figures.
  """

  bandwidth: float
  latency_s: float
  memory_bytes: float
  memory_gb_s: float
  published: str

  @property
  def link(self) -> Link:
    """The link between two devices, which work as fast as memory allows.

    A table is read once to find its nonzero rows. Received bytes pass through
    memory twice, when they are packed or merged and when they are written, with
    a read and a write each. This lower bound ignores the time to start kernels
    and to look up rows, which `zenjax.planner.measure_work` includes.
    """
    byte_s = 1 / (self.memory_gb_s * _GB)
    work = Work(mask_byte=byte_s, move_byte=4 * byte_s)
    return Link(bandwidth=self.bandwidth, latency_s=self.latency_s, work=work)

  @property
  def source(self) -> str:
    """The publication of the figures, and what kind they are."""
    return f"{self.published}; {_FLOOR}"


def _nvidia(
  device: str,
  memory_gb: float,
  memory_gb_s: float,
  fabric: str = "NVLink",
  fabric_gb_s: float = 900,
) -> Machine:
  """Returns a GPU; its data sheet counts both directions of the fabric."""
  return Machine(
    fabric_gb_s / 2 * _GB,
    _NCCL_NVLINK_S if fabric == "NVLink" else _NCCL_PCI_S,
    memory_gb * _GB,
    memory_gb_s,
    f"NVIDIA {device} data sheet: {fabric} {fabric_gb_s:g} GB/s both ways,"
    f" {memory_gb} GB at {memory_gb_s / 1e3:g} TB/s, a peak; latency from"
    " NCCL's tuning table",
  )


def _tpu(
  bandwidth: float, memory: float, memory_gb_s: float, page: str, figure: str
) -> Machine:
  """Returns a TPU, with the bandwidth of all ports of a chip together."""
  return Machine(
    bandwidth,
    _ICI_S,
    memory,
    memory_gb_s,
    f"docs.cloud.google.com/tpu/docs/{page}: {figure}, a peak over all ports"
    " of a chip, which a mesh axis along one side of the torus does not have;"
    f" HBM {memory_gb_s:g} GB/s; latency assumed",
  )


MACHINES: dict[str, Machine] = {
  # If a device is sold with several memory sizes, this is the largest: A100 80
  # GB, V100 SXM2 32 GB.
  "a100": _nvidia("A100 SXM", 80, 2039, fabric_gb_s=600),
  "h100": _nvidia("H100 SXM", 80, 3350),
  "h200": _nvidia("H200 SXM", 141, 4800),
  # L4 has no NVLink.
  "l4": _nvidia("L4", 24, 300, "PCIe Gen4 x16", 64),
  # 4,096 chips with six ports each reduce 1.1 PB/s together.
  "tpu-v4": _tpu(
    1.1e15 / 4096, 32 * _GIB, 1200, "v4", "all-reduce 1.1 PB/s of 4,096 chips"
  ),
  "tpu-v5e": _tpu(200 * _GB, 16 * _GB, 819, "v5e", "ICI 400 GB/s both ways"),
  "tpu-v5p": _tpu(
    600 * _GB, 95 * _GIB, 2765, "v5p", "ICI 1,200 GB/s both ways"
  ),
  "tpu-v6e": _tpu(400 * _GB, 32 * _GB, 1638, "v6e", "ICI 800 GB/s both ways"),
  "v100": _nvidia("V100 SXM2", 32, 900, fabric_gb_s=300),
}


def known_machine(name: str) -> Machine:
  """Returns an entry of `MACHINES`; raises `ValueError` if there is none."""
  if not isinstance(name, str) or name.lower() not in MACHINES:
    raise ValueError(
      f"`machine` must be one of {', '.join(MACHINES)}, got {name!r}. Measure"
      " other machines with `zenjax.planner.measure_links`."
    )
  return MACHINES[name.lower()]

"""Known machines: figures that others publish, each with its source.

What a vendor publishes is a peak: what collectives reach of it has to be
measured (`zenjax.measure_links`). A bandwidth here is what one device receives
while it sends as many bytes; vendors state both directions added up. Latencies
are of one message between two devices.
"""

import dataclasses
import math
import re

from zenjax._link import Work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
  """Devices that one fast fabric joins.

  Attributes:
    bandwidth: Bytes a second that a device receives.
    latency_s: Of a message.
    memory_bytes: Of a device.
    memory_bandwidth: Bytes a second that a device reads or writes there.
    source: Where these are from, and of what kind they are.
  """

  bandwidth: float
  latency_s: float
  memory_bytes: float
  memory_bandwidth: float
  source: str

  @property
  def work(self) -> Work:
    """The least that a device's own part can take: its memory's peak.

    To find nonzero rows a table is read once. What is received passes through
    memory twice, as it is packed or merged and as it is written, and is read
    and written each time. No kernel starts and no row is looked up in no time,
    as it says here: `zenjax.measure_work` knows more.
    """
    byte_s = 1 / self.memory_bandwidth
    return Work(mask_byte=byte_s, move_byte=4 * byte_s)


# A hop of the ring protocol "Simple", in microseconds, from the table `hwLat`
# by which NCCL chooses its algorithms (NVIDIA/nccl, src/graph/tuning.cc).
_NCCL_NVLINK_S = 3.4e-6
_NCCL_NETWORK_S = 14e-6
# No figure is published; neighbouring chips are about a microsecond apart.
_ICI_S = 1e-6

_GB, _GIB = 1e9, 2.0**30
_FLOOR = "the device's own work is a floor, its memory's peak"


def _nvlink(memory_gb: float, memory_tb_s: float, device: str) -> Machine:
  return Machine(
    bandwidth=450 * _GB,
    latency_s=_NCCL_NVLINK_S,
    memory_bytes=memory_gb * _GB,
    memory_bandwidth=memory_tb_s * 1e12,
    source=(
      f"NVIDIA {device} data sheet: NVLink 900 GB/s both ways, {memory_gb} GB"
      f" at {memory_tb_s} TB/s, a peak; latency from NCCL's tuning table;"
      f" {_FLOOR}"
    ),
  )


def _ici(
  bandwidth: float, memory: float, memory_gb_s: float, page: str, figure: str
) -> Machine:
  return Machine(
    bandwidth=bandwidth,
    latency_s=_ICI_S,
    memory_bytes=memory,
    memory_bandwidth=memory_gb_s * _GB,
    source=(
      f"docs.cloud.google.com/tpu/docs/{page}: {figure}, a peak over all ports"
      " of a chip, which a mesh axis along one side of the torus does not have;"
      f" HBM {memory_gb_s:g} GB/s; latency assumed; {_FLOOR}"
    ),
  )


MACHINES: dict[str, Machine] = {
  "h100": _nvlink(80, 3.35, "H100 SXM"),
  "h200": _nvlink(141, 4.8, "H200 SXM"),
  # 4,096 chips reduce 1.1 PB/s together; six ports.
  "tpu-v4": _ici(
    1.1e15 / 4096, 32 * _GIB, 1200, "v4", "all-reduce 1.1 PB/s of 4,096 chips"
  ),
  "tpu-v5e": _ici(200 * _GB, 16 * _GB, 819, "v5e", "ICI 400 GB/s both ways"),
  "tpu-v5p": _ici(
    600 * _GB, 95 * _GIB, 2765, "v5p", "ICI 1,200 GB/s both ways"
  ),
  "tpu-v6e": _ici(400 * _GB, 32 * _GB, 1638, "v6e", "ICI 800 GB/s both ways"),
}

_RATE = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)")
NETWORK_SOURCE = "its line rate, a peak; latency from NCCL's tuning table"


def machine(name: str) -> Machine:
  """Raises `ValueError` where `name` is not in `MACHINES`."""
  if name not in MACHINES:
    raise ValueError(
      f"`machine` must be one of {', '.join(MACHINES)}, got {name!r}; measure"
      " any other with `zenjax.measure_links`."
    )
  return MACHINES[name]


def network(rate: str) -> tuple[float, float]:
  """Bytes a second and seconds a message of a port, from say "100gbit".

  Raises:
    ValueError: `rate` is no number with "gbit" or "mbit" after it.
  """
  match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
  if match is None or not 0 < float(match[1]) < math.inf:
    raise ValueError(
      "`network` must be a positive number and gbit or mbit, say '100gbit',"
      f" got {rate!r}."
    )
  bits = float(match[1]) * {"mbit": 1e6, "gbit": 1e9}[match[2]]
  return bits / 8, _NCCL_NETWORK_S

"""Single collectives over sizes: what a model of the links is fitted to."""

from collections.abc import Sequence
import dataclasses

from benchmarks import netns

REPEATS = 5
# What a host receives, about.
SIZES = tuple(1 << log for log in (12, 15, 18, 20, 22, 24))
# A collective that must take longer on its link is left out.
_LONGEST_S = 2.0

# What a host of `n` receives, in multiples of its operand.
_RECEIVED = {
  "all_to_all": lambda n: (n - 1) / n,
  "all_gather": lambda n: n - 1,
  "all_reduce": lambda n: 2 * (n - 1) / n,
  "reduce_scatter": lambda n: (n - 1) / n,
  "collective_permute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
  """One collective to time.

  Attributes:
    hosts: How many take part.
    rate: Of the links.
    op: A name in `collectives.OPS`.
    words: Of 32 bits, in the operand of each host; a multiple of `hosts`.
  """

  hosts: int
  rate: str
  op: str
  words: int

  @property
  def received_bytes(self) -> float:
    """What each host receives if nothing is received twice."""
    return 4 * self.words * _RECEIVED[self.op](self.hosts)


def points(hosts: int, rate: str) -> list[Point]:
  """What is timed on links of `rate`, the smallest first."""
  found = []
  for size in SIZES:
    for op, received in _RECEIVED.items():
      words = round(size / 4 / received(hosts) / hosts) * hosts
      found.append(Point(hosts, rate, op, max(words, hosts)))
  return [point for point in found if least_s(point) <= _LONGEST_S]


def least_s(point: Point) -> float:
  """Seconds that the link needs for what is received."""
  limit = netns.RATES[point.rate]
  return point.received_bytes / limit.bytes_per_s if limit else 0.0


def record(point: Point, host_times: Sequence[Sequence[float]]) -> dict:
  """What the file keeps, of the seconds `[host][repeat]`."""
  times = [max(times) for times in zip(*host_times, strict=True)]
  return {
    **dataclasses.asdict(point),
    "received_bytes": point.received_bytes,
    "median_s": sorted(times)[len(times) // 2],
    "times_s": times,
  }

"""What `scheme="auto"` would have taken, beside what was measured."""

import dataclasses
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.network import paired
from benchmarks.network import predict
from benchmarks.network import profiles
from benchmarks.network.paired import Interval
import zenjax
from zenjax._src.schemes.base import Context
from zenjax._src.sync import choose
from zenjax._src.sync import sync_options

# How near to the best measured time is good enough, and to `psum`.
NEAR, NO_SLOWER = 1.10, 1.05


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
  """Two variants' times, the first over the second.

  Attributes:
    median: Of their medians.
    interval: At 95 %; None of too few rounds.
  """

  median: float
  interval: Interval | None

  def surely_above(self, limit: float) -> bool:
    return self.interval is not None and self.interval.low > limit

  def surely_within(self, limit: float) -> bool:
    return self.interval is not None and self.interval.high <= limit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
  """What `scheme="auto"` takes in one section, and how it did.

  Attributes:
    section: Workload, hosts, rate.
    chosen: The variant that it takes.
    best: The variant with the least median of those it chooses among. Of equals
      luck decides which, so that `over_best` errs to the side of a miss.
    over_best: Its measured time over the fastest one's.
    over_psum: The same over `psum`'s.
  """

  section: tuple[str, int, str]
  chosen: str
  best: str
  over_best: Ratio
  over_psum: Ratio

  @property
  def good(self) -> bool:
    return self.over_best.median <= NEAR

  @property
  def harmful(self) -> bool:
    return self.over_psum.median > NO_SLOWER


def picks(document: dict[str, Any]) -> list[Pick]:
  """One for every section in which all that `auto` may take was timed."""
  found = []
  for section, members in predict.sections(document):
    _, hosts, _ = section
    times = predict.times(members)
    variants = _variants_of_auto(hosts)
    if not set(variants.values()) <= set(times):
      continue
    chosen = _nearest(_choice(document, section), variants, hosts)
    best = min(variants.values(), key=lambda v: np.median(times[v]))
    found.append(
      Pick(
        section=section,
        chosen=chosen,
        best=best,
        over_best=_ratio(times[chosen], times[best]),
        over_psum=_ratio(times[chosen], times["psum"]),
      )
    )
  return found


def _ratio(times: list[float], base: list[float]) -> Ratio:
  median = float(np.median(times) / np.median(base))
  return Ratio(median, paired.interval(times, base))


def _choice(
  document: dict[str, Any], section: tuple[str, int, str]
) -> choose.Choice:
  name, hosts, rate = section
  workload, batches = workloads.get(name), document["options"]["batches"]
  link = predict.link(document, hosts, rate)
  (choice,) = choose.choose(
    [profiles.table(workload, None)],
    _options_of_auto(profiles.profile(workload, hosts, None, batches), link),
    Context(axes=("data",), sizes=(hosts,), mean=True),
  )
  return choice


def _options_of_auto(
  profile: zenjax.planner.Profile, link: zenjax.planner.Link
) -> sync_options.Options:
  return sync_options.check(
    "data",
    sparse=True,
    scheme="auto",
    tuning=zenjax.Tuning(link=link, profile={"table": profile}),
  )


def _variants_of_auto(hosts: int) -> dict[tuple[str, int], str]:
  """The variants that stand for what `auto` chooses among."""
  return {
    ("dense", 1): "psum",
    ("all_gather", 1): "all_gather-pinned",
    ("recursive_doubling", 1): "recursive_doubling-pinned",
    ("zen", 1): "zen-hash-pinned",
    ("zen", hosts): "zen-columns-pinned",
  }


def _nearest(
  choice: choose.Choice, variants: dict[tuple[str, int], str], hosts: int
) -> str:
  """A grid between hash and columns counts as the nearer end."""
  if choice.scheme != "zen":
    return variants[choice.scheme, 1]
  groups = choice.column_groups or 1
  return variants["zen", 1 if groups * groups < hosts else hosts]

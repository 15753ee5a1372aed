"""The cells of `network`, as its file holds them."""

from collections.abc import Callable, Hashable, Iterable
import dataclasses
import math
from typing import Any, NamedTuple, Self, TypeVar

from benchmarks import campaign
from benchmarks import harness
from benchmarks.testbed import netns

# What numbers depend on, beside what is installed. Tables and plots may change.
CODE = (
  "zenjax/**/*.py",
  "kernels/**/*.py",
  "benchmarks/campaigns/network/host.py",
  "benchmarks/campaigns/network/variants.py",
  "benchmarks/testbed/netns.py",
  "benchmarks/testbed/served.py",
  "benchmarks/workloads.py",
)
K = TypeVar("K", bound=Hashable)


class Key(NamedTuple):
  """One variant of one workload on links of one rate between some hosts."""

  hosts: int
  rate: str
  workload: str
  variant: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Cell(harness.Sampled):
  """The findings about a key; its fields are those in the file."""

  hosts: int
  rate: str
  workload: str
  variant: str
  repeats: int  # Timed rounds that were asked for.
  batches: int  # Different batches that rounds go through in turn.
  wrong: int  # Elements, over hosts and batches.
  compile_s: float  # Of the host that compiles for all.
  wire_bytes: float  # What zenjax says that a host receives, mean over batches.
  least_wire_bytes: float  # Of the batch with the least.
  received_bytes: float  # By the busiest interface; NaN on loopback.
  # Of the workload: density, union_density, dense_bytes, bound_bytes.
  facts: dict[str, float]
  host_times_s: list[list[float]] = dataclasses.field(default_factory=list)

  @property
  def key(self) -> Key:
    return Key(self.hosts, self.rate, self.workload, self.variant)

  @property
  def times_s(self) -> list[float]:
    return campaign.times_s(self.host_times_s)

  @property
  def least_s(self) -> float:
    """Seconds that the link needs for the bytes that the variant declares."""
    return netns.least_s(self.least_wire_bytes, self.rate)

  def is_done(self, repeats: int, batches: int) -> bool:
    """Returns False if more is to be measured; wrong cells are tried anew."""
    whole = len(self.host_times_s) == self.repeats and not self.wrong
    return whole and (self.repeats, self.batches) == (repeats, batches)

  def require_limit(self, seconds: float) -> None:
    """Raises RuntimeError if an exchange took less than its bytes need."""
    if seconds < self.least_s:
      raise RuntimeError(
        f"{self.variant} on {self.workload} between {self.hosts} hosts took"
        f" {seconds * 1e3:.2f} ms, but its {self.least_wire_bytes:,.0f} bytes"
        f" need {self.least_s * 1e3:.2f} ms at {self.rate}: the testbed lends"
        " bandwidth, or the variant declares bytes that it does not send. No"
        " time of this run counts until it is known which."
      )

  def record(self) -> dict[str, Any]:
    """Returns what the file keeps."""
    names = ("times_s", "median_s", "spread_s")
    return dataclasses.asdict(self) | {x: getattr(self, x) for x in names}


def grouped(
  cells: Iterable[Cell], key: Callable[[Cell], K]
) -> dict[K, list[Cell]]:
  """Returns the cells of every key, in the order of the first of each."""
  groups: dict[K, list[Cell]] = {}
  for cell in cells:
    groups.setdefault(key(cell), []).append(cell)
  return groups


@dataclasses.dataclass(slots=True)
class Findings(campaign.Findings):
  """All that is in a file."""

  # What `Testbed.probe` said, one a (hosts, rate).
  links: dict[tuple[int, str], dict[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  # By key, in the order of measuring.
  cells: dict[Key, Cell] = dataclasses.field(default_factory=dict)

  def add(self, cell: Cell) -> None:
    """Puts a cell in the place of any with its key."""
    self.cells[cell.key] = cell

  def sections(self) -> dict[tuple[str, int, str], list[Cell]]:
    """Returns the cells of every (workload, hosts, rate)."""
    return grouped(self.cells.values(), lambda c: (c.workload, c.hosts, c.rate))

  def contents(self) -> dict[str, Any]:
    return {
      "links": list(self.links.values()),
      "cells": [cell.record() for cell in self.cells.values()],
    }

  @classmethod
  def parsed(cls, document: dict[str, Any]) -> Self:
    found = cls(document["environment"])
    for x in document["links"]:
      found.links[x["hosts"], x["rate"]] = x
    for x in document["cells"]:
      # A field that is missing is an error of the file: no default counts.
      values = {f.name: x[f.name] for f in dataclasses.fields(Cell)}
      if values["received_bytes"] is None:
        values["received_bytes"] = math.nan
      found.add(Cell(**values))
    return found

"""The findings of a run of `groups`, and the file that holds them."""

import dataclasses
import pathlib
from typing import Any

from benchmarks import campaign
from benchmarks import record
from benchmarks.campaigns.groups import ways
from benchmarks.campaigns.groups.ways import Simulated
from benchmarks.campaigns.groups.ways import Stops
from benchmarks.testbed import interrupts


@dataclasses.dataclass(slots=True, kw_only=True)
class Way:
  """One way to group.

  Attributes:
    stops: After which leaves an exchange leaves.
    exchanges_s: What its exchanges should take.
    wrong: Parameters that are not those of one exchange, over hosts, or that
      differ between hosts.
    compile_s: Of the host that compiles for all.
    told: What zen_sync counts of the last step.
  """

  stops: Stops
  exchanges_s: float
  wrong: int = 0
  compile_s: float = 0.0
  told: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def program(self) -> str:
    """Ways with the same program were measured as one."""
    return ways.program(self.stops)


@dataclasses.dataclass(slots=True, kw_only=True)
class Section(campaign.Timed):
  """All that was found out about links of one rate.

  Attributes:
    rate: Its name.
    topology: The links, measured, as JSON.
    ways: By name.
    host_times_s: By program, of every round the seconds of each host; "none"
      is a step without the exchanges.
  """

  rate: str
  topology: str
  ways: dict[str, Way]
  host_times_s: dict[str, list[list[float]]]

  def best(self) -> str | None:
    """Returns the program with the least median; None where there is none."""
    programs = {way.program for way in self.ways.values()}
    timed = [x for x in programs if self.times_s(x)]
    return min(timed, key=self.median_s, default=None)


@dataclasses.dataclass(slots=True, kw_only=True)
class Found:
  """All that is in a file.

  Attributes:
    environment: What has measured.
    options: What it was asked.
    complete: Whether nothing is missing.
    lost: Elements that are in no update and no residual after a first step.
    leaves: Those that are compressed, as the backward pass completes them.
    sections: In the order of measuring.
    simulated: On machines that are not there.
  """

  environment: dict[str, Any]
  options: dict[str, Any]
  complete: bool = False
  lost: int = 0
  leaves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  sections: list[Section] = dataclasses.field(default_factory=list)
  simulated: list[Simulated] = dataclasses.field(default_factory=list)

  @property
  def wrong(self) -> int:
    """Elements of all answers together."""
    every = [way for x in self.sections for way in x.ways.values()]
    return self.lost + sum(way.wrong for way in every)

  def save(self, path: pathlib.Path) -> None:
    """Writes all of it; what was there stays until all is written."""
    with interrupts.held():
      record.write_json(path, dataclasses.asdict(self))


def read(path: pathlib.Path) -> Found:
  """Returns what `path` holds; ValueError if it is none of this command's."""
  return campaign.read(path, _parsed)


def _parsed(fields: dict[str, Any]) -> Found:
  sections = [_section(x) for x in fields.pop("sections")]
  simulated = simulated_of(fields.pop("simulated"))
  return Found(**fields, sections=sections, simulated=simulated)


def _section(fields: dict[str, Any]) -> Section:
  known = fields.pop("ways")
  for way in known.values():
    way["stops"] = tuple(way["stops"])
  return Section(ways={k: Way(**x) for k, x in known.items()}, **fields)


def simulated_of(told: list[dict[str, Any]]) -> list[Simulated]:
  """Returns what JSON has made lists of."""
  tuples = ("cuts_s", "mergecomp", "search")
  listed: list[dict[str, Any]] = [
    {k: tuple(v) if k in tuples else v for k, v in x.items()} for x in told
  ]
  return [Simulated(**x) for x in listed]

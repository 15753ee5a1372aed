"""The findings of a run of `groups`, and the file that holds them."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Self

from benchmarks import campaign
from benchmarks.campaigns.groups import ways
from benchmarks.campaigns.groups.ways import Simulated


@dataclasses.dataclass(slots=True, kw_only=True)
class Way:
  """One way to group."""

  stops: Sequence[int]  # After which leaves an exchange leaves.
  exchanges_s: float  # What its exchanges should take.
  wrong: int = 0  # Parameters not of one exchange, or not of all hosts.
  compile_s: float = 0.0  # Of the host that compiles for all.
  # What zen_sync counts of the last step.
  told: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def program(self) -> str:
    """Ways with the same program were measured as one."""
    return ways.program(self.stops)


@dataclasses.dataclass(slots=True, kw_only=True)
class Section(campaign.Timed):
  """All that was found out about links of one rate."""

  rate: str  # Its name.
  topology: str  # The links, measured, as JSON.
  ways: dict[str, Way] = dataclasses.field(default_factory=dict)
  # [round][host] by program; "none" is a step without the exchanges.
  host_times_s: dict[str, list[list[float]]] = dataclasses.field(
    default_factory=dict
  )

  def best(self) -> str | None:
    """Returns the program with the least median; None where there is none."""
    programs = {way.program for way in self.ways.values()}
    timed = [x for x in programs if self.times_s(x)]
    return min(timed, key=self.median_s, default=None)


@dataclasses.dataclass(slots=True)
class Found(campaign.Findings):
  """All that is in a file."""

  # Elements that are in no update and no residual after a first step.
  lost: int = 0
  # Those that are compressed, as the backward pass completes them.
  leaves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  sections: list[Section] = dataclasses.field(default_factory=list)
  # On machines that are not there.
  simulated: list[Simulated] = dataclasses.field(default_factory=list)

  @property
  def wrong(self) -> int:
    """Elements of all answers together."""
    every = [way for x in self.sections for way in x.ways.values()]
    return self.lost + sum(way.wrong for way in every)

  def contents(self) -> dict[str, Any]:
    names = ("lost", "leaves", "sections", "simulated")
    return {name: dataclasses.asdict(self)[name] for name in names}

  @classmethod
  def parsed(cls, document: dict[str, Any]) -> Self:
    sections = document.pop("sections")
    for section in sections:
      known = section.pop("ways")
      section["ways"] = {name: Way(**way) for name, way in known.items()}
    simulated = [Simulated(**x) for x in document.pop("simulated")]
    sections = [Section(**section) for section in sections]
    return cls(**document, sections=sections, simulated=simulated)

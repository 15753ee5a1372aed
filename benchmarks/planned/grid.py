"""Measures models x rates x hosts, section by section."""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import tqdm

from benchmarks import harness
from benchmarks.planned.found import Found
from benchmarks.planned.found import Key
from benchmarks.planned.found import Section
from benchmarks.planned.found import Way
from benchmarks.planned.ways import DENSE
from benchmarks.planned.ways import PLANNED
from benchmarks.served import Served
from benchmarks.testbed import Testbed

# Eight hosts may share two cores while they compile.
_SLOW_S, _CALL_S = 1200.0, 300.0
# Rounds of which the step without any exchange is told; and of each collective.
_COMPUTE_ROUNDS, _LINK_ROUNDS = 9, 5
_ROWS = "-rows"
BASELINE = "pmean"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
  """What is to be measured.

  Attributes:
    hosts: Numbers of hosts, each a testbed of its own.
    rates: Names in `netns.RATES`.
    models: Names in `MODELS`; with `-rows` behind it of row gradients.
    repeats: Timed rounds; one more goes before them.
    batches: Different batches that steps go through.
    loopback: Whether hosts are mere processes on 127.0.0.1.
    ways: Measured beside the plan and `pmean`; None for all.
  """

  hosts: tuple[int, ...]
  rates: tuple[str, ...]
  models: tuple[str, ...]
  repeats: int
  batches: int
  loopback: bool
  ways: tuple[str, ...] | None = None

  def left(self, found: Found) -> list[Key]:
    """What of it is not measured yet."""
    keys = [
      Key(hosts, rate, model)
      for hosts in self.hosts
      for model in self.models
      for rate in self.rates
    ]
    done = found.sections
    return [
      key
      for key in keys
      if key not in done or not done[key].is_done(self.repeats)
    ]


class Measurement:
  """One run over a grid: adds to `found`, and has `save` called as it goes."""

  def __init__(self, grid: Grid, found: Found, save: Callable[[], None]):
    self._grid, self._found, self._save = grid, found, save

  def run(self) -> None:
    """Measures what is missing.

    Raises:
      RuntimeError: A host died or did not answer.
    """
    left = self._grid.left(self._found)
    with tqdm.tqdm(
      total=len(left), unit="cell", disable=None, leave=False
    ) as bar:
      self._bar = bar
      for hosts in self._grid.hosts:
        keys = [key for key in left if key.hosts == hosts]
        if keys:
          bar.set_description(f"{hosts} hosts")
          self._on_hosts(hosts, keys)

  def _on_hosts(self, hosts: int, keys: Sequence[Key]) -> None:
    with (
      tempfile.TemporaryDirectory(prefix="zenjax-planned-") as scratch,
      Testbed(hosts, "unlimited", self._grid.loopback) as bed,
    ):
      cache = pathlib.Path(scratch, "compiled")
      cache.mkdir()
      served = Served(
        bed, "benchmarks.planned.host", str(cache), keep_memory=True
      )
      for rate in dict.fromkeys(key.rate for key in keys):
        self._links(served, rate)
      for model in dict.fromkeys(key.model for key in keys):
        rates = [key.rate for key in keys if key.model == model]
        trace = str(pathlib.Path(scratch, f"trace-{model}"))
        self._model(served, model, rates, trace)

  def _links(self, served: Served, rate: str) -> None:
    at = served.bed.hosts, rate
    if at in self._found.topologies:
      return
    self._bar.set_postfix_str(f"{rate}: measure the links")
    served.bed.set_rate(rate)
    replies = served.ask("links", timeout=_SLOW_S, repeats=_LINK_ROUNDS)
    self._found.topologies[at] = replies[0]
    self._save()

  def _model(
    self, served: Served, model: str, rates: Sequence[str], trace: str
  ) -> None:
    served.bed.set_rate("unlimited")
    self._bar.set_postfix_str(f"{model}: compile, record")
    served.ask(
      "model",
      timeout=_SLOW_S,
      name=model.removesuffix(_ROWS),
      rows=model.endswith(_ROWS),
      batches=self._grid.batches,
      trace=trace,
    )
    rounds = []
    for _ in range(1 + _COMPUTE_ROUNDS):
      # By turns, or it would find its memory in caches as no other does.
      served.ask("time", timeout=_CALL_S, program=BASELINE)
      rounds.append(max(served.ask("time", timeout=_CALL_S, program="none")))
    compute_s = float(np.median(rounds[1:]))
    for rate in rates:
      section = Section(
        hosts=served.bed.hosts,
        rate=rate,
        model=model,
        repeats=self._grid.repeats,
        compute_s=compute_s,
        ways=self._ways(served, rate, compute_s),
        host_times_s={},
      )
      self._found.sections[section.key] = section
      self._time(served, section)
      self._save()
      self._bar.update()

  def _ways(
    self, served: Served, rate: str, compute_s: float
  ) -> dict[str, Way]:
    """All of them, compiled where the links are fast."""
    served.bed.set_rate("unlimited")
    topology = self._found.topologies[served.bed.hosts, rate]
    self._bar.set_postfix_str(f"{rate}: plan")
    told: dict[str, dict[str, Any]] = served.ask(
      "plans", timeout=_SLOW_S, topology=topology, compute_seconds=compute_s
    )[0]
    ways = {
      BASELINE: Way(
        program=BASELINE,
        predicted_s=told[DENSE]["pmean_s"],
        received_bytes=told[DENSE]["received_bytes"],
      )
    }
    unknown = sorted(set(self._grid.ways or ()) - set(told))
    if unknown:
      raise RuntimeError(
        f"`--ways` must be among {', '.join(told)} for this model and so many"
        f" hosts, got {unknown[0]!r}."
      )
    for name, facts in told.items():
      if self._grid.ways and name not in (PLANNED, *self._grid.ways):
        continue
      self._bar.set_postfix_str(f"{rate}: compile {name}")
      replies = served.ask(
        "build", timeout=_SLOW_S, program=facts["program"], plan=facts["plan"]
      )
      ways[name] = Way(
        program=facts["program"],
        predicted_s=facts["predicted_s"],
        received_bytes=facts["received_bytes"],
        wrong=sum(reply["wrong"] for reply in replies),
        compile_s=replies[0]["compile_s"],
        plan=_without_machine(facts["plan"]) if name == PLANNED else None,
      )
    return ways

  def _time(self, served: Served, section: Section) -> None:
    served.bed.set_rate(section.rate)
    right = [way.program for way in section.ways.values() if not way.wrong]
    programs = list(dict.fromkeys(right))
    times: dict[str, list[list[float]]] = {x: [] for x in programs}
    section.host_times_s = times
    for turn in range(-1, section.repeats):
      round_ = f"round {turn + 1} of {section.repeats}"
      for i in harness.shuffled(len(programs), turn):
        self._bar.set_postfix_str(f"{section.model}, {section.rate}: {round_}")
        seconds = served.ask("time", timeout=_CALL_S, program=programs[i])
        if turn >= 0:
          times[programs[i]].append(seconds)


def _without_machine(plan: str) -> str:
  """A file has each machine once, and not in every plan again."""
  return json.dumps({**json.loads(plan), "topology": None})

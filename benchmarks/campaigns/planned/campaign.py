"""`planned`: measures models x rates x hosts, section by section."""

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import tempfile
from typing import Any

import tqdm

from benchmarks import campaign
from benchmarks import harness
from benchmarks import record
from benchmarks.campaigns.planned import cells as cells_lib
from benchmarks.campaigns.planned import show
from benchmarks.campaigns.planned.cells import BASELINE
from benchmarks.campaigns.planned.cells import DENSE
from benchmarks.campaigns.planned.cells import Found
from benchmarks.campaigns.planned.cells import Key
from benchmarks.campaigns.planned.cells import PLANNED
from benchmarks.campaigns.planned.cells import Section
from benchmarks.campaigns.planned.cells import Way
from benchmarks.testbed import netns
from benchmarks.testbed.served import Served

_DEFAULTS: dict[str, tuple] = {
  "hosts": (2, 4, 8),
  "rates": tuple(netns.RATES),
  "models": ("lm", "dlrm"),
}
# Rounds of which the step without any exchange is told; and of each collective.
_COMPUTE_ROUNDS, _LINK_ROUNDS = 9, 5
# Bytes of a collective: the largest takes a second where links are slowest.
_SIZES = tuple(1 << log for log in (12, 14, 16, 18, 20, 22, 24))
# `-rows`: row gradients, whose step does not grow with the tables.
_ROWS = "-rows"


def run(options: argparse.Namespace) -> int:
  """Measures, prints, saves; returns the exit code.

  Raises:
    ValueError: A file is none of this command's.
    RuntimeError: This machine or user cannot have namespaces.
  """
  if options.show:
    show.show(str(options.show), cells_lib.read(options.show))
    return 0
  return _Planned(options).run()


class _Planned(campaign.Campaign):
  def __init__(self, options: argparse.Namespace):
    asked = campaign.asked(options, _DEFAULTS)
    self._hosts, self._rates = asked["hosts"], asked["rates"]
    self._models = asked["models"]
    super().__init__(options, self._hosts, self._rates)
    now = cells_lib.software(loopback=options.loopback)
    self._found = Found(now)
    if options.json:
      self._found = cells_lib.load(options.json, now)

  def _left(self) -> list[Key]:
    """Returns what is not measured yet."""
    keys = [
      Key(hosts, rate, model)
      for hosts in self._hosts
      for model in self._models
      for rate in self._rates
    ]
    done, repeats = self._found.sections, self.options.repeats
    return [k for k in keys if k not in done or not done[k].is_done(repeats)]

  def write(self, path: pathlib.Path) -> None:
    settings = record.settings(self.options)
    self._found.save(path, settings, complete=not self._left())

  def show(self) -> None:
    place = "processes" if self.options.loopback else "network namespaces"
    jax = self._found.software["jax"]
    title = f"planned: {place} on {os.cpu_count()} cores, JAX {jax}"
    show.show(title, self._found)

  def failed(self) -> bool:
    sections = self._found.sections.values()
    wrong = any(way.wrong for s in sections for way in s.ways.values())
    picks = [p for s in sections if (p := cells_lib.pick(s))]
    return wrong or any(p.harmful for p in picks)

  def measure(self) -> None:
    left = self._left()
    with tqdm.tqdm(
      total=len(left), unit="cell", disable=None, leave=False
    ) as bar:
      self._bar = bar
      for hosts in self._hosts:
        keys = [key for key in left if key.hosts == hosts]
        if keys:
          bar.set_description(f"{hosts} hosts")
          self._on_hosts(hosts, keys)

  def _on_hosts(self, hosts: int, keys: Sequence[Key]) -> None:
    loopback = self.options.loopback
    with (
      tempfile.TemporaryDirectory(prefix="zenjax-planned-") as scratch,
      campaign.hosts(hosts, "planned.host", loopback=loopback) as served,
    ):
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
    replies = served.ask(
      "links", timeout=campaign.SLOW_S, repeats=_LINK_ROUNDS, sizes=_SIZES
    )
    self._found.topologies[at] = replies[0]
    self.save()

  def _model(
    self, served: Served, model: str, rates: Sequence[str], trace: str
  ) -> None:
    served.bed.set_rate("unlimited")
    self._bar.set_postfix_str(f"{model}: compile, record")
    served.ask(
      "model",
      timeout=campaign.SLOW_S,
      name=model.removesuffix(_ROWS),
      rows=model.endswith(_ROWS),
      batches=self.options.batches,
      trace=trace,
    )
    rounds = []
    for _ in range(1 + _COMPUTE_ROUNDS):
      # By turns, or it would find its memory in caches as no other does.
      for program in (BASELINE, "none"):
        times = served.ask("time", timeout=campaign.CALL_S, program=program)
      rounds.append(max(times))
    compute_s = harness.median(rounds[1:])
    for rate in rates:
      section = Section(
        hosts=served.bed.hosts,
        rate=rate,
        model=model,
        repeats=self.options.repeats,
        compute_s=compute_s,
        ways=self._ways(served, rate, compute_s),
        host_times_s={},
      )
      self._found.sections[section.key] = section
      self._time(served, section)
      self.save()
      self._bar.update()

  def _ways(
    self, served: Served, rate: str, compute_s: float
  ) -> dict[str, Way]:
    """Returns all of them, compiled where the links are fast."""
    served.bed.set_rate("unlimited")
    topology = self._found.topologies[served.bed.hosts, rate]
    self._bar.set_postfix_str(f"{rate}: plan")
    told: dict[str, dict[str, Any]] = served.ask(
      "plans",
      timeout=campaign.SLOW_S,
      topology=topology,
      compute_seconds=compute_s,
    )[0]
    ways = {
      BASELINE: Way(
        program=BASELINE,
        predicted_s=told[DENSE]["pmean_s"],
        received_bytes=told[DENSE]["received_bytes"],
      )
    }
    wanted = self.options.ways or ()
    if unknown := sorted(set(wanted) - set(told)):
      raise RuntimeError(
        f"`--ways` must be among {', '.join(told)} for this model and so many"
        f" hosts, got {unknown[0]!r}."
      )
    for name, facts in told.items():
      if wanted and name not in (PLANNED, *wanted):
        continue
      self._bar.set_postfix_str(f"{rate}: compile {name}")
      program, plan = facts["program"], facts["plan"]
      replies = served.ask(
        "build", timeout=campaign.SLOW_S, program=program, plan=plan
      )
      ways[name] = Way(
        program=program,
        predicted_s=facts["predicted_s"],
        received_bytes=facts["received_bytes"],
        wrong=sum(reply["wrong"] for reply in replies),
        compile_s=replies[0]["compile_s"],
        plan=_without_machine(plan) if name == PLANNED else None,
      )
    return ways

  def _time(self, served: Served, section: Section) -> None:
    served.bed.set_rate(section.rate)
    right = [way.program for way in section.ways.values() if not way.wrong]
    programs = list(dict.fromkeys(right))
    repeats, place = section.repeats, f"{section.model}, {section.rate}"
    for turn in campaign.time_programs(served, section, programs, repeats):
      self._bar.set_postfix_str(f"{place}: round {turn + 1} of {repeats}")


def _without_machine(plan: str) -> str:
  """A file has each machine once, and not in every plan again."""
  return json.dumps({**json.loads(plan), "topology": None})

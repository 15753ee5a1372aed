"""`planned`: measures models x rates x hosts, section by section."""

import argparse
from collections.abc import Sequence
import itertools
from typing import Any

from benchmarks import campaign
from benchmarks import harness
from benchmarks.campaigns.planned import cells as cells_lib
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
  """Measures, prints, saves; returns the exit code."""
  if options.show:
    cells_lib.show(str(options.show), cells_lib.Found.read(options.show))
    return 0
  return _Planned(options).run()


class _Planned(campaign.Campaign):
  def __init__(self, options: argparse.Namespace):
    asked = campaign.asked(options, _DEFAULTS)
    campaign.require(options, asked["hosts"], asked["rates"])
    every = itertools.product(*(asked[x] for x in ("hosts", "models", "rates")))
    self._keys = [cells_lib.Key(n, rate, model) for n, model, rate in every]
    now = campaign.software(cells_lib.CODE, loopback=options.loopback)
    self.options, self.found = options, cells_lib.Found.load(options.json, now)

  def _left(self) -> list[cells_lib.Key]:
    """Returns what is not measured yet."""
    done, repeats = self.found.sections, self.options.repeats
    is_done = lambda key: key in done and done[key].is_done(repeats)
    return [key for key in self._keys if not is_done(key)]

  def complete(self) -> bool:
    return not self._left()

  def show(self) -> None:
    cells_lib.show(self.title(), self.found)

  def failed(self) -> bool:
    sections = self.found.sections.values()
    wrong = any(way.wrong for s in sections for way in s.ways.values())
    picks = [p for s in sections if (p := cells_lib.pick(s))]
    return wrong or any(p.harmful for p in picks)

  def measure(self) -> None:
    left = self._left()
    with harness.progress(total=len(left)) as self._bar:
      for hosts in dict.fromkeys(key.hosts for key in left):
        self._bar.set_description(f"{hosts} hosts")
        self._on_hosts(hosts, [key for key in left if key.hosts == hosts])

  def _on_hosts(self, hosts: int, keys: Sequence[cells_lib.Key]) -> None:
    module, loopback = "campaigns.planned.host", self.options.loopback
    with campaign.hosts(hosts, module, loopback=loopback) as served:
      for rate in dict.fromkeys(key.rate for key in keys):
        self._links(served, rate)
      for model in dict.fromkeys(key.model for key in keys):
        rates = [key.rate for key in keys if key.model == model]
        self._model(served, model, rates)

  def _links(self, served: Served, rate: str) -> None:
    at = served.bed.hosts, rate
    if at in self.found.topologies:
      return
    self._bar.set_postfix_str(f"{rate}: measure the links")
    served.bed.set_rate(rate)
    replies = served.ask("links", repeats=_LINK_ROUNDS, sizes=_SIZES)
    self.found.topologies[at] = replies[0]
    self.save()

  def _model(self, served: Served, model: str, rates: Sequence[str]) -> None:
    served.bed.set_rate("unlimited")
    self._bar.set_postfix_str(f"{model}: compile, record")
    served.ask(
      "model",
      name=model.removesuffix(_ROWS),
      rows=model.endswith(_ROWS),
      batches=self.options.batches,
      trace=f"{served.cache}/trace-{model}",
    )
    # By turns, or it would find its memory in caches as no other does.
    programs = (cells_lib.BASELINE, "none")
    compute_s = campaign.compute_s(served, programs, _COMPUTE_ROUNDS)
    for rate in rates:
      section = cells_lib.Section(
        hosts=served.bed.hosts,
        rate=rate,
        model=model,
        repeats=self.options.repeats,
        compute_s=compute_s,
        ways=self._ways(served, rate, compute_s),
        host_times_s={},
      )
      self.found.sections[section.key] = section
      served.bed.set_rate(rate)
      names, repeats = section.right(), section.repeats
      for turn in campaign.time_programs(served, section, names, repeats):
        place = f"{model}, {rate}: round {turn + 1} of {repeats}"
        self._bar.set_postfix_str(place)
      self.save()
      self._bar.update()

  def _ways(
    self, served: Served, rate: str, compute_s: float
  ) -> dict[str, cells_lib.Way]:
    """Returns all of them, compiled where the links are fast."""
    served.bed.set_rate("unlimited")
    topology = self.found.topologies[served.bed.hosts, rate]
    self._bar.set_postfix_str(f"{rate}: plan")
    told: dict[str, dict[str, Any]] = served.ask(
      "plans", topology=topology, compute_seconds=compute_s
    )[0]
    pmean = cells_lib.Way(
      program=cells_lib.BASELINE,
      predicted_s=told[cells_lib.DENSE]["pmean_s"],
      received_bytes=told[cells_lib.DENSE]["received_bytes"],
    )
    ways = {cells_lib.BASELINE: pmean}
    wanted = self.options.ways or told
    if unknown := sorted(set(wanted) - set(told)):
      raise RuntimeError(
        f"`--ways` must be among {', '.join(told)} for this model and so many"
        f" hosts, got {unknown[0]!r}."
      )
    for name in [x for x in told if x == cells_lib.PLANNED or x in wanted]:
      self._bar.set_postfix_str(f"{rate}: compile {name}")
      facts = told[name]
      program, plan = facts["program"], facts["plan"]
      replies = served.ask("build", program=program, plan=plan)
      ways[name] = cells_lib.Way(
        program=program,
        predicted_s=facts["predicted_s"],
        received_bytes=facts["received_bytes"],
        wrong=sum(reply["wrong"] for reply in replies),
        compile_s=replies[0]["compile_s"],
        plan=plan if name == cells_lib.PLANNED else None,
      )
    return ways

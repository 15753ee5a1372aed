"""Implements `zenjax plan` and `zenjax whatif`, which read a recorded trace.

The program exits with status 2 if its input is wrong. It imports JAX only after
reading the options, so that `--help` is fast.
"""

import argparse
import bisect
from collections.abc import Callable, Iterator, Sequence
import itertools
import pathlib
from typing import Any

from zenjax._src.machine import machines
from zenjax._src.machine import rates

_TURNS_TO = {
  "plan": "the plan is the better choice",
  "pmean": "plain pmean is the better choice",
  "neither": "there is no difference",
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command, and exits with status 2 if the input is wrong.

  Args:
    argv: Arguments; by default `sys.argv`.

  Returns:
    The exit status.
  """
  parser = argparse.ArgumentParser(
    prog="zenjax",
    description="Plans a run that zenjax.planner.record has recorded. Example:"
    " zenjax plan --trace DIR --hosts 64 --link 100gbit --machine h100",
  )
  add_command = parser.add_subparsers(required=True, metavar="COMMAND")
  plan = add_command.add_parser("plan", help="choose how to send gradients")
  what_if = add_command.add_parser("whatif", help="vary hosts, links, batches")
  for command, run in ((plan, _plan), (what_if, _what_if)):
    command.set_defaults(parser=command, run=run)
    add = command.add_argument
    add("--trace", required=True, metavar="DIR", help="directory of the trace")
    add("--batch", type=_count, default=1, help="multiple of recorded lookups")
    add("--hosts", type=_count, metavar="N", help="hosts, joined by --link")
    add("--link", metavar="RATE", help="network card, say 100gbit")
    add("--ports", type=_count, metavar="N", help="network cards per host")
    add("--machine", choices=tuple(machines.MACHINES), help="type of devices")
    add("--devices", type=_count, metavar="N", help="per host, by default 1")
    add("--topology", metavar="FILE", help="saved Topology, instead of these")
    add(
      "--compute-seconds",
      type=_seconds,
      default=0.0,
      required=command is what_if,
      help="time of a step on one device without any exchange",
    )
  plan.add_argument("--wire-dtypes", nargs="+", default=[], metavar="DTYPE")
  plan.add_argument("--json", type=pathlib.Path, help="file for the plan")
  options = parser.parse_args(argv)
  try:
    for line in options.run(options):
      print(line, flush=True)
  except (OSError, TypeError, ValueError) as error:
    options.parser.error(str(error))
  return 0


def _count(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
  return int(text)


def _seconds(text: str) -> float:
  if not 0 < float(text) < float("inf"):
    raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
  return float(text)


def _topology(options: argparse.Namespace) -> Any:
  """Returns the machine that the options specify."""
  from zenjax._src.machine.topologies import Topology  # Imports JAX.

  link, machine, devices = options.link, options.machine, options.devices
  if options.topology is not None:
    if link or machine or devices or options.ports:
      raise ValueError(
        "--topology says all about the machine. Give only --hosts with it."
      )
    topology = Topology.load(options.topology)
    return topology.with_hosts(options.hosts) if options.hosts else topology
  hosts, ports = options.hosts or 1, options.ports or 1
  if machine and devices:
    return Topology.preset(
      machine, devices, hosts=hosts, network=link, ports=ports
    )
  if devices or not (link and options.hosts):
    raise ValueError(
      "a machine must be described. Give --link RATE --hosts N, or --machine"
      " NAME --devices N, or all four, or --topology FILE."
    )
  return Topology.network(link, hosts, machine, ports=ports)


class _Run:
  """A recorded run, which can be planned for any machine and batch."""

  def __init__(self, directory: str):
    from zenjax._src.planner import plan_model  # Imports JAX.
    from zenjax._src.planner import recorded_runs
    from zenjax._src.planner import traces

    trace = traces.read(directory)
    self._model, self._leaves = plan_model, trace.header.leaves
    self._growths = recorded_runs.growths(trace)
    self._sets = trace.header.devices * trace.steps

  def plan(self, topology: Any, batch: int, **options: Any) -> Any:
    """Returns the plan for `batch` times the recorded lookups."""
    gradients = [
      self._model.Gradient(
        leaf.name,
        leaf.shape,
        self._model.np.dtype(leaf.dtype),
        leaf.look_ups and leaf.look_ups * batch,
      )
      for leaf in self._leaves
    ]
    profiles = {
      name: growth.profile(topology.devices, batch)
      for name, growth in self._growths.items()
    }
    question = self._model.Question(
      gradients=tuple(gradients),
      topology=topology,
      axes=topology.axes if len(topology.axes) > 1 else ("data",),
      profiles=profiles,
      **options,
    )
    return self._model.answer(question)

  def notes(self, topology: Any, batch: int) -> Iterator[str]:
    """Yields notes about what the trace or the options leave open."""
    sets = topology.devices * batch
    if sets > self._sets:
      yield (
        f"note: the trace has {self._sets} row sets per table, but {sets} are"
        " needed, so unions are upper bounds. Record more steps."
      )
    if all(leaf.is_table for leaf in self._leaves):
      yield (
        "note: the trace and therefore the plan contain tables only. zen_sync"
        " refuses the plan if your model has other parameters."
      )
    if not any(link.work.move_byte for link in topology.links):
      yield (
        "note: the work of the devices is assumed to take no time. Give"
        " --machine, or a measured --topology, to include it."
      )


def _plan(options: argparse.Namespace) -> Iterator[str]:
  topology, run = _topology(options), _Run(options.trace)
  plan = run.plan(
    topology,
    options.batch,
    compute_seconds=options.compute_seconds,
    wire_dtypes=tuple(options.wire_dtypes),
  )
  for leaf in plan.leaves:
    if leaf.rows is not None:
      devices = f"{leaf.union:.0f} on {plan.devices}"
      yield f"{leaf.name}: {leaf.rows:.0f} rows on a device, {devices} devices"
  yield str(plan)
  yield from run.notes(topology, options.batch)
  if options.json:
    options.json.write_text(plan.to_json(), encoding="utf-8")


def _what_if(options: argparse.Namespace) -> Iterator[str]:
  topology, run, batch = _topology(options), _Run(options.trace), options.batch

  def plan(machine: Any, batch: int) -> Any:
    seconds = options.compute_seconds * batch
    return run.plan(machine, batch, compute_seconds=seconds)

  by_hosts = lambda hosts: plan(topology.with_hosts(hosts), batch)
  by_rate = lambda mbits: plan(topology.with_rate(mbits * 1e6), batch)
  by_batch = lambda times: plan(topology, times)
  mbits = (1_000, 10_000, 25_000, 100_000, 400_000)
  rate = lambda mbits: rates.in_words(mbits * 1e6)
  yield f"{topology.devices} devices on {topology.name}, {batch} x batch"
  yield from _sweep("hosts", (2, 4, 8, 16, 32, 64), str, by_hosts)
  yield from _sweep("link", mbits, rate, by_rate)
  yield from _sweep("batch", (1, 2, 4, 8), str, by_batch)
  yield "scaling: time of a step without any exchange over its time with it"
  yield from run.notes(topology, batch)


def _sweep(
  name: str,
  values: Sequence[int],
  in_words: Callable[[int], str],
  plan_at: Callable[[int], Any],
) -> Iterator[str]:
  """Yields a table of plans, and the values at which the choice changes."""
  from zenjax._src.core.text import columns

  plans = {x: plan_at(x) for x in values}
  rows: list[tuple[str, ...]] = [
    (name, "ms", "pmean ms", "scaling", "pmean's", "better")
  ]
  for x, plan in plans.items():
    both = plan.seconds, plan.dense_seconds
    times = [f"{s * 1e3:.4g}" for s in both]
    scaling = [f"{plan.compute_seconds / s:.3f}" for s in both]
    rows.append((in_words(x), *times, *scaling, plan.better))
  yield from ["", *columns(rows)]
  yield f"from {in_words(values[0])} on {_TURNS_TO[plans[values[0]].better]}"
  for low, high in itertools.pairwise(values):
    changes = lambda x, low=low: plan_at(x).better != plans[low].better
    if plans[high].better != plans[low].better:
      # Three digits, because that is what `in_words` shows.
      between = range(low, high + 1, 10 ** max(len(str(low)) - 3, 0))
      turn = between[bisect.bisect_left(between, True, key=changes)]
      yield f"from {in_words(turn)} on {_TURNS_TO[plan_at(turn).better]}"

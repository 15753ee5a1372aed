"""Implements `zenjax plan`, which reads a recorded trace.

The program exits with status 2 if its input is wrong. It imports JAX only after
reading the options, so that `--help` is fast.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
import pathlib
from typing import Any

from zenjax._src.core.text import columns
from zenjax._src.machine import machines


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
  plan = add_command.add_parser(
    "plan",
    help="choose how to send gradients",
    description="Prints a plan, or a table of plans if --hosts, --link or"
    " --batch have several values.",
  )
  add = plan.add_argument
  add("--trace", required=True, metavar="DIR", help="directory of the trace")
  several: dict[str, Any] = {"nargs": "+", "metavar": "N", "default": [None]}
  add("--hosts", type=_count, **several, help="hosts, joined by --link")
  several["metavar"] = "RATE"
  add("--link", **several, help="network card, say 100gbit")
  add("--ports", type=_count, metavar="N", help="network cards per host")
  add("--machine", choices=tuple(machines.MACHINES), help="type of devices")
  add("--devices", type=_count, metavar="N", help="per host, by default 1")
  add("--topology", metavar="FILE", help="saved Topology, instead of these")
  several |= {"metavar": "N", "default": [1]}
  add("--batch", type=_count, **several, help="multiple of recorded lookups")
  what = "time of a recorded step without any exchange"
  add("--compute-seconds", type=_seconds, default=0.0, metavar="S", help=what)
  what = "dtypes and compressors, say int8 or 'TopK(0.01)'"
  add("--allow", nargs="+", default=["lossless"], metavar="LOSS", help=what)
  add("--json", type=pathlib.Path, metavar="FILE", help="file for the plan")
  options = parser.parse_args(argv)
  try:
    for line in _plan(options):
      print(line, flush=True)
  except (OSError, TypeError, ValueError) as error:
    plan.error(str(error))
  return 0


def _count(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
  return int(text)


def _seconds(text: str) -> float:
  if not 0 < float(text) < float("inf"):
    raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
  return float(text)


def _plan(options: argparse.Namespace) -> Iterator[str]:
  """Yields lines of text: a plan, or a table of plans."""
  from zenjax._src.planner import recorded_runs  # Imports JAX.
  from zenjax._src.planner import traces

  trace = traces.read(options.trace)
  growths = recorded_runs.growths(trace)
  cases = list(itertools.product(options.hosts, options.link, options.batch))
  topologies = [_topology(options, *case[:2]) for case in cases]
  batches = [batch for *_, batch in cases]
  plans = [
    _planned(options, trace, growths, *each)
    for each in zip(topologies, batches)
  ]
  if len(plans) == 1:
    (plan,) = plans
    for leaf in plan.leaves:
      if leaf.rows is not None:
        union = f"{leaf.union:.0f} on {plan.devices} devices"
        yield f"{leaf.name}: {leaf.rows:.0f} rows on a device, {union}"
    yield str(plan)
    if options.json:
      options.json.write_text(plan.to_json(), encoding="utf-8")
  elif options.json:
    raise ValueError(
      "--json needs one plan. Give one value of --hosts, --link and --batch."
    )
  else:
    rows: list[tuple[str, ...]] = [
      ("hosts", "link", "batch", "ms", "pmean ms", "gain", "better")
    ]
    for case, plan in zip(cases, plans):
      words = [str(x or "-") for x in case]
      ms = [f"{x * 1e3:.4g}" for x in (plan.seconds, plan.dense_seconds)]
      rows.append((*words, *ms, f"{plan.gain:.2f}x", plan.better))
    yield from columns(rows)
  sets = [x.devices * batch for x, batch in zip(topologies, batches)]
  yield from _notes(trace, topologies[0], max(sets))
  if options.compute_seconds and set(options.allow) - {"lossless"}:
    yield (
      "note: the trace does not know in which order gradients are computed, so"
      " parts are cut as if the last leaf's came first. `zenjax.planner.plan`"
      " knows the order."
    )


def _topology(
  options: argparse.Namespace, hosts: int | None, link: str | None
) -> Any:
  """Returns the machine that the options specify."""
  from zenjax._src.machine.topologies import Topology  # Imports JAX.

  machine, devices, ports = options.machine, options.devices, options.ports
  if options.topology is not None:
    if link or machine or devices or ports:
      raise ValueError(
        "--topology says all about the machine. Give only --hosts with it, the"
        " number of devices along its slowest links."
      )
    topology = Topology.load(options.topology)
    return topology.with_hosts(hosts) if hosts else topology
  ports = ports or 1
  if machine and devices:
    if bool(link) != ((hosts or 1) > 1):
      raise ValueError(
        "--devices with --link needs several --hosts, and several --hosts need"
        " --link RATE."
      )
    return Topology.preset(
      machine, devices, hosts=hosts or 1, network=link, ports=ports
    )
  if devices or not (link and hosts):
    what = "a machine must be described"
    if devices:
      what = "--devices needs --machine NAME"
    elif hosts or link:
      what = "--hosts needs --link RATE" if hosts else "--link needs --hosts N"
    raise ValueError(
      f"{what}. Give --link RATE --hosts N, or --machine NAME --devices N, or"
      " all four, or --topology FILE."
    )
  return Topology.network(link, hosts, machine, ports=ports)


def _planned(
  options: argparse.Namespace,
  trace: Any,
  growths: Mapping[str, Any],
  topology: Any,
  batch: int,
) -> Any:
  """Returns the plan for `batch` times the recorded lookups."""
  import numpy as np

  from zenjax._src.planner import plan_model  # Imports JAX.
  from zenjax._src.planner import questions
  from zenjax._src.planner import timeline

  # A trace does not know the order in which gradients are computed. The last
  # leaf is often of the last layer, whose gradient is computed first.
  leaves = trace.header.leaves[::-1]
  ready = timeline.in_order([math.prod(leaf.shape) for leaf in leaves])[::-1]
  gradients = [
    questions.Gradient(
      leaf.name,
      leaf.shape,
      np.dtype(leaf.dtype),
      leaf.look_ups and leaf.look_ups * batch,
      at,
      whole=not leaf.is_table,
    )
    for leaf, at in zip(trace.header.leaves, ready)
  ]
  dtypes, compressors = questions.losses(options.allow)
  return plan_model.answer(
    questions.Question(
      gradients=tuple(gradients),
      topology=topology,
      axes=topology.axes if len(topology.axes) > 1 else ("data",),
      profiles={
        name: growth.profile(topology.devices, batch)
        for name, growth in growths.items()
      },
      compute_seconds=options.compute_seconds * batch,
      wire_dtypes=dtypes,
      compressors=compressors,
    )
  )


def _notes(trace: Any, topology: Any, needed: int) -> Iterator[str]:
  """Yields notes about what the trace or the options leave open.

  Args:
    trace: The trace.
    topology: The machine.
    needed: How many row sets the union of all devices consists of.
  """
  recorded = trace.header.devices * trace.steps
  if needed > recorded:
    yield (
      f"note: the trace has {recorded} row sets per table, but {needed} are"
      " needed, so unions are upper bounds. Record more steps."
    )
  if all(leaf.is_table for leaf in trace.header.leaves):
    yield (
      "note: the trace and therefore the plan contain tables only. zen_sync"
      " refuses the plan if your model has other parameters."
    )
  if not any(link.work.move_byte for link in topology.links):
    yield (
      "note: the work of the devices is assumed to take no time. Give"
      " --machine, or a measured --topology, to include it."
    )

"""The commands of the command line: what each computes, prints and saves."""

import argparse
from collections.abc import Callable
import dataclasses
import json
import math
from typing import Any, NamedTuple
import warnings

import jax
from jax.sharding import Mesh
import numpy as np

from zenjax import traces
from zenjax._src.core.text import columns
from zenjax._src.machine import measure
from zenjax._src.machine import rates
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import recorded_runs
from zenjax._src.planner import what_if
from zenjax._src.planner.choosing import answer
from zenjax._src.planner.recorded_runs import Recorded
from zenjax._src.planner.what_if import Sweep
from zenjax._src.sync import plans

# --- links --------------------------------------------------------------------


def run_links(options: argparse.Namespace) -> None:
  """Measures the links between devices of this process, prints and saves."""
  devices = _devices(options.devices)
  mesh = Mesh(np.array(devices), ("data",))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    found = measure.measure_links(mesh, repeats=options.repeats)
  print(links_table(found))
  for warning in caught:
    print(f"note: {warning.message}")
  if options.json:
    options.json.write_text(found.to_json(), encoding="utf-8")
    print(f"saved {options.json}")


def links_table(found: Topology) -> str:
  """Returns the fits of each level, and local work."""
  lines = [f"{found.devices} x {found.name}, {found.source}"]
  for level in found.levels:
    rows = [(level.name, "latency us", "GB/s", "line misses by")]
    for fit in level.fits:
      rate = (
        f"{fit.bandwidth / 1e9:.3g}" if math.isfinite(fit.bandwidth) else "-"
      )
      rows.append(
        (fit.op, f"{fit.latency_s * 1e6:.4g}", rate, f"{fit.error:.0%}")
      )
    lines += columns(rows)
    link = level.link
    lines.append(
      f"for other numbers of devices: {link.latency_s * 1e6:.4g} us a message,"
      f" {link.bandwidth / 1e9:.3g} GB/s"
    )
  work = dataclasses.asdict(found.levels[-1].link.work)
  told = [f"{name} {s * 1e9:.3g} ns" for name, s in work.items()]
  return "\n".join([*lines, f"a device's own work: {', '.join(told)}"])


def _devices(wanted: int | None) -> list[Any]:
  if wanted:
    try:  # Only the CPU's are made; others are there.
      jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
      pass  # JAX runs already, with those it has.
  devices = jax.devices()
  if len(devices) < (wanted or 2):
    raise ValueError(
      f"--devices must be at most those that JAX sees, {len(devices)}"
      f" {devices[0].platform}, got {wanted}; on CPU --devices 8 makes 8 of"
      " them."
    )
  return devices[:wanted]


# --- plan ---------------------------------------------------------------------


def run_plan(options: argparse.Namespace) -> None:
  """Plans a recorded run, prints and saves."""
  machine = topology(options)
  recorded = recorded_model(options)
  plan = answer(
    recorded.question(machine, options.batch, **model_settings(options))
  )
  print(_densities(options, recorded, machine.devices))
  print(plan)
  for note in notes(options, recorded, machine):
    print(note)
  if options.json:
    options.json.write_text(plan.to_json(), encoding="utf-8")
    print(f"saved {options.json}")


def _densities(
  options: argparse.Namespace, recorded: Recorded, devices: int
) -> str:
  """Returns the densities of each table, for so many devices."""
  rows = [("table", "rows", "of a device", f"of {devices}", "error")]
  profiles = recorded.profiles(devices, options.batch)
  for name, growth in recorded.growths.items():
    profile, sets = profiles[name], devices * options.batch
    error = growth.error(sets) if sets <= growth.pooled else math.nan
    rows.append(
      (
        name,
        str(growth.rows),
        f"{profile.rows / growth.rows:.2%}",
        f"{profile.union / growth.rows:.2%}",
        f"{error:.1%}" if math.isfinite(error) else "-",
      )
    )
  return "\n".join(
    [f"nonzero rows, as {options.trace} has them", *columns(rows)]
  )


# --- whatif -------------------------------------------------------------------


class Axis(NamedTuple):
  """A quantity that is varied, in words."""

  name: str
  label: str
  show: Callable[[float], str]
  drawn: str
  tick: Callable[[float], str]


def _rate(at: float) -> str:
  return rates.in_words(at * 1e6)


_whole_text = "{:.0f}".format
HOSTS = Axis("hosts", "hosts", _whole_text, "hosts", _whole_text)
LINKS = Axis("links", "link", _rate, "link, Gbit/s", lambda at: f"{at / 1e3:g}")
BATCH = Axis(
  "batch", "batch", _whole_text, "times the recorded batch", _whole_text
)


def run_whatif(options: argparse.Namespace) -> None:
  """Predicts every sweep, prints, draws and saves."""
  if options.plot:
    what_if.require()
  machine = topology(options)
  recorded = recorded_model(options)
  settings = model_settings(options)
  base = what_if.Base(
    recorded=recorded,
    topology=machine,
    batch=options.batch,
    compute_seconds=settings.pop("compute_seconds"),
    settings=settings,
  )
  # Without a network it is one host's devices that are varied.
  level = machine.levels[0].name
  label = "hosts" if level == "host" else f"devices along {level!r}"
  hosts = HOSTS._replace(label=label, drawn=label)
  sweeps = {
    hosts: what_if.over_hosts(base, options.over_hosts),
    LINKS: what_if.over_links(base, [at / 1e6 for at in options.over_links]),
    BATCH: what_if.over_batch(base, options.over_batch),
  }
  title = (
    f"{machine.devices} devices on {machine.name}, {options.batch} x batch"
  )
  print(f"varied from {title}")
  if options.topology and len(machine.levels) > 1:
    print(f"a link's rate is that of each card: {rates.cards(machine.ports)}")
  for axis, sweep in sweeps.items():
    print("\n" + whatif_table(axis, sweep))
  for note in notes(options, recorded, machine):
    print(note)
  # All is made before any of it is written: an interrupt leaves no half.
  files = {}
  if options.plot:
    kind = options.plot.suffix[1:]
    files[options.plot] = what_if.drawn(kind, sweeps, title)
  if options.json:
    document = {axis.name: dataclasses.asdict(s) for axis, s in sweeps.items()}
    files[options.json] = (json.dumps(document, indent=1) + "\n").encode()
  for path, content in files.items():
    path.write_bytes(content)
    print(f"saved {path}")


def whatif_table(axis: Axis, sweep: Sweep) -> str:
  """Returns every point, and where the better choice changes."""
  rows = [(axis.label, "ms", "pmean ms", "scaling", "pmean's", "better")]
  for p in sweep.points:
    rows.append(
      (
        axis.show(p.at) + ("*" if p.bounded else ""),
        f"{p.seconds * 1e3:.4g}",
        f"{p.dense_seconds * 1e3:.4g}",
        f"{p.scaling:.3f}",
        f"{p.dense_scaling:.3f}",
        _BETTER[p.better],
      )
    )
  lines = [*columns(rows), *turns(axis, sweep)]
  if any(p.better == "neither" for p in sweep.points):
    lines.append(f"no difference: {plans.ERROR_TOLD}")
  if any(p.bounded for p in sweep.points):
    lines.append("* beyond the trace: the largest union that can be")
  return "\n".join(lines)


_BETTER = {"plan": "the plan", "pmean": "pmean", "neither": "no difference"}
_TURNS_TO = {
  "plan": "the plan is the better choice",
  "pmean": "plain pmean is the better choice",
  "neither": "there is no difference",
}


def turns(axis: Axis, sweep: Sweep) -> list[str]:
  """Says from where on which choice is better."""
  if not sweep.turns:
    low, high = map(axis.show, sweep.searched)
    return [f"{_TURNS_TO[sweep.points[0].better]} from {low} to {high}"]
  return [
    f"from {axis.show(turn.at)} on {_TURNS_TO[turn.better]}"
    for turn in sweep.turns
  ]


# --- what options describe ---------------------------------------------------


def topology(options: argparse.Namespace) -> Topology:
  """Returns the machine that the options describe.

  Raises:
    ValueError: They describe none, or two.
  """
  if options.topology is not None:
    for name in ("link", "machine", "devices", "ports"):
      if getattr(options, name) is not None:
        raise ValueError(
          f"--{name} must not be given beside --topology, whose file says it."
        )
    found = Topology.load(options.topology)
    slowest = found.levels[0].name
    return found.resized(**{slowest: options.hosts}) if options.hosts else found
  if options.devices and not options.machine:
    raise ValueError(
      "--devices must come with --machine, whose fabric joins them; of hosts"
      " with one device each give --hosts and --link."
    )
  if bool(options.link) != bool(options.hosts):
    raise ValueError(
      "--link and --hosts must be given together, say --link 100gbit --hosts 8."
    )
  if options.ports and not options.link:
    raise ValueError("--ports must come with --link, whose cards they are.")
  ports = options.ports or 1
  if options.machine and options.devices:
    return Topology.preset(
      options.machine,
      options.devices,
      hosts=options.hosts or 1,
      network=options.link,
      ports=ports,
    )
  if not options.link:
    raise ValueError(
      "a machine must be described: --link RATE --hosts N, --machine NAME"
      " --devices N, or --topology FILE."
    )
  return Topology.network(
    options.link, options.hosts, options.machine, ports=ports
  )


def recorded_model(options: argparse.Namespace) -> Recorded:
  """Reads the trace; raises `ValueError` if it is broken."""
  return recorded_runs.recorded(traces.read(options.trace))


def model_settings(options: argparse.Namespace) -> dict:
  """Returns fields of `Question`, beside model, machine and batch."""
  memory = options.memory_gb
  return dict(
    compute_seconds=options.compute_seconds,
    overlap=options.overlap,
    wire_dtypes=tuple(options.wire_dtypes),
    memory_bytes=None if memory is None else memory * 1e9,
  )


def notes(
  options: argparse.Namespace, run: Recorded, machine: Topology
) -> list[str]:
  """Returns warnings on how far to trust the predictions."""
  lines = []
  sets = machine.devices * options.batch
  if sets > run.pooled:
    lines.append(
      f"note: the trace has {run.pooled} row sets a table, and {sets} are asked"
      " for: unions are the largest that can be. Record more steps."
    )
  if not run.whole:
    lines.append(
      "note: the trace tells of tables only, and so does the plan: zen_sync"
      " refuses it for a model with other leaves. Record it again."
    )
  if all(level.link.work == Work() for level in machine.levels):
    lines.append(
      "note: the device's own work is taken to cost nothing: give --machine, or"
      " --topology as measured by `links`."
    )
  if options.overlap:
    lines.append(
      "note: a trace does not say when gradients are complete: tables are taken"
      " to be last, the others to follow each other evenly."
    )
  return lines


RUN = {"links": run_links, "plan": run_plan, "whatif": run_whatif}

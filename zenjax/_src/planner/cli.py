"""The command line: prints tables, and exits with 2 if the input is wrong."""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import json
import math
import pathlib
import sys
from typing import Any, NamedTuple
import warnings

import jax
from jax.sharding import Mesh
import numpy as np

from zenjax import traces
from zenjax._src.core.text import columns
from zenjax._src.machine import measure
from zenjax._src.machine import topologies
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import recorded_runs
from zenjax._src.planner import what_if
from zenjax._src.planner.choosing import answer
from zenjax._src.planner.recorded_runs import Recorded
from zenjax._src.planner.what_if import Sweep

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: Arguments; by default those of the shell.

  Returns:
    The exit status; bad input exits with 2 by itself.
  """
  parser = _parser()
  options = parser.parse_args(argv)
  try:
    options.run(options)
  except (ImportError, OSError, ValueError) as error:
    options.parser.exit(2, f"{options.parser.prog}: error: {error}\n")
  except KeyboardInterrupt:
    print("Interrupted: nothing was saved.", file=sys.stderr)
    return _INTERRUPTED
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m zenjax",
    description="Plans how gradients travel, from steps that were recorded.",
    epilog="`zenjax.planner.record` writes a trace, which is a directory. In a"
    " program `zenjax.planner.plan` plans a model without one.",
  )
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  plan = commands.add_parser(
    "plan",
    help="how each gradient should travel on a machine, and what it gains",
    description="Chooses for each gradient of a recorded run how it should"
    " travel on a machine, and says what a step gains.",
    epilog="for example: python -m zenjax plan --trace DIR --hosts 64 --link"
    " 100gbit --machine h100 --compute-seconds 0.12",
  )
  add_model(plan)
  add_machine(plan)
  add_output(plan, "the plan, for zenjax.planner.Plan.from_json")
  plan.set_defaults(run=run_plan, parser=plan)

  links = commands.add_parser(
    "links",
    help="what the links between the devices at hand give",
    description="Times collectives and local work on the devices that JAX sees,"
    " which must be idle, and fits a line to each.",
  )
  links.add_argument(
    "--devices",
    type=several,
    metavar="N",
    help="the first N; on CPU so many are made. By default all",
  )
  links.add_argument(
    "--repeats",
    type=positive,
    default=7,
    metavar="N",
    help="how often each is timed, by default 7",
  )
  add_output(links, "the machine, for --topology")
  links.set_defaults(run=run_links, parser=links)

  whatif = commands.add_parser(
    "whatif",
    help="step time against hosts, link rates and batch size",
    description="Predicts a step's time, planned and with plain pmean, against"
    " hosts, link rates and batch size, and where pmean becomes the better"
    " choice. The scaling factor is a step's time without any exchange over"
    " that with it: 1 where devices train as fast together as alone.",
    epilog="for example: python -m zenjax whatif --trace DIR --hosts 16 --link"
    " 25gbit --machine h100 --compute-seconds 0.12 --plot whatif.png",
  )
  add_model(whatif, compute_required=True)
  add_machine(whatif)
  add_sweeps(whatif)
  add_output(whatif, "all of it")
  whatif.set_defaults(run=run_whatif, parser=whatif)
  return parser


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


_PICTURES = (".png", ".pdf", ".svg")


class Axis(NamedTuple):
  """A quantity that is varied, in words."""

  name: str
  label: str
  show: Callable[[float], str]
  drawn: str
  tick: Callable[[float], str]


def mbit(text: str) -> float:
  """Converts a rate that `rate` has checked to Mbit/s."""
  return topologies.network(text)[0] * 8 / 1e6


def _rate(at: float) -> str:
  return f"{at / 1e3:.3g} Gbit/s" if at >= 1e3 else f"{at:.3g} Mbit/s"


_whole_text = "{:.0f}".format
HOSTS = Axis("hosts", "hosts", _whole_text, "hosts", _whole_text)
LINKS = Axis("links", "link", _rate, "link, Gbit/s", lambda at: f"{at / 1e3:g}")
BATCH = Axis(
  "batch", "batch", _whole_text, "times the recorded batch", _whole_text
)


def add_sweeps(command: argparse.ArgumentParser) -> None:
  """Adds hosts, links and batches to predict for."""
  group = command.add_argument_group("what is varied, one at a time")
  group.add_argument(
    "--over-hosts",
    type=several,
    nargs="+",
    default=[2, 4, 8, 16, 32, 64],
    metavar="N",
    help="by default 2 to 64",
  )
  group.add_argument(
    "--over-links",
    type=rate,
    nargs="+",
    default=["1gbit", "10gbit", "25gbit", "100gbit", "400gbit"],
    metavar="RATE",
    help="by default 1gbit to 400gbit",
  )
  group.add_argument(
    "--over-batch",
    type=positive,
    nargs="+",
    default=[1, 2, 4, 8],
    metavar="K",
    help="times the recorded one, by default 1 to 8",
  )
  command.add_argument(
    "--plot",
    type=picture,
    metavar="FILE",
    help="as its name ends: .png, .pdf or .svg; needs matplotlib",
  )


def picture(text: str) -> pathlib.Path:
  """Checks before the work that a picture can be written."""
  path = output(text)
  if path.suffix not in _PICTURES:
    raise argparse.ArgumentTypeError(
      f"must end in one of {', '.join(_PICTURES)}, got {text!r}"
    )
  return path


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
  rates = [mbit(rate) for rate in options.over_links]
  sweeps = {
    hosts: what_if.over_hosts(base, options.over_hosts),
    LINKS: what_if.over_links(base, rates),
    BATCH: what_if.over_batch(base, options.over_batch),
  }
  title = (
    f"{machine.devices} devices on {machine.name}, {options.batch} x batch"
  )
  print(f"varied from {title}")
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
        "the plan" if p.pays else "pmean",
      )
    )
  lines = [*columns(rows), *turns(axis, sweep)]
  if any(p.bounded for p in sweep.points):
    lines.append("* beyond the trace: the largest union that can be")
  return "\n".join(lines)


def turns(axis: Axis, sweep: Sweep) -> list[str]:
  """Says from where on which choice is better."""
  better = {True: "the plan", False: "plain pmean"}
  if not sweep.turns:
    low, high = map(axis.show, sweep.searched)
    only = better[sweep.points[0].pays]
    return [f"{only} is the better choice from {low} to {high}"]
  return [
    f"from {axis.show(turn.at)} on {better[turn.pays]} is the better choice"
    for turn in sweep.turns
  ]


# --- arguments that commands share --------------------------------------------


def add_model(
  command: argparse.ArgumentParser, compute_required: bool = False
) -> None:
  """Adds the model, and the time of a step without exchanges."""
  group = command.add_argument_group("the model")
  group.add_argument(
    "--trace",
    type=pathlib.Path,
    required=True,
    metavar="DIR",
    help="that zenjax.planner.record wrote",
  )
  group.add_argument(
    "--compute-seconds",
    type=positive_number if compute_required else not_negative,
    required=compute_required,
    default=0.0,
    metavar="S",
    help="what a step takes on one device without any exchange",
  )
  group.add_argument(
    "--batch",
    type=positive,
    default=1,
    metavar="K",
    help="K times as many look-ups a device as were recorded; whatif's"
    " --compute-seconds grows with it, plan's is of that batch",
  )
  group.add_argument(
    "--overlap",
    action="store_true",
    help="exchanges run beside the backward pass, as on TPU and GPU",
  )
  group.add_argument(
    "--wire-dtypes",
    nargs="+",
    choices=("bfloat16", "float16"),
    default=[],
    metavar="DTYPE",
    help="bfloat16 or float16: rows of leaves that have no greater range may be"
    " rounded to these on the wire",
  )
  group.add_argument(
    "--memory-gb",
    type=positive_number,
    metavar="GB",
    help="that the buffers of one leaf's exchange may take; by default any",
  )


def add_machine(command: argparse.ArgumentParser) -> None:
  """Adds the machine."""
  group = command.add_argument_group(
    "the machine",
    "--link RATE --hosts N; --machine NAME --devices N, and with several hosts"
    " these two as well; or --topology FILE. With --machine the device's own"
    " work counts.",
  )
  group.add_argument(
    "--hosts", type=positive, metavar="N", help="joined by --link"
  )
  group.add_argument(
    "--link", type=rate, metavar="RATE", help="line rate, say 100gbit"
  )
  group.add_argument(
    "--machine",
    choices=tuple(topologies.MACHINES),
    metavar="NAME",
    help=", ".join(topologies.MACHINES),
  )
  group.add_argument(
    "--devices",
    type=positive,
    metavar="N",
    help="of a host, which the machine's own fabric joins; by default 1",
  )
  group.add_argument(
    "--topology",
    type=pathlib.Path,
    metavar="FILE",
    help="that `links --json` wrote; --hosts then changes the slowest level",
  )


def add_output(command: argparse.ArgumentParser, what: str) -> None:
  """Adds a file for the result of a command."""
  command.add_argument("--json", type=output, metavar="FILE", help=what)


def topology(options: argparse.Namespace) -> Topology:
  """Returns the machine that the options describe.

  Raises:
    ValueError: They describe none, or two.
  """
  if options.topology is not None:
    for name in ("link", "machine", "devices"):
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
  if options.machine and options.devices:
    return Topology.preset(
      options.machine,
      options.devices,
      hosts=options.hosts or 1,
      network=options.link,
    )
  if not options.link:
    raise ValueError(
      "a machine must be described: --link RATE --hosts N, --machine NAME"
      " --devices N, or --topology FILE."
    )
  return Topology.network(options.link, options.hosts, options.machine)


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


def positive(text: str, least: int = 1, why: str = "") -> int:
  """Parses a whole number of at least 1."""
  try:
    found = int(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(
      f"must be a whole number, got {text!r}"
    ) from error
  if found < least:
    raise argparse.ArgumentTypeError(
      f"must be at least {least}{why}, got {text}"
    )
  return found


def several(text: str) -> int:
  """Parses a whole number of at least 2."""
  return positive(text, 2, ", for one device has no link")


def not_negative(text: str) -> float:
  """Parses a finite number, not negative."""
  try:
    found = float(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(
      f"must be a number, got {text!r}"
    ) from error
  if not 0 <= found < math.inf:
    raise argparse.ArgumentTypeError(
      f"must be finite and not negative, got {text}"
    )
  return found


def positive_number(text: str) -> float:
  """Parses a finite number above 0."""
  found = not_negative(text)
  if not found:
    raise argparse.ArgumentTypeError(f"must be positive, got {text}")
  return found


def rate(text: str) -> str:
  """Checks a line rate, as `Topology.network` takes it."""
  try:
    topologies.network(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(
      f"must be a positive number and gbit or mbit, say 100gbit, got {text!r}"
    ) from error
  return text


def output(text: str) -> pathlib.Path:
  """Checks before the work that a file can be written."""
  path = pathlib.Path(text)
  if path.is_dir() or not path.resolve().parent.is_dir():
    raise argparse.ArgumentTypeError(
      f"must name a file in a directory that is there, got {text!r}"
    )
  return path

"""`python -m zenjax whatif`."""

import argparse
from collections.abc import Callable
import dataclasses
import json
import pathlib
from typing import NamedTuple

from zenjax._columns import columns
from zenjax._planner import _cli_arguments as arguments
from zenjax._planner import _machines
from zenjax._planner import _whatif
from zenjax._planner._whatif import Sweep

_PICTURES = (".png", ".pdf", ".svg")


class Axis(NamedTuple):
  """What is varied, in words."""

  name: str
  label: str
  show: Callable[[float], str]
  drawn: str
  tick: Callable[[float], str]


def mbit(text: str) -> float:
  """A rate as `rate` lets it through, in Mbit/s."""
  return _machines.network(text)[0] * 8 / 1e6


def _rate(at: float) -> str:
  return f"{at / 1e3:.3g} Gbit/s" if at >= 1e3 else f"{at:.3g} Mbit/s"


_whole = "{:.0f}".format
HOSTS = Axis("hosts", "hosts", _whole, "hosts", _whole)
LINKS = Axis("links", "link", _rate, "link, Gbit/s", lambda at: f"{at / 1e3:g}")
BATCH = Axis("batch", "batch", _whole, "times the recorded batch", _whole)


def add_sweeps(command: argparse.ArgumentParser) -> None:
  """Hosts, links and batches to predict for."""
  group = command.add_argument_group("what is varied, one at a time")
  group.add_argument(
    "--over-hosts",
    type=arguments.several,
    nargs="+",
    default=[2, 4, 8, 16, 32, 64],
    metavar="N",
    help="by default 2 to 64",
  )
  group.add_argument(
    "--over-links",
    type=arguments.rate,
    nargs="+",
    default=["1gbit", "10gbit", "25gbit", "100gbit", "400gbit"],
    metavar="RATE",
    help="by default 1gbit to 400gbit",
  )
  group.add_argument(
    "--over-batch",
    type=arguments.positive,
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
  """A file that can be drawn, found out before the work."""
  path = arguments.output(text)
  if path.suffix not in _PICTURES:
    raise argparse.ArgumentTypeError(
      f"must end in one of {', '.join(_PICTURES)}, got {text!r}"
    )
  return path


def run(options: argparse.Namespace) -> None:
  """Predicts every sweep, prints, draws and saves."""
  if options.plot:
    from zenjax._planner import _whatif_plot  # A second to import.

    _whatif_plot.require()
  machine = arguments.topology(options)
  recorded = arguments.recorded(options)
  settings = arguments.settings(options)
  base = _whatif.Base(
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
    hosts: _whatif.over_hosts(base, options.over_hosts),
    LINKS: _whatif.over_links(base, rates),
    BATCH: _whatif.over_batch(base, options.over_batch),
  }
  title = (
    f"{machine.devices} devices on {machine.name}, {options.batch} x batch"
  )
  print(f"varied from {title}")
  for axis, sweep in sweeps.items():
    print("\n" + table(axis, sweep))
  for note in arguments.notes(options, recorded, machine):
    print(note)
  # All is made before any of it is written: an interrupt leaves no half.
  files = {}
  if options.plot:
    from zenjax._planner import _whatif_plot

    kind = options.plot.suffix[1:]
    files[options.plot] = _whatif_plot.drawn(kind, sweeps, title)
  if options.json:
    document = {axis.name: dataclasses.asdict(s) for axis, s in sweeps.items()}
    files[options.json] = (json.dumps(document, indent=1) + "\n").encode()
  for path, content in files.items():
    path.write_bytes(content)
    print(f"saved {path}")


def table(axis: Axis, sweep: Sweep) -> str:
  """Every point, and where the better choice changes."""
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
  """In words: from where on which choice is better."""
  better = {True: "the plan", False: "plain pmean"}
  if not sweep.turns:
    low, high = map(axis.show, sweep.searched)
    only = better[sweep.points[0].pays]
    return [f"{only} is the better choice from {low} to {high}"]
  return [
    f"from {axis.show(turn.at)} on {better[turn.pays]} is the better choice"
    for turn in sweep.turns
  ]

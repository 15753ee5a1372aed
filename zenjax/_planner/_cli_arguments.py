"""Arguments that commands share, and the machine that they describe."""

import argparse
import math
import pathlib

from zenjax import traces
from zenjax._link import Work
from zenjax._planner import _from_trace
from zenjax._planner import _machines
from zenjax._planner._from_trace import Recorded
from zenjax._planner._topology import Topology


def add_model(
  command: argparse.ArgumentParser, compute_required: bool = False
) -> None:
  """What is trained, and how long it takes alone."""
  group = command.add_argument_group("the model")
  group.add_argument(
    "--trace",
    type=pathlib.Path,
    required=True,
    metavar="DIR",
    help="that zenjax.record wrote",
  )
  group.add_argument(
    "--compute-seconds",
    type=positive_number if compute_required else number,
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
  """Where it is to train."""
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
    choices=tuple(_machines.MACHINES),
    metavar="NAME",
    help=", ".join(_machines.MACHINES),
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
  """A file for what a command found."""
  command.add_argument("--json", type=output, metavar="FILE", help=what)


def topology(options: argparse.Namespace) -> Topology:
  """The machine that the options describe.

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


def recorded(options: argparse.Namespace) -> Recorded:
  """What the trace tells; raises `ValueError` where it is none."""
  return _from_trace.recorded(traces.read(options.trace))


def settings(options: argparse.Namespace) -> dict:
  """Of a `Question`, beside model, machine and batch."""
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
  """What a reader must know of the predictions."""
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


def positive(text: str) -> int:
  """1 or more."""
  found = _whole(text)
  if found < 1:
    raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
  return found


def several(text: str) -> int:
  """2 or more."""
  found = _whole(text)
  if found < 2:
    raise argparse.ArgumentTypeError(
      f"must be at least 2, for one device has no link, got {text}"
    )
  return found


def _whole(text: str) -> int:
  try:
    return int(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(
      f"must be a whole number, got {text!r}"
    ) from error


def number(text: str) -> float:
  """Finite, and not negative."""
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
  """Finite, and more than nothing."""
  found = number(text)
  if not found:
    raise argparse.ArgumentTypeError(f"must be positive, got {text}")
  return found


def rate(text: str) -> str:
  """Of a link, as `Topology.network` takes it."""
  try:
    _machines.network(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(
      f"must be a positive number and gbit or mbit, say 100gbit, got {text!r}"
    ) from error
  return text


def output(text: str) -> pathlib.Path:
  """A file that can be written, found out before the work."""
  path = pathlib.Path(text)
  if path.is_dir() or not path.resolve().parent.is_dir():
    raise argparse.ArgumentTypeError(
      f"must name a file in a directory that is there, got {text!r}"
    )
  return path

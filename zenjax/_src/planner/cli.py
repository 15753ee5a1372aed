"""The command line: exits with 2 if the input is wrong.

It imports no JAX: help and refused options are there at once.
"""

import argparse
from collections.abc import Sequence
import math
import pathlib
import sys

from zenjax._src.machine import machines
from zenjax._src.machine import rates

_INTERRUPTED = 130
_PICTURES = (".png", ".pdf", ".svg")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: Arguments; by default those of the shell.

  Returns:
    The exit status; bad input exits with 2 by itself.
  """
  options = _parser().parse_args(argv)
  try:
    from zenjax._src.planner import commands  # Imports JAX.

    commands.RUN[options.command](options)
  except (ImportError, OSError, ValueError) as error:
    options.parser.exit(2, f"{options.parser.prog}: error: {error}\n")
  except KeyboardInterrupt:
    print("Interrupted: nothing was saved.", file=sys.stderr)
    return _INTERRUPTED
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="zenjax",
    description="Plans how gradients travel, from steps that were recorded.",
    epilog="`zenjax.planner.record` writes a trace, which is a directory. In a"
    " program `zenjax.planner.plan` plans a model without one.",
  )
  commands = parser.add_subparsers(
    dest="command", required=True, metavar="COMMAND"
  )
  plan = commands.add_parser(
    "plan",
    help="how each gradient should travel on a machine, and what it gains",
    description="Chooses for each gradient of a recorded run how it should"
    " travel on a machine, and says what a step gains.",
    epilog="for example: zenjax plan --trace DIR --hosts 64 --link"
    " 100gbit --machine h100 --compute-seconds 0.12",
  )
  add_model(plan)
  add_machine(plan)
  add_output(plan, "the plan, for zenjax.planner.Plan.from_json")
  plan.set_defaults(parser=plan)

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
  links.set_defaults(parser=links)

  whatif = commands.add_parser(
    "whatif",
    help="step time against hosts, link rates and batch size",
    description="Predicts a step's time, planned and with plain pmean, against"
    " hosts, link rates and batch size, and where pmean becomes the better"
    " choice. The scaling factor is a step's time without any exchange over"
    " that with it: 1 where devices train as fast together as alone.",
    epilog="for example: zenjax whatif --trace DIR --hosts 16 --link"
    " 25gbit --machine h100 --compute-seconds 0.12 --plot whatif.png",
  )
  add_model(whatif, compute_required=True)
  add_machine(whatif)
  add_sweeps(whatif)
  add_output(whatif, "all of it")
  whatif.set_defaults(parser=whatif)
  return parser


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
    default=[1e9, 10e9, 25e9, 100e9, 400e9],
    metavar="RATE",
    help="of each network card, by default 1 to 400 Gbit/s",
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
    " work counts. A host has one network card unless --ports says more.",
  )
  group.add_argument(
    "--hosts", type=positive, metavar="N", help="joined by --link"
  )
  group.add_argument(
    "--link",
    type=rate,
    metavar="RATE",
    help="line rate of a network card: 100gbit, '25 Gbit/s', 25Gbps, 3.1GB/s or"
    " 25e9 bits a second",
  )
  group.add_argument(
    "--ports",
    type=positive,
    metavar="N",
    help="network cards of a host, which its devices share; by default 1",
  )
  group.add_argument(
    "--machine",
    choices=tuple(machines.MACHINES),
    metavar="NAME",
    help=", ".join(machines.MACHINES),
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


def rate(text: str) -> float:
  """Parses a line rate into bits a second."""
  try:
    return rates.bits_a_second(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def output(text: str) -> pathlib.Path:
  """Checks before the work that a file can be written."""
  path = pathlib.Path(text)
  if path.is_dir() or not path.resolve().parent.is_dir():
    raise argparse.ArgumentTypeError(
      f"must name a file in a directory that is there, got {text!r}"
    )
  return path

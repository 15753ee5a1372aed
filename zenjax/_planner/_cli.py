"""The command line: arguments in, a table out, 2 where the input is wrong."""

import argparse
from collections.abc import Sequence
import sys

from zenjax._planner import _cli_arguments as arguments
from zenjax._planner import _cli_links
from zenjax._planner import _cli_plan
from zenjax._planner import _cli_whatif

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: By default what the shell gave.

  Returns:
    What the process exits with; bad input exits with 2 by itself.
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
    epilog="A trace is a directory that `zenjax.record` wrote. Inside a program"
    " `zenjax.plan` plans a model without one.",
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
  arguments.add_model(plan)
  arguments.add_machine(plan)
  arguments.add_output(plan, "the plan, for zenjax.Plan.from_json")
  plan.set_defaults(run=_cli_plan.run, parser=plan)

  links = commands.add_parser(
    "links",
    help="what the links between the devices at hand give",
    description="Times collectives and local work on the devices that JAX sees,"
    " which must be idle, and fits a line to each.",
  )
  links.add_argument(
    "--devices",
    type=arguments.several,
    metavar="N",
    help="the first N; on CPU so many are made. By default all",
  )
  links.add_argument(
    "--repeats",
    type=arguments.positive,
    default=7,
    metavar="N",
    help="how often each is timed, by default 7",
  )
  arguments.add_output(links, "the machine, for --topology")
  links.set_defaults(run=_cli_links.run, parser=links)

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
  arguments.add_model(whatif, compute_required=True)
  arguments.add_machine(whatif)
  _cli_whatif.add_sweeps(whatif)
  arguments.add_output(whatif, "all of it")
  whatif.set_defaults(run=_cli_whatif.run, parser=whatif)
  return parser

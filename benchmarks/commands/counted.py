"""What commands are asked for that count or compute and time no device."""

import pathlib

from benchmarks import workloads
from benchmarks.commands import arguments
from benchmarks.commands.arguments import Commands


def add(commands: Commands) -> None:
  """Adds them."""
  _sparsity(commands)
  _growth(commands)
  _utility(commands)
  _search(commands)


def _sparsity(commands: Commands) -> None:
  sparsity = commands.add_parser(
    "sparsity", help="which rows steps touch: overlap, skew, balance, bytes"
  )
  sparsity.add_argument(
    "source",
    metavar="TRACE_OR_WORKLOAD",
    help="a directory that `train_lm.py --trace` wrote, or a workload:"
    f" {', '.join(workloads.ALL_NAMES)}",
  )
  sparsity.add_argument(
    "--devices",
    nargs="+",
    type=arguments.several,
    default=[2, 4, 8, 16, 32, 64, 128],
    metavar="N",
    help="what to count for; a trace of fewer devices pools its steps",
  )
  sparsity.add_argument(
    "--steps",
    type=arguments.positive,
    help="all of a trace and 8 of a workload by default",
  )
  sparsity.add_argument(
    "--seed",
    type=arguments.natural,
    default=0,
    help="of a workload's ids and of hashes",
  )
  sparsity.add_argument(
    "--full-size",
    action="store_true",
    help="the published model's table instead of one that fits two cores",
  )
  sparsity.add_argument("--plot", type=pathlib.Path, metavar="FILE")
  sparsity.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _growth(commands: Commands) -> None:
  growth = commands.add_parser(
    "growth", help="unions of 16 times as many devices, predicted and real"
  )
  growth.add_argument(
    "--devices", type=arguments.several, default=4, help="of the recorded steps"
  )
  growth.add_argument(
    "--steps",
    type=arguments.positive,
    default=32,
    help="recorded, by default 32",
  )
  growth.add_argument(
    "--tokens",
    type=arguments.positive,
    default=4096,
    help="of a device and step",
  )
  growth.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _utility(commands: Commands) -> None:
  utility = commands.add_parser(
    "utility", help="set-ups in which compressed gradients pay, by formula"
  )
  utility.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _search(commands: Commands) -> None:
  parser = commands.add_parser(
    "search", help="the planner's search against all, Espresso and MergeComp"
  )
  parser.add_argument(
    "--instances",
    type=arguments.positive,
    default=200,
    help="small ones of each kind, drawn; by default 200",
  )
  parser.add_argument(
    "--tensors",
    type=arguments.several,
    default=300,
    help="of the large ones, by default 300",
  )
  parser.add_argument(
    "--repeats",
    type=arguments.positive,
    default=20,
    help="timed, by default 20",
  )
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")

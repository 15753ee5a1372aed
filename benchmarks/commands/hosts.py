"""What commands between hosts are asked for, and of what those measured."""

import pathlib

from benchmarks import netns
from benchmarks.commands import arguments
from benchmarks.commands.arguments import Commands
from benchmarks.groups import command as groups
from benchmarks.network import command as network
from benchmarks.planned import command as planned


def add(commands: Commands) -> None:
  """Adds them."""
  _sparsified(commands)
  _network(commands)
  _planned(commands)
  _groups(commands)
  _predict(commands)


def _sparsified(commands: Commands) -> None:
  parser = commands.add_parser(
    "sparsified", help="steps of a dense model between hosts, sparsified or not"
  )
  parser.add_argument(
    "--width",
    type=arguments.positive,
    default=1840,
    help="of three square layers, by default 1840: 10 million parameters",
  )
  parser.add_argument(
    "--batch",
    type=arguments.positive,
    default=32,
    help="of a host, by default 32",
  )
  parser.add_argument(
    "--density",
    type=arguments.share,
    default=0.01,
    help="that exdyna and micro send, by default 0.01",
  )
  parser.add_argument(
    "--top",
    type=arguments.share,
    default=0.05,
    help="that every host selects by magnitude, by default 0.05",
  )
  parser.add_argument(
    "--hosts", type=int, choices=range(2, 9), default=4, help="by default 4"
  )
  parser.add_argument(
    "--rate",
    choices=tuple(netns.RATES),
    default="200mbit",
    help="of their links, by default 200mbit",
  )
  arguments.add_loopback(parser)
  parser.add_argument(
    "--variants",
    nargs="+",
    metavar="NAME",
    help="of none, pmean, exdyna, micro, 'top zen', 'top zen, slots'; by"
    " default all",
  )
  parser.set_defaults(devices=8)  # Idle: hosts have their own.
  arguments.add_common(parser, repeats=9)


def _network(commands: Commands) -> None:
  parser = commands.add_parser(
    "network", help="every scheme over links of a known rate, hosts and all"
  )
  network.add_arguments(parser)
  parser.add_argument(
    "--repeats",
    type=arguments.positive,
    default=5,
    help="timed rounds, by default 5",
  )
  arguments.add_batches(parser, 2)
  parser.add_argument(
    "--json",
    type=pathlib.Path,
    metavar="FILE",
    help="what to save to, and to go on from",
  )
  parser.add_argument(
    "--plot",
    type=pathlib.Path,
    metavar="FILE",
    help="several figures: FILE-hosts.png, FILE-density.png, FILE-speed.png",
  )


def _planned(commands: Commands) -> None:
  parser = commands.add_parser(
    "planned", help="plans and other ways, predicted and measured between hosts"
  )
  planned.add_arguments(parser)
  parser.add_argument(
    "--repeats",
    type=arguments.positive,
    default=7,
    help="timed rounds, by default 7",
  )
  arguments.add_batches(parser, 4)
  parser.add_argument(
    "--json",
    type=pathlib.Path,
    metavar="FILE",
    help="what to save to, and to go on from",
  )


def _groups(commands: Commands) -> None:
  parser = commands.add_parser(
    "groups", help="a compressed CNN's gradients in one exchange, few or many"
  )
  groups.add_arguments(parser)
  parser.add_argument(
    "--width",
    type=arguments.positive,
    default=32,
    help="of train_cnn.py, by default 32",
  )
  parser.add_argument(
    "--batch",
    type=arguments.positive,
    default=16,
    help="of a host, by default 16",
  )
  parser.add_argument(
    "--image-size", type=arguments.positive, default=16, help="by default 16"
  )
  parser.add_argument(
    "--density",
    type=arguments.share,
    default=0.01,
    help="that every host selects by magnitude, by default 0.01",
  )
  parser.add_argument(
    "--least",
    type=arguments.positive,
    default=1024,
    help="elements of a leaf that is compressed, by default 1024",
  )
  parser.add_argument(
    "--repeats",
    type=arguments.positive,
    default=15,
    help="timed rounds, by default 15",
  )
  arguments.add_batches(parser, 4)
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _predict(commands: Commands) -> None:
  parser = commands.add_parser(
    "predict", help="what the formulas say beside what `network` has measured"
  )
  parser.add_argument(
    "file",
    type=pathlib.Path,
    metavar="FILE",
    help="that `network --json` wrote",
  )

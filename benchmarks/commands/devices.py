"""What commands on the devices of this process are asked for."""

import pathlib

from benchmarks import netns
from benchmarks import workloads
from benchmarks.commands import arguments
from benchmarks.commands.arguments import Commands


def add(commands: Commands) -> None:
  """Adds them."""
  _sync(commands)
  _step(commands)
  _local(commands)
  _select(commands)
  _kernels(commands)
  _gpu(commands)
  _memory(commands)


def _sync(commands: Commands) -> None:
  sync = commands.add_parser(
    "sync", help="a training step on several devices, zenjax against pmean"
  )
  sync.add_argument(
    "--workloads",
    nargs="+",
    choices=workloads.ALL_NAMES,
    metavar="NAME",
    help=f"which tables; by default: {', '.join(workloads.NAMES)}; further"
    f" {', '.join(workloads.SWEEP)}",
  )
  sync.add_argument("--devices", type=arguments.positive, default=8)
  sync.add_argument(
    "--pinned",
    action="store_true",
    help="also with capacities pinned to what an unpinned run advises",
  )
  sync.add_argument(
    "--full-size",
    action="store_true",
    help="the published models' tables instead of ones that fit two cores",
  )
  arguments.add_batches(sync, 4)
  arguments.add_variants(sync)
  arguments.add_common(sync, repeats=15)


def _step(commands: Commands) -> None:
  step = commands.add_parser(
    "step", help="whole training steps, dense gradients against rows"
  )
  step.add_argument(
    "--rows",
    nargs="+",
    type=arguments.positive,
    default=[100_000, 1_000_000],
    metavar="R",
    help="of the tables, as many as fit in memory together; by default"
    " 100000 1000000",
  )
  step.add_argument("--width", type=arguments.positive, default=16)
  step.add_argument(
    "--look-ups",
    type=arguments.positive,
    default=4096,
    help="of a device and step",
  )
  step.add_argument("--devices", type=arguments.positive, default=8)
  step.add_argument(
    "--hosts",
    type=int,
    choices=range(2, 9),
    help="so many processes of one device each, in namespaces joined by links",
  )
  step.add_argument(
    "--rate",
    choices=tuple(netns.RATES),
    help="of the links of --hosts; by default 1gbit",
  )
  step.add_argument(
    "--loopback",
    action="store_true",
    help="--hosts are processes on 127.0.0.1: no root, no limit",
  )
  step.add_argument(
    "--optimizer",
    choices=("adam", "adagrad", "row_adagrad", "sgd"),
    default="adam",
  )
  step.add_argument(
    "--variants",
    nargs="+",
    metavar="NAME",
    help="by default all: dense (pmean), zen (of dense gradients), rows,"
    " rows-pinned, owners (owner_update)",
  )
  arguments.add_batches(step, 4)
  arguments.add_common(step, repeats=15)


def _local(commands: Commands) -> None:
  local = commands.add_parser(
    "local", help="mask, pack, select and gather on one device"
  )
  local.set_defaults(devices=1)
  arguments.add_common(local, repeats=25)


def _select(commands: Commands) -> None:
  select = commands.add_parser(
    "select", help="accumulate, threshold, compact: a sparsifier on one device"
  )
  select.add_argument("--elements", type=arguments.positive, default=10_000_000)
  select.add_argument(
    "--density", type=arguments.share, default=0.001, help="by default 0.001"
  )
  select.add_argument(
    "--parts",
    nargs="+",
    type=arguments.positive,
    default=[1, 8],
    metavar="N",
    help="devices that share the search, of which one is measured; by default"
    " 1 8",
  )
  select.set_defaults(devices=1)
  arguments.add_common(select, repeats=25)


def _kernels(commands: Commands) -> None:
  kernels = commands.add_parser(
    "kernels", help="every local operation by XLA and by hand-written kernels"
  )
  kernels.add_argument("--rows", type=arguments.positive, default=4_194_304)
  kernels.add_argument("--width", type=arguments.positive, default=128)
  kernels.add_argument(
    "--density", type=arguments.share, default=0.01, help="of nonzero rows"
  )
  kernels.set_defaults(devices=1)
  arguments.add_common(kernels, repeats=25)


def _gpu(commands: Commands) -> None:
  gpu = commands.add_parser(
    "gpu", help="everything that one GPU can show; without one, answers alone"
  )
  by_default = "by default {} on a GPU, {} without one"
  gpu.add_argument(
    "--rows",
    type=arguments.positive,
    help=f"of a device; {by_default.format('4194304', '4000')}",
  )
  gpu.add_argument("--width", type=arguments.positive, help="by default 128")
  gpu.add_argument(
    "--density",
    type=arguments.share,
    help=f"of nonzero rows; {by_default.format('0.01', '0.02')}",
  )
  gpu.add_argument(
    "--repeats", type=arguments.positive, default=25, help="timed rounds"
  )
  gpu.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _memory(commands: Commands) -> None:
  memory = commands.add_parser(
    "memory", help="temporary memory of a step, compiled for CPU, TPU and GPU"
  )
  memory.add_argument(
    "--targets",
    nargs="+",
    choices=("cpu", "tpu-v5e", "gpu-h200"),
    metavar="NAME",
    help="all by default: cpu, tpu-v5e, gpu-h200",
  )
  memory.set_defaults(devices=8)
  arguments.add_variants(memory)
  arguments.add_common(memory, repeats=0)

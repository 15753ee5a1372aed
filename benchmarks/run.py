"""`python -m benchmarks.run COMMAND`; `README.md` describes each command."""

import argparse
from collections.abc import Sequence
import contextlib
import ctypes
import importlib
import os
import pathlib
import sys

# Before JAX starts. With an accelerator: JAX_PLATFORMS=cuda python -m ...
if sys.argv[1:2] != ["gpu"]:  # It takes the GPU that is there.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks import harness
from benchmarks import netns
from benchmarks import record
from benchmarks import table
from benchmarks import workloads
from benchmarks.network import command as network


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one benchmark; returns 1 if an answer was wrong, 130 on Ctrl-C."""
  parser = _parser()
  options = parser.parse_args(arguments)
  if options.command in ("growth", "sparsity", "utility"):
    return _analyze(parser, options)
  if options.command == "network":
    return _measure_network(parser, options)
  if options.command == "planned":
    return _measure_planned(parser, options)
  if options.command == "groups":
    return _measure_groups(parser, options)
  if options.command == "predict":
    return _predict(parser, options)
  if options.command == "gpu":
    return _measure_gpu(parser, options)
  if options.command == "search":
    return _search(options)
  jax.config.update("jax_num_cpu_devices", options.devices)
  if options.keep_memory:
    _keep_memory()
  # Imported when JAX is configured: it starts at the first array.
  subject = importlib.import_module(f"benchmarks.{options.command}")
  with contextlib.ExitStack() as stack:
    try:
      if options.command == "step" and options.hosts:
        from benchmarks import step_links

        cases = stack.enter_context(step_links.cases(options))
      elif options.command == "sparsified":
        cases = stack.enter_context(subject.cases(options))
      else:
        cases = subject.cases(options)
    except (RuntimeError, ValueError) as error:
      parser.error(str(error))
    results, complete = harness.measure(cases, repeats=options.repeats)
  table.show(_title(options), results, subject.COLUMNS)
  if not complete:
    print("Interrupted: this is what was measured until then.")
  _save(options, results, complete)
  if not complete:
    return 130
  return int(any(result.wrong for result in results))


def _analyze(parser, options) -> int:
  """Counts or computes, times nothing: what needs no devices."""
  subject = importlib.import_module(f"benchmarks.{options.command}")
  try:
    return subject.run(options)
  except ValueError as error:
    parser.error(str(error))
  except KeyboardInterrupt:
    print("Interrupted: nothing was saved.")
  return 130


def _measure_network(parser, options) -> int:
  """Has processes of its own, and no devices in this one."""
  try:
    job = network.Job(options)
  except (RuntimeError, ValueError) as error:
    return parser.error(str(error))
  return job.run()


def _measure_planned(parser, options) -> int:
  """Has processes of its own, as `network`."""
  from benchmarks.planned import command

  try:
    return command.run(options)
  except (RuntimeError, ValueError) as error:
    return parser.error(str(error))


def _measure_groups(parser, options) -> int:
  """Has processes of its own, as `network`."""
  from benchmarks.groups import command

  try:
    return command.run(options)
  except (RuntimeError, ValueError) as error:
    return parser.error(str(error))


def _measure_gpu(parser, options) -> int:
  """Tells more than a table."""
  from benchmarks import gpu

  try:
    return gpu.run(options)
  except ValueError as error:
    return parser.error(str(error))


def _predict(parser, options) -> int:
  """Reads what `network` has measured; measures nothing itself."""
  from benchmarks.network import predict_show

  try:
    return predict_show.run(options.file)
  except ValueError as error:
    return parser.error(str(error))


def _search(options) -> int:
  """Plans drawn steps; no device takes part."""
  from benchmarks import search

  try:
    return search.run(options)
  except KeyboardInterrupt:
    print("Interrupted: nothing was saved.")
  return 130


def _keep_memory():
  """Has the C library keep what is freed instead of unmapping it."""
  # glibc maps every allocation above 32 MB anew, and gives back a thread's heap
  # of 64 MB with the one buffer in it: the first write to each page is a fault,
  # and on CPU devices those can cost more than the step. One heap for all
  # threads, which only grows, keeps its pages.
  mmap_max, trim_threshold, arena_max = -4, -1, -8  # malloc.h
  libc = ctypes.CDLL(None)
  wanted = ((mmap_max, 0), (trim_threshold, -1), (arena_max, 1))
  if not all(libc.mallopt(*setting) for setting in wanted):
    raise RuntimeError("`--keep-memory` needs glibc's mallopt; leave it out.")


def _save(options, results, complete):
  if options.json:
    settings = record.settings(options)
    record.save_json(options.json, results, options=settings, complete=complete)
    print(f"Saved {options.json}")
  if options.plot:
    from benchmarks import plot  # matplotlib takes a second to import.

    plot.save_plot(options.plot, results)
    print(f"Saved {options.plot}")


def _title(options):
  device = jax.devices()[0]
  count = vars(options).get("hosts") or options.devices
  return (
    f"{options.command}: {count} x {device.device_kind},"
    f" {os.cpu_count()} cores, JAX {jax.__version__}"
  )


def _parser():
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.run",
    description="Benchmarks of zenjax: answer first, then time.",
    epilog="benchmarks/README.md defines every column.",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  _add_sync(commands)
  _add_step(commands)
  _add_local(commands)
  _add_select(commands)
  _add_sparsified(commands)
  _add_kernels(commands)
  _add_gpu(commands)
  _add_memory(commands)
  _add_sparsity(commands)
  _add_growth(commands)
  _add_utility(commands)
  _add_network(commands)
  _add_planned(commands)
  _add_groups(commands)
  _add_predict(commands)
  _add_search(commands)
  return parser


def _add_sync(commands):
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
  sync.add_argument("--devices", type=_positive, default=8)
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
  _add_batches(sync, 4)
  _add_variants(sync)
  _add_common(sync, repeats=15)


def _add_step(commands):
  step = commands.add_parser(
    "step", help="whole training steps, dense gradients against rows"
  )
  step.add_argument(
    "--rows",
    nargs="+",
    type=_positive,
    default=[100_000, 1_000_000],
    metavar="R",
    help="of the tables, as many as fit in memory together; by default"
    " 100000 1000000",
  )
  step.add_argument("--width", type=_positive, default=16)
  step.add_argument(
    "--look-ups", type=_positive, default=4096, help="of a device and step"
  )
  step.add_argument("--devices", type=_positive, default=8)
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
  _add_batches(step, 4)
  _add_common(step, repeats=15)


def _add_local(commands):
  local = commands.add_parser(
    "local", help="mask, pack, select and gather on one device"
  )
  local.set_defaults(devices=1)
  _add_common(local, repeats=25)


def _add_select(commands):
  select = commands.add_parser(
    "select", help="accumulate, threshold, compact: a sparsifier on one device"
  )
  select.add_argument("--elements", type=_positive, default=10_000_000)
  select.add_argument(
    "--density", type=_share, default=0.001, help="by default 0.001"
  )
  select.add_argument(
    "--parts",
    nargs="+",
    type=_positive,
    default=[1, 8],
    metavar="N",
    help="devices that share the search, of which one is measured; by default"
    " 1 8",
  )
  select.set_defaults(devices=1)
  _add_common(select, repeats=25)


def _add_sparsified(commands):
  parser = commands.add_parser(
    "sparsified", help="steps of a dense model between hosts, sparsified or not"
  )
  parser.add_argument(
    "--width",
    type=_positive,
    default=1840,
    help="of three square layers, by default 1840: 10 million parameters",
  )
  parser.add_argument(
    "--batch", type=_positive, default=32, help="of a host, by default 32"
  )
  parser.add_argument(
    "--density",
    type=_share,
    default=0.01,
    help="that exdyna and micro send, by default 0.01",
  )
  parser.add_argument(
    "--top",
    type=_share,
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
  parser.add_argument(
    "--loopback",
    action="store_true",
    help="hosts are processes on 127.0.0.1: no root, no limit",
  )
  parser.add_argument(
    "--variants",
    nargs="+",
    metavar="NAME",
    help="of none, pmean, exdyna, micro, 'top zen', 'top zen, slots'; by"
    " default all",
  )
  parser.set_defaults(devices=8)  # Idle: hosts have their own.
  _add_common(parser, repeats=9)


def _add_kernels(commands):
  kernels = commands.add_parser(
    "kernels", help="every local operation by XLA and by hand-written kernels"
  )
  kernels.add_argument("--rows", type=_positive, default=4_194_304)
  kernels.add_argument("--width", type=_positive, default=128)
  kernels.add_argument(
    "--density", type=_share, default=0.01, help="of nonzero rows"
  )
  kernels.set_defaults(devices=1)
  _add_common(kernels, repeats=25)


def _add_gpu(commands):
  gpu = commands.add_parser(
    "gpu", help="everything that one GPU can show; without one, answers alone"
  )
  by_default = "by default {} on a GPU, {} without one"
  gpu.add_argument(
    "--rows",
    type=_positive,
    help=f"of a device; {by_default.format('4194304', '4000')}",
  )
  gpu.add_argument("--width", type=_positive, help="by default 128")
  gpu.add_argument(
    "--density",
    type=_share,
    help=f"of nonzero rows; {by_default.format('0.01', '0.02')}",
  )
  gpu.add_argument("--repeats", type=_positive, default=25, help="timed rounds")
  gpu.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _add_memory(commands):
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
  _add_variants(memory)
  _add_common(memory, repeats=0)


def _add_sparsity(commands):
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
    type=_several,
    default=[2, 4, 8, 16, 32, 64, 128],
    metavar="N",
    help="what to count for; a trace of fewer devices pools its steps",
  )
  sparsity.add_argument(
    "--steps",
    type=_positive,
    help="all of a trace and 8 of a workload by default",
  )
  sparsity.add_argument(
    "--seed", type=_natural, default=0, help="of a workload's ids and of hashes"
  )
  sparsity.add_argument(
    "--full-size",
    action="store_true",
    help="the published model's table instead of one that fits two cores",
  )
  sparsity.add_argument("--plot", type=pathlib.Path, metavar="FILE")
  sparsity.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _add_growth(commands):
  growth = commands.add_parser(
    "growth", help="unions of 16 times as many devices, predicted and real"
  )
  growth.add_argument(
    "--devices", type=_several, default=4, help="of the recorded steps"
  )
  growth.add_argument(
    "--steps", type=_positive, default=32, help="recorded, by default 32"
  )
  growth.add_argument(
    "--tokens", type=_positive, default=4096, help="of a device and step"
  )
  growth.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _add_utility(commands):
  utility = commands.add_parser(
    "utility", help="set-ups in which compressed gradients pay, by formula"
  )
  utility.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _add_predict(commands):
  parser = commands.add_parser(
    "predict", help="what the formulas say beside what `network` has measured"
  )
  parser.add_argument(
    "file",
    type=pathlib.Path,
    metavar="FILE",
    help="that `network --json` wrote",
  )


def _add_search(commands):
  parser = commands.add_parser(
    "search", help="the planner's search against all, Espresso and MergeComp"
  )
  parser.add_argument(
    "--instances",
    type=_positive,
    default=200,
    help="small ones of each kind, drawn; by default 200",
  )
  parser.add_argument(
    "--tensors",
    type=_several,
    default=300,
    help="of the large ones, by default 300",
  )
  parser.add_argument(
    "--repeats", type=_positive, default=20, help="timed, by default 20"
  )
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _add_network(commands):
  parser = commands.add_parser(
    "network", help="every scheme over links of a known rate, hosts and all"
  )
  network.add_arguments(parser)
  parser.add_argument(
    "--repeats", type=_positive, default=5, help="timed rounds, by default 5"
  )
  _add_batches(parser, 2)
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


def _add_planned(commands):
  from benchmarks.planned import command

  parser = commands.add_parser(
    "planned", help="plans and other ways, predicted and measured between hosts"
  )
  command.add_arguments(parser)
  parser.add_argument(
    "--repeats", type=_positive, default=7, help="timed rounds, by default 7"
  )
  _add_batches(parser, 4)
  parser.add_argument(
    "--json",
    type=pathlib.Path,
    metavar="FILE",
    help="what to save to, and to go on from",
  )


def _add_groups(commands):
  from benchmarks.groups import command

  parser = commands.add_parser(
    "groups", help="a compressed CNN's gradients in one exchange, few or many"
  )
  command.add_arguments(parser)
  parser.add_argument(
    "--width", type=_positive, default=32, help="of train_cnn.py, by default 32"
  )
  parser.add_argument(
    "--batch", type=_positive, default=16, help="of a host, by default 16"
  )
  parser.add_argument(
    "--image-size", type=_positive, default=16, help="by default 16"
  )
  parser.add_argument(
    "--density",
    type=_share,
    default=0.01,
    help="that every host selects by magnitude, by default 0.01",
  )
  parser.add_argument(
    "--least",
    type=_positive,
    default=1024,
    help="elements of a leaf that is compressed, by default 1024",
  )
  parser.add_argument(
    "--repeats", type=_positive, default=15, help="timed rounds, by default 15"
  )
  _add_batches(parser, 4)
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _add_batches(command, default):
  command.add_argument(
    "--batches",
    type=_positive,
    default=default,
    help=f"different batches that steps go through in turn, by default"
    f" {default}",
  )


def _add_variants(command):
  command.add_argument(
    "--variants",
    nargs="+",
    metavar="NAME",
    help="ways to synchronize; by default all that apply: none pmean"
    " all_gather zen zen-hash zen-columns, and with --pinned zen-pinned"
    " zen-hash-pinned zen-columns-pinned; on dense tables zen-first"
    " zen-remembered",
  )


def _add_common(command, *, repeats):
  if repeats:
    command.add_argument(
      "--repeats", type=_positive, default=repeats, help="timed rounds"
    )
    command.add_argument("--plot", type=pathlib.Path, metavar="FILE")
  else:
    command.set_defaults(repeats=0, plot=None)
  command.add_argument(
    "--keep-memory",
    action="store_true",
    help="never return freed memory to the system: no page faults in the times",
  )
  command.add_argument("--json", type=pathlib.Path, metavar="FILE")


def _positive(text):
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f"must be positive, got {text}")
  return number


def _share(text):
  number = float(text)
  if not 0 < number <= 1:
    raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
  return number


def _several(text):
  number = int(text)
  if number < 2:
    raise argparse.ArgumentTypeError(
      f"must be at least 2, for one device exchanges nothing, got {text}"
    )
  return number


def _natural(text):
  number = int(text)
  if not 0 <= number < 2**32:
    raise argparse.ArgumentTypeError(f"must be in [0, 2**32), got {text}")
  return number


if __name__ == "__main__":
  sys.exit(main())

"""`python -m benchmarks.run COMMAND`; `README.md` describes each command."""

import argparse
from collections.abc import Callable, Mapping, Sequence
import contextlib
import ctypes
import importlib
import os
import pathlib
import sys
from typing import Any, NamedTuple

# Before JAX starts. With an accelerator: JAX_PLATFORMS=cuda python -m ...
if sys.argv[1:2] != ["gpu"]:  # It takes the GPU that is there.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks import harness
from benchmarks import record
from benchmarks import table
from benchmarks import workloads
from benchmarks.campaigns.network.variants import VARIANTS
from benchmarks.testbed import netns

Options = argparse.Namespace
Flag = tuple[tuple[str, ...], dict[str, Any]]


class Refused(Exception):
  """A command cannot do what it was asked for; the message says why."""


class Command(NamedTuple):
  """A row of the table of commands.

  Attributes:
    name: On the command line.
    help: One line.
    flags: Its arguments.
    run: Does it; returns the exit status, or raises `Refused`.
    fixed: Values that other commands have flags for.
  """

  name: str
  help: str
  flags: Sequence[Flag]
  run: Callable[[Options], int]
  fixed: Mapping[str, Any] = {}


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one benchmark; returns 1 if an answer was wrong, 130 on Ctrl-C."""
  parser = _parser()
  options = parser.parse_args(arguments)
  try:
    return next(c for c in COMMANDS if c.name == options.command).run(options)
  except Refused as error:
    parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.run",
    description="Benchmarks of zenjax: answer first, then time.",
    epilog="benchmarks/README.md defines every column.",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  for command in COMMANDS:
    added = commands.add_parser(command.name, help=command.help)
    for names, settings in command.flags:
      added.add_argument(*names, **settings)
    added.set_defaults(**command.fixed)
  return parser


# --- what runs a command ----------------------------------------------------


@contextlib.contextmanager
def _refusing():
  try:
    yield
  except (RuntimeError, ValueError) as error:
    raise Refused(str(error)) from error


def _calls(module: str) -> Callable[[Options], int]:
  """Returns what has `run` of a module do everything."""

  def run(options):
    with _refusing():
      return importlib.import_module(f"benchmarks.{module}").run(options)

  return run


def _counts(module: str) -> Callable[[Options], int]:
  """Returns what does the same, and saves nothing on Ctrl-C."""

  def run(options):
    try:
      return _calls(module)(options)
    except KeyboardInterrupt:
      print("Interrupted: nothing was saved.")
    return 130

  return run


def _measures(module: str) -> Callable[[Options], int]:
  """Returns what times the `cases` of a module and shows its `COLUMNS`."""
  return lambda options: _measure(options, module)


def _measure(options: Options, module: str) -> int:
  jax.config.update("jax_num_cpu_devices", options.devices)
  if options.keep_memory:
    _keep_memory()
  # Imported when JAX is configured: it starts at the first array.
  subject = importlib.import_module(f"benchmarks.{module}")
  with contextlib.ExitStack() as stack:
    with _refusing():
      cases = subject.cases(options)
      if isinstance(cases, contextlib.AbstractContextManager):
        cases = stack.enter_context(cases)
    results, complete = harness.measure(cases, repeats=options.repeats)
  table.show(_title(options), results, subject.COLUMNS)
  if not complete:
    print("Interrupted: this is what was measured until then.")
  if options.json:
    settings = record.settings(options)
    record.save_json(options.json, results, options=settings, complete=complete)
    print(f"Saved {options.json}")
  if options.plot:
    from benchmarks import plot  # matplotlib takes a second to import.

    plot.save_plot(options.plot, results)
    print(f"Saved {options.plot}")
  if not complete:
    return 130
  return int(any(result.wrong for result in results))


def _keep_memory() -> None:
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


def _title(options: Options) -> str:
  device = jax.devices()[0]
  count = vars(options).get("hosts") or options.devices
  return (
    f"{options.command}: {count} x {device.device_kind},"
    f" {os.cpu_count()} cores, JAX {jax.__version__}"
  )


# --- values and flags -------------------------------------------------------


def _number(
  name: str, kind: type, rule: Callable[[Any], bool], words: str
) -> Callable[[str], Any]:
  """Returns a type of arguments: numbers that fulfil a rule."""

  def checked(text):
    number = kind(text)
    if not rule(number):
      raise argparse.ArgumentTypeError(f"must be {words}, got {text}")
    return number

  checked.__name__ = name  # argparse says it where `kind` refuses.
  return checked


_positive = _number("positive", int, lambda x: x >= 1, "positive")
_share = _number("share", float, lambda x: 0 < x <= 1, "in (0, 1]")
_natural = _number("natural", int, lambda x: 0 <= x < 2**32, "in [0, 2**32)")
_several = _number(
  "several",
  int,
  lambda x: x >= 2,
  "at least 2, for one device exchanges nothing",
)


def _flag(*names: str, **settings: Any) -> Flag:
  return names, settings


def _count(name: str, default: int | None, what: str) -> Flag:
  """Returns a flag of a positive number."""
  said = what if default is None else f"{what}, by default {default}"
  return _flag(name, type=_positive, default=default, help=said)


def _density(what: str, default: float, name: str = "--density") -> Flag:
  said = f"{what}, by default {default}"
  return _flag(name, type=_share, default=default, help=said)


def _file(name: str, what: str | None = None) -> Flag:
  return _flag(name, type=pathlib.Path, metavar="FILE", help=what)


def _switch(name: str, what: str) -> Flag:
  return _flag(name, action="store_true", help=what)


def _names(name: str, what: str, choices: Sequence[str] | None = None) -> Flag:
  return _flag(name, nargs="+", choices=choices, metavar="NAME", help=what)


def _hosts(what: str, **settings: Any) -> Flag:
  return _flag("--hosts", type=int, choices=range(2, 9), help=what, **settings)


def _repeats(default: int) -> Flag:
  return _count("--repeats", default, "timed rounds")


def _batches(default: int) -> Flag:
  what = "different batches that steps go through in turn"
  return _count("--batches", default, what)


_JSON, _PLOT = _file("--json"), _file("--plot")
_RESUMED = _file("--json", "what to save to, and to go on from")
_SHOW = _file("--show", "print what --json wrote there, and measure nothing")
_KEEP_MEMORY = _switch(
  "--keep-memory",
  "never return freed memory to the system: no page faults in the times",
)
_LOOPBACK = _switch(
  "--loopback", "hosts are processes on 127.0.0.1: no root, no limit"
)
_FULL_SIZE = _switch(
  "--full-size",
  "the published models' tables instead of ones that fit two cores",
)
_VARIANTS = _names(
  "--variants",
  "ways to synchronize; by default all that apply: none pmean all_gather zen"
  " zen-hash zen-columns, and with --pinned zen-pinned zen-hash-pinned"
  " zen-columns-pinned; on dense tables zen-first zen-remembered",
)
_SEVERAL_HOSTS = _hosts(
  "how many, each a testbed of its own; by default 2 4 8",
  nargs="+",
  metavar="N",
)
_RATE_NAMES = tuple(netns.RATES)


def _rates(default: str) -> Flag:
  said = f"of {', '.join(_RATE_NAMES)}; by default {default}"
  return _names("--rates", said, _RATE_NAMES)


def _timed(repeats: int) -> tuple[Flag, ...]:
  return _repeats(repeats), _PLOT, _KEEP_MEMORY, _JSON


_PLANNED = ("lm", "dlrm", "lm-rows", "dlrm-rows", "small", "small-rows")
_TARGETS = ("cpu", "tpu-v5e", "gpu-h200")

# --- the commands -----------------------------------------------------------

COMMANDS = (
  Command(
    "sync",
    "a training step on several devices, zenjax against pmean",
    (
      _names(
        "--workloads",
        f"which tables; by default: {', '.join(workloads.NAMES)}; further"
        f" {', '.join(workloads.SWEEP)}",
        workloads.ALL_NAMES,
      ),
      _count("--devices", 8, "of this machine"),
      _switch(
        "--pinned",
        "also with capacities pinned to what an unpinned run advises",
      ),
      _FULL_SIZE,
      _batches(4),
      _VARIANTS,
      *_timed(15),
    ),
    _measures("cases.sync"),
  ),
  Command(
    "step",
    "whole training steps, dense gradients against rows",
    (
      _flag(
        "--rows",
        nargs="+",
        type=_positive,
        default=[100_000, 1_000_000],
        metavar="R",
        help="of the tables, as many as fit in memory together; by default"
        " 100000 1000000",
      ),
      _count("--width", 16, "of the tables"),
      _count("--look-ups", 4096, "of a device and step"),
      _count("--devices", 8, "of this machine"),
      _hosts("so many processes of one device each, joined by links"),
      _flag(
        "--rate",
        choices=_RATE_NAMES,
        help="of the links of --hosts; by default 1gbit",
      ),
      _LOOPBACK,
      _flag(
        "--optimizer",
        choices=("adam", "adagrad", "row_adagrad", "sgd"),
        default="adam",
      ),
      _names(
        "--variants",
        "by default all: dense (pmean), zen (of dense gradients), rows,"
        " rows-pinned, owners (owner_update)",
      ),
      _batches(4),
      *_timed(15),
    ),
    lambda options: _measure(
      options, "campaigns.step_links" if options.hosts else "cases.step"
    ),
  ),
  Command(
    "local",
    "mask, pack, select and gather on one device",
    _timed(25),
    _measures("cases.local"),
    {"devices": 1},
  ),
  Command(
    "select",
    "accumulate, threshold, compact: a sparsifier on one device",
    (
      _count("--elements", 10_000_000, "of the gradient"),
      _density("to select", 0.001),
      _flag(
        "--parts",
        nargs="+",
        type=_positive,
        default=[1, 8],
        metavar="N",
        help="devices that share the search, of which one is measured; by"
        " default 1 8",
      ),
      *_timed(25),
    ),
    _measures("cases.select"),
    {"devices": 1},
  ),
  Command(
    "kernels",
    "every local operation by XLA and by hand-written kernels",
    (
      _count("--rows", 4_194_304, "of the table"),
      _count("--width", 128, "of the table"),
      _density("of nonzero rows", 0.01),
      *_timed(25),
    ),
    _measures("cases.kernels"),
    {"devices": 1},
  ),
  Command(
    "gpu",
    "everything that one GPU can show; without one, answers alone",
    (
      _count("--rows", None, "by default 4194304 on a GPU, 4000 without one"),
      _count("--width", None, "by default 128"),
      _flag(
        "--density",
        type=_share,
        help="of nonzero rows; by default 0.01 on a GPU, 0.02 without one",
      ),
      _repeats(25),
      _JSON,
    ),
    _calls("cases.gpu"),
  ),
  Command(
    "memory",
    "temporary memory of a step, compiled for CPU, TPU and GPU",
    (
      _names("--targets", f"all by default: {', '.join(_TARGETS)}", _TARGETS),
      _VARIANTS,
      _KEEP_MEMORY,
      _JSON,
    ),
    _measures("cases.memory"),
    {"devices": 8, "repeats": 0, "plot": None},
  ),
  Command(
    "sparsified",
    "steps of a dense model between hosts, sparsified or not",
    (
      _count("--width", 1840, "of three square layers: 10 million parameters"),
      _count("--batch", 32, "of a host"),
      _density("that exdyna and micro send", 0.01),
      _density("that every host selects by magnitude", 0.05, "--top"),
      _hosts("by default 4", default=4),
      _flag(
        "--rate",
        choices=_RATE_NAMES,
        default="200mbit",
        help="of their links, by default 200mbit",
      ),
      _LOOPBACK,
      _names(
        "--variants",
        "of none, pmean, exdyna, micro, 'top zen', 'top zen, slots'; by"
        " default all",
      ),
      *_timed(9),
    ),
    _measures("campaigns.sparsified"),
    {"devices": 8},  # Idle: hosts have their own.
  ),
  Command(
    "network",
    "every scheme over links of a known rate, hosts and all",
    (
      _names(
        "--workloads",
        f"of {', '.join(workloads.ALL_NAMES)}; by default those with rows to"
        " leave out, but for the sweep",
        workloads.ALL_NAMES,
      ),
      _names(
        "--variants",
        f"of {', '.join(VARIANTS)}; by default all",
        tuple(VARIANTS),
      ),
      _SEVERAL_HOSTS,
      _rates("200mbit 1gbit"),
      _switch(
        "--small",
        "for what is not said otherwise take what two cores do in 10 minutes:"
        " 4 hosts, lm1b-lstm and squad-bert, six variants",
      ),
      _LOOPBACK,
      _KEEP_MEMORY,
      _switch("--no-calibration", "without times of single collectives"),
      _repeats(5),
      _batches(2),
      _RESUMED,
      _file(
        "--plot",
        "several figures: FILE-hosts.png, FILE-density.png, FILE-speed.png",
      ),
    ),
    _calls("campaigns.network.campaign"),
  ),
  Command(
    "planned",
    "plans and other ways, predicted and measured between hosts",
    (
      _SEVERAL_HOSTS,
      _rates(" ".join(_RATE_NAMES)),
      _names(
        "--models", f"of {', '.join(_PLANNED)}; by default lm dlrm", _PLANNED
      ),
      _names(
        "--ways",
        "what to measure beside the plan and pmean, say all_gather zen/1 zen/4"
        " 'zen/1 alone'; by default all",
      ),
      _LOOPBACK,
      _SHOW,
      _repeats(7),
      _batches(4),
      _RESUMED,
    ),
    _calls("campaigns.planned.campaign"),
  ),
  Command(
    "groups",
    "a compressed CNN's gradients in one exchange, few or many",
    (
      _hosts("by default 4", default=4),
      _rates("200mbit 1gbit"),
      _LOOPBACK,
      _SHOW,
      _count("--width", 32, "of the network of examples.studies.cnn"),
      _count("--batch", 16, "of a host"),
      _count("--image-size", 16, "height and width"),
      _density("that every host selects by magnitude", 0.01),
      _count("--least", 1024, "elements of a leaf that is compressed"),
      _repeats(15),
      _batches(4),
      _JSON,
    ),
    _calls("campaigns.groups.campaign"),
  ),
  Command(
    "predict",
    "what the formulas say beside what `network` has measured",
    (_file("file", "that `network --json` wrote"),),
    _counts("campaigns.network.predict"),
  ),
  Command(
    "sparsity",
    "which rows steps touch: overlap, skew, balance, bytes",
    (
      _flag(
        "source",
        metavar="TRACE_OR_WORKLOAD",
        help="a directory that `examples.studies.lm --trace` wrote, or a"
        f" workload: {', '.join(workloads.ALL_NAMES)}",
      ),
      _flag(
        "--devices",
        nargs="+",
        type=_several,
        default=[2, 4, 8, 16, 32, 64, 128],
        metavar="N",
        help="what to count for; a trace of fewer devices pools its steps",
      ),
      _count("--steps", None, "all of a trace and 8 of a workload by default"),
      _flag(
        "--seed", type=_natural, default=0, help="of a workload and of hashes"
      ),
      _FULL_SIZE,
      _PLOT,
      _JSON,
    ),
    _counts("cases.sparsity"),
  ),
  Command(
    "growth",
    "unions of 16 times as many devices, predicted and real",
    (
      _flag(
        "--devices", type=_several, default=4, help="of the recorded steps"
      ),
      _count("--steps", 32, "recorded"),
      _count("--tokens", 4096, "of a device and step"),
      _JSON,
    ),
    _counts("planner.growth"),
  ),
  Command(
    "utility",
    "set-ups in which compressed gradients pay, by formula",
    (_JSON,),
    _counts("planner.utility"),
  ),
  Command(
    "search",
    "the planner's search against all, Espresso and MergeComp",
    (
      _count("--instances", 200, "small ones of each kind, drawn"),
      _flag(
        "--tensors",
        type=_several,
        default=300,
        help="of the large ones, by default 300",
      ),
      _repeats(20),
      _JSON,
    ),
    _counts("planner.search"),
  ),
)


if __name__ == "__main__":
  sys.exit(main())

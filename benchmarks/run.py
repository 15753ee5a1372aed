"""`python -m benchmarks.run COMMAND`; `README.md` describes each command."""

import argparse
from collections.abc import Callable, Mapping, Sequence
import contextlib
import ctypes
from functools import partial
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
from benchmarks import targets
from benchmarks import workloads
from benchmarks.campaigns.network.variants import VARIANTS
from benchmarks.testbed import netns
from benchmarks.testbed import testbed

Options = argparse.Namespace
Flag = tuple[str, dict[str, Any]]


class Refused(Exception):
  """A command cannot do what it was asked for; the message says why."""


class Command(NamedTuple):
  """A row of the table of commands."""

  name: str
  help: str
  run: Callable[[Options], int]  # Returns the exit status, or is refused.
  flags: Sequence[Flag]
  fixed: Mapping[str, Any]  # Values that other commands have flags for.


def _command(name, help, run, *flags: Flag, **fixed: Any) -> Command:
  """Returns a row, its flags one after the other."""
  return Command(name, help, run, flags, fixed)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one benchmark; returns 1 if an answer was wrong, 130 on Ctrl-C."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.run",
    description="Benchmarks of zenjax: answer first, then time.",
    epilog="benchmarks/COLUMNS.md defines every column.",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  for command in COMMANDS:
    added = commands.add_parser(command.name, help=command.help)
    for name, settings in command.flags:
      added.add_argument(name, **settings)
    added.set_defaults(**command.fixed)
  options = parser.parse_args(arguments)
  try:
    return next(c for c in COMMANDS if c.name == options.command).run(options)
  except Refused as error:
    parser.error(str(error))


# --- what runs a command ----------------------------------------------------


@contextlib.contextmanager
def _refusing():
  try:
    yield
  except (RuntimeError, ValueError) as error:
    raise Refused(str(error)) from error


def _call(module: str, options: Options) -> int:
  """Has `run` of a module do everything, which says what it has saved."""
  try:
    with _refusing():
      return importlib.import_module(f"benchmarks.{module}").run(options)
  except KeyboardInterrupt:
    print("Interrupted.")
    return 130


def _measure(module: str, options: Options) -> int:
  """Times the `cases` of a module and shows its `COLUMNS`."""
  jax.config.update("jax_num_cpu_devices", options.devices)
  if options.keep_memory:
    _keep_memory()
  hosts = vars(options).get("hosts")
  # Imported when JAX is configured: it starts at the first array.
  subject = importlib.import_module(f"benchmarks.{module}")
  with contextlib.ExitStack() as stack:
    with _refusing():
      cases = subject.cases(options)
      if isinstance(cases, contextlib.AbstractContextManager):
        cases = stack.enter_context(cases)
    results, complete = harness.measure(cases, repeats=options.repeats)
  devices = f"{hosts or options.devices} x {jax.devices()[0].device_kind}"
  machine = f"{devices}, {os.cpu_count()} cores, JAX {jax.__version__}"
  table.show(f"{options.command}: {machine}", results, subject.COLUMNS)
  return record.finish(options, results, complete=complete)


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


# --- values and flags -------------------------------------------------------


def _rule(
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


_positive = _rule("positive", int, lambda x: x >= 1, "positive")
_share = _rule("share", float, lambda x: 0 < x <= 1, "in (0, 1]")
_natural = _rule("natural", int, lambda x: 0 <= x < 2**32, "in [0, 2**32)")
_TWO = "at least 2, for one device exchanges nothing"
_several = _rule("several", int, lambda x: x >= 2, _TWO)


def _number(
  name: str,
  default: float | list[int] | None,
  what: str,
  type: Callable[[str], Any] = _positive,
) -> Flag:
  """Returns a flag of a number, of several where the default is a list."""
  many = {"nargs": "+", "metavar": "N"} if isinstance(default, list) else {}
  if default is not None:
    said = " ".join(map(str, default)) if isinstance(default, list) else default
    what = f"{what}, by default {said}"
  return name, {"type": type, "default": default, "help": what, **many}


def _flag(name: str, what: str | None = None, **settings: Any) -> Flag:
  return name, {"help": what, **settings}


def _file(name: str, what: str | None = None) -> Flag:
  return _flag(name, what, type=pathlib.Path, metavar="FILE")


def _switch(name: str, what: str) -> Flag:
  return _flag(name, what, action="store_true")


def _names(name: str, what: str, choices: Sequence[str] | None = None) -> Flag:
  """Returns a flag of several names; `{}` in `what` stands for the choices."""
  what = what.format(", ".join(choices or ()))
  return _flag(name, what, nargs="+", choices=choices, metavar="NAME")


def _hosts(what: str, **settings: Any) -> Flag:
  return _flag("--hosts", what, type=int, choices=_HOSTS, **settings)


def _rate(what: str, default: str | None = None) -> Flag:
  return _flag("--rate", what, choices=_RATES, default=default)


def _rates(default: str) -> Flag:
  return _names("--rates", f"of {{}}; by default {default}", _RATES)


def _repeats(default: int) -> Flag:
  return _number("--repeats", default, "timed rounds")


def _batches(default: int) -> Flag:
  what = "different batches that steps go through in turn"
  return _number("--batches", default, what)


def _timed(repeats: int) -> tuple[Flag, ...]:
  return _repeats(repeats), _KEEP_MEMORY, _JSON


_RATES = tuple(netns.RATES)
_HOSTS = range(2, testbed.MOST_HOSTS + 1)
_JSON = _file("--json")
_RESUMED = _file("--json", "what to save to, and to go on from")
_SHOW = _file("--show", "print what --json wrote there, and measure nothing")
_DEVICES = _number("--devices", 8, "of this machine")
_KEEP_MEMORY = _switch("--keep-memory", "keep freed memory: no page faults")
_LOOPBACK = _switch("--loopback", "hosts on 127.0.0.1: no root, no limit")
_ONE_GPU = _switch(
  "--one-gpu", "hosts share the GPU of this machine: NCCL over links"
)
_FULL_SIZE = _switch("--full-size", "the tables of the published models")
_SEVERAL_HOSTS = _hosts("by default 2 4 8", nargs="+", metavar="N")
_OPTIMIZERS = ("adam", "adagrad", "rowwise_adagrad", "sgd")
_MODELS = ("bags", "ngram", "dlrm")
_PLANNED = ("lm", "dlrm", "lm-rows", "dlrm-rows", "small", "small-rows")

# --- the commands -----------------------------------------------------------

COMMANDS = (
  _command(
    "sync",
    "a training step on several devices, zenjax against pmean",
    partial(_measure, "cases.sync"),
    _names(
      "--workloads",
      f"which tables; by default: {', '.join(workloads.NAMES)}; further"
      f" {', '.join(workloads.SWEEP)}",
      workloads.ALL_NAMES,
    ),
    _DEVICES,
    _names(
      "--variants",
      "ways to synchronize; by default all that apply: none pmean all_gather"
      " zen zen-tuned zen-columns",
    ),
    *(_FULL_SIZE, _batches(4), *_timed(15)),
  ),
  _command(
    "step",
    "whole training steps, dense gradients against rows",
    partial(_measure, "cases.step"),
    _number("--rows", [100_000, 1_000_000], "of the tables, all in memory"),
    _number("--width", 16, "of the tables"),
    _number("--look-ups", 4096, "of a device and step"),
    _DEVICES,
    _hosts("so many processes of one device each, joined by links"),
    _rate("of the links of --hosts; by default 1gbit"),
    _LOOPBACK,
    _ONE_GPU,
    _flag("--optimizer", choices=_OPTIMIZERS, default="adam"),
    _names(
      "--variants",
      "by default all: dense (pmean), zen (of dense gradients), rows,"
      " rows-tuned, owners (sharded_optimizer), sharded (tables.shard)",
    ),
    *(_batches(4), *_timed(15)),
  ),
  _command(
    "kernels",
    "every local operation by XLA and by hand-written kernels",
    partial(_measure, "cases.kernels"),
    _number("--rows", 4_194_304, "of the table"),
    _number("--width", 128, "of the table"),
    _number("--density", 0.01, "of nonzero rows", _share),
    *_timed(25),
    devices=1,
  ),
  _command(
    "gpu",
    "everything that one GPU can show; without one, answers alone",
    partial(_call, "cases.gpu"),
    _number("--rows", None, "by default 4194304 on a GPU, 4000 without one"),
    _number("--width", None, "by default 128"),
    _number("--density", None, "0.01 on a GPU, 0.02 without one", _share),
    *(_repeats(25), _JSON),
  ),
  _command(
    "compile",
    "seconds to compile a step of several tables",
    partial(_measure, "cases.compile"),
    _number("--tables", [1, 4, 26], "of a step, all of one width"),
    _flag(
      "--target",
      "to compile for, by default cpu; others run nothing (`.[aot]`)",
      choices=tuple(targets.TARGETS),
      default="cpu",
    ),
    *(_DEVICES, *_timed(2)),
  ),
  _command(
    "sparsified",
    "steps of a dense model between hosts, compressed or not",
    partial(_measure, "campaigns.sparsified"),
    _number(
      "--width", 1840, "of square layers: 10 million parameters in three"
    ),
    _number("--layers", 3, "of the model"),
    _number("--batch", 32, "of a host"),
    _number("--density", 0.01, "that all hosts send together", _share),
    _number("--top", 0.05, "that each host sends in top_k", _share),
    _hosts("by default 4", default=4),
    _rate("of their links, by default 200mbit", "200mbit"),
    _LOOPBACK,
    _ONE_GPU,
    _names(
      "--variants",
      "of none, pmean, 'bfloat16 pmean', int8, int4, sign, PowerSGD, exdyna,"
      " micro, top_k; by default all",
    ),
    *_timed(9),
    devices=8,  # Idle: hosts have their own.
  ),
  _command(
    "tables",
    "steps with tables between hosts: replicated, row-sharded, zenjax's",
    partial(_measure, "campaigns.tables"),
    _flag("--model", choices=_MODELS, default="bags"),
    _flag("--rows", type=int, help="of all tables; by default the model's"),
    _number("--width", 128, "of the table, of bags"),
    _number("--tokens", 2560, "rows that a host looks up in a step, of bags"),
    _number("--look-ups", 1, "of the table in the model, of bags"),
    _hosts("by default 4", default=4),
    _rate("of their links, by default 1gbit", "1gbit"),
    _LOOPBACK,
    _ONE_GPU,
    _names("--variants", "forms; by default all"),
    *_timed(9),
    devices=8,  # Idle: hosts have their own.
  ),
  _command(
    "tables-plot",
    "a picture of what `tables` has saved at several rates",
    partial(_call, "campaigns.tables_plot"),
    _flag("--files", "of one number of hosts", nargs="+", required=True),
    _flag("--plot", required=True, type=pathlib.Path, metavar="FILE"),
  ),
  _command(
    "network",
    "every scheme over links of a known rate, hosts and all",
    partial(_call, "campaigns.network.campaign"),
    _names(
      "--workloads",
      "of {}; by default those with rows to leave out, but for the sweep",
      workloads.ALL_NAMES,
    ),
    _names("--variants", "of {}; by default all", tuple(VARIANTS)),
    _SEVERAL_HOSTS,
    _rates("200mbit 1gbit"),
    _switch(
      "--small",
      "for what is not said otherwise take what two cores do in 10 minutes:"
      " 4 hosts, lm1b-lstm and squad-bert, six variants",
    ),
    *(_LOOPBACK, _KEEP_MEMORY),
    *(_repeats(5), _batches(2), _RESUMED),
  ),
  _command(
    "planned",
    "plans and other ways, predicted and measured between hosts",
    partial(_call, "campaigns.planned.campaign"),
    _SEVERAL_HOSTS,
    _rates(" ".join(_RATES)),
    _names("--models", "of {}; by default lm dlrm", _PLANNED),
    _names(
      "--ways",
      "what to measure beside the plan and pmean, say all_gather zen/1 zen/4;"
      " by default all",
    ),
    *(_LOOPBACK, _SHOW, _repeats(7), _batches(4), _RESUMED),
  ),
)


if __name__ == "__main__":
  sys.exit(main())

"""`python -m benchmarks.run COMMAND`; `README.md` describes each command."""

import argparse
from collections.abc import Sequence
import contextlib
import ctypes
import importlib
import os
import sys
import types

# Before JAX starts. With an accelerator: JAX_PLATFORMS=cuda python -m ...
if sys.argv[1:2] != ["gpu"]:  # It takes the GPU that is there.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks import harness
from benchmarks import record
from benchmarks import table
from benchmarks.commands import counted
from benchmarks.commands import devices
from benchmarks.commands import hosts

# What has no devices of this process to time, and no table of them to show.
_COUNTED = {
  "growth": "benchmarks.growth",
  "predict": "benchmarks.network.predict_show",
  "search": "benchmarks.search",
  "sparsity": "benchmarks.sparsity",
  "utility": "benchmarks.utility",
}
_BY_THEMSELVES = {
  "gpu": "benchmarks.gpu",
  "groups": "benchmarks.groups.command",
  "network": "benchmarks.network.command",
  "planned": "benchmarks.planned.command",
}


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one benchmark; returns 1 if an answer was wrong, 130 on Ctrl-C."""
  parser = _parser()
  options = parser.parse_args(arguments)
  name = options.command
  try:
    if name in _BY_THEMSELVES:
      return importlib.import_module(_BY_THEMSELVES[name]).run(options)
    if name in _COUNTED:
      return _count(importlib.import_module(_COUNTED[name]), options)
  except (RuntimeError, ValueError) as error:
    parser.error(str(error))
  return _measure(parser, options)


def _count(subject: types.ModuleType, options: argparse.Namespace) -> int:
  try:
    return subject.run(options)
  except KeyboardInterrupt:
    print("Interrupted: nothing was saved.")
  return 130


def _measure(
  parser: argparse.ArgumentParser, options: argparse.Namespace
) -> int:
  """Cases by turns, and a table of them."""
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
  devices.add(commands)
  hosts.add(commands)
  counted.add(commands)
  return parser


if __name__ == "__main__":
  sys.exit(main())

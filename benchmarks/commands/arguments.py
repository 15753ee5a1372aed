"""Arguments that several commands have, and what their values may be."""

import argparse
import pathlib
from typing import Protocol


class Commands(Protocol):
  """What `argparse` adds commands to."""

  def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser: ...


def add_batches(command: argparse.ArgumentParser, default: int) -> None:
  """How many batches there are to compute gradients of."""
  command.add_argument(
    "--batches",
    type=positive,
    default=default,
    help=f"different batches that steps go through in turn, by default"
    f" {default}",
  )


def add_variants(command: argparse.ArgumentParser) -> None:
  """Which of the ways to synchronize one table."""
  command.add_argument(
    "--variants",
    nargs="+",
    metavar="NAME",
    help="ways to synchronize; by default all that apply: none pmean"
    " all_gather zen zen-hash zen-columns, and with --pinned zen-pinned"
    " zen-hash-pinned zen-columns-pinned; on dense tables zen-first"
    " zen-remembered",
  )


def add_common(command: argparse.ArgumentParser, *, repeats: int) -> None:
  """What to time and to save; with no repeats nothing is timed."""
  if repeats:
    command.add_argument(
      "--repeats", type=positive, default=repeats, help="timed rounds"
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


def add_place(command: argparse.ArgumentParser) -> None:
  """Where hosts are, and a file to show in their place."""
  add_loopback(command)
  command.add_argument(
    "--show",
    type=pathlib.Path,
    metavar="FILE",
    help="print what --json wrote there, and measure nothing",
  )


def add_loopback(command: argparse.ArgumentParser) -> None:
  """Hosts that need no namespaces."""
  command.add_argument(
    "--loopback",
    action="store_true",
    help="hosts are processes on 127.0.0.1: no root, no limit",
  )


def positive(text: str) -> int:
  """1 or more."""
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f"must be positive, got {text}")
  return number


def share(text: str) -> float:
  """A part of what there is, and not none of it."""
  number = float(text)
  if not 0 < number <= 1:
    raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
  return number


def several(text: str) -> int:
  """2 or more."""
  number = int(text)
  if number < 2:
    raise argparse.ArgumentTypeError(
      f"must be at least 2, for one device exchanges nothing, got {text}"
    )
  return number


def natural(text: str) -> int:
  """What NumPy takes as a seed."""
  number = int(text)
  if not 0 <= number < 2**32:
    raise argparse.ArgumentTypeError(f"must be in [0, 2**32), got {text}")
  return number

"""Flags that the training programs share, and what they must satisfy."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from examples.studies.common.sparsifier import KINDS

Optimizers = Mapping[str, tuple[Callable[[float], Any], float]]
"""Name -> what makes it of a learning rate, and its rate by default."""

# What a program without such a flag trains with.
_ABSENT: dict[str, Any] = {"sync": "pmean", "grads": "dense"}
_ABSENT |= {"sparsifier": "none", "density": 1.0, "out": None, "trace": None}
_ABSENT |= {"coordinator": None, "num_processes": None, "process_id": None}


def parser(description: str, module: str) -> argparse.ArgumentParser:
  """Makes the parser of `python -m examples.studies.<module>`."""
  found = argparse.ArgumentParser(
    prog=f"python -m examples.studies.{module}",
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=not module.startswith("sparsifiers"),
  )
  found.set_defaults(**_ABSENT)
  return found


def add_training(
  parser: argparse.ArgumentParser,
  optimizers: Optimizers,
  steps: str,
  *ways: str,
) -> None:
  """Adds how gradients travel, what they do, and how often.

  Args:
    parser: Gets the flags.
    optimizers: The first name is the default.
    steps: The default of --steps.
    *ways: Of --sync, beside those of all programs.
  """
  add = parser.add_argument
  add("--sync", choices=("zen", "pmean", *ways, "compare"), default="zen")
  add(
    "--grads",
    choices=("dense", "rows"),
    default="dense",
    help="of tables: arrays of their size, or only the rows looked up, which"
    " the optimizer then updates alone",
  )
  names = tuple(optimizers)
  add("--optimizer", choices=names, default=names[0])
  rates = ", ".join(
    f"{rate:g} {name}" for name, (_, rate) in optimizers.items()
  )
  add("--lr", type=float, help=f"learning rate; default: {rates}")
  add("--steps", type=int, help=f"default: {steps}")
  add("--seed", type=int, default=0)


def add_sparsifier(parser: argparse.ArgumentParser, about: str) -> None:
  """Adds what sends a part of the gradient."""
  add = parser.add_argument
  add("--sparsifier", choices=("none", *KINDS), default="none", help=about)
  add("--density", type=float, default=0.01, help="that part; default: 0.01")
  add("--out", metavar="DIR", help="numbers of every step go to steps.jsonl")


def add_files(parser: argparse.ArgumentParser, plot: str) -> None:
  """Adds what is left behind; `plot` is the default of --plot."""
  add = parser.add_argument
  add("--checkpoint", metavar="DIR", help="save here, at the end and on Ctrl-C")
  add("--resume", action="store_true", help="go on from --checkpoint")
  add("--plot", metavar="FILE", help=f"default: {plot}")


def add_processes(parser: argparse.ArgumentParser) -> None:
  """Adds how processes of several hosts find each other."""
  group = parser.add_argument_group(
    "on several hosts, all three on each of them"
  )
  group.add_argument("--coordinator", help="host:port of process 0")
  group.add_argument("--num-processes", type=int)
  group.add_argument("--process-id", type=int)


def set_defaults(
  flags: argparse.Namespace,
  optimizers: Optimizers,
  *,
  compare_steps: int,
  train_steps: int,
  plot: str,
) -> None:
  """Fills in what depends on other flags."""
  compare = flags.sync == "compare"
  if flags.steps is None:
    flags.steps = compare_steps if compare else train_steps
  if flags.plot is None and compare:
    flags.plot = plot
  if flags.lr is None:
    _, flags.lr = optimizers[flags.optimizer]


def broken_rule(
  flags: argparse.Namespace, positive: Collection[str]
) -> str | None:
  """Returns the rule that a shared flag breaks, if one does.

  Args:
    flags: As parsed; None where a default comes later.
    positive: Names of those that must be.
  """
  for name in positive:
    value = getattr(flags, name)
    if value is not None and not value > 0:
      return f"--{name.replace('_', '-')} must be positive, got {value}"
  if flags.seed < 0:
    return f"--seed must not be negative, got {flags.seed}"
  if flags.resume and not flags.checkpoint:
    return "--resume needs --checkpoint DIR, got no directory"
  if not 0 < flags.density <= 1:
    return f"--density must be in (0, 1], got {flags.density}"
  if flags.grads == "rows" and flags.sync == "pmean":
    return (
      "--grads rows goes with --sync zen or compare, got --sync pmean, which"
      " averages whole tables"
    )
  for name in ("checkpoint", "out", "trace"):
    if getattr(flags, name) and flags.sync == "compare":
      return f"--{name} goes with one way of --sync, got --sync compare"
  if flags.trace and flags.sync == "sharded":
    return "--trace goes with --sync zen or pmean, got --sync sharded"
  return _broken_processes(flags)


def _broken_processes(flags: argparse.Namespace) -> str | None:
  count, index = flags.num_processes, flags.process_id
  given = [flags.coordinator, count, index]
  if all(x is None for x in given):
    return None
  if None in given:
    return "--coordinator, --num-processes and --process-id go together"
  if count < 1:
    return f"--num-processes must be at least 1, got {count}"
  if not 0 <= index < count:
    return (
      f"--process-id must be 0 to {count - 1}, one below --num-processes at"
      f" most, got {index}"
    )
  return None


def settings(
  flags: argparse.Namespace, names: Sequence[str]
) -> dict[str, object]:
  """Returns flag -> value, what a run shares with the one that it resumes."""
  return {f"--{n.replace('_', '-')}": getattr(flags, n) for n in names}

"""Flags that the training programs share, and what they must satisfy."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import processes


class Add(Protocol):
  """`parser.add_argument`."""

  def __call__(self, *names: str, **options: Any) -> object: ...


def parser(description: str) -> argparse.ArgumentParser:
  return argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )


def add_training(
  add: Add, optimizers: Mapping[str, tuple[Any, float]], steps: str
) -> None:
  """How gradients travel, what they do, and how often.

  Args:
    add: Adds a flag.
    optimizers: Name -> what makes it, and its learning rate; the first name is
      the default.
    steps: What --steps is by default.
  """
  add("--sync", choices=("zen", "pmean", "compare"), default="zen")
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


def add_output(add: Add, plot: str) -> None:
  """What is left behind; `plot` is the default of --plot in compare."""
  add_files(add, f"{plot} in compare")


def add_files(add: Add, plot: str) -> None:
  """The same, with any default of --plot."""
  add("--checkpoint", metavar="DIR", help="save here, at the end and on Ctrl-C")
  add("--resume", action="store_true", help="go on from --checkpoint")
  add("--plot", metavar="FILE", help=f"default: {plot}")


def set_defaults(
  flags: argparse.Namespace,
  optimizers: Mapping[str, tuple[Any, float]],
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
  """The rule that a shared flag breaks, if one does.

  Args:
    flags: As parsed; None where a default comes later.
    positive: Names of those that must be.
  """
  if broken := broken_run(flags, positive):
    return broken
  if flags.grads == "rows" and flags.sync == "pmean":
    return (
      "--grads rows goes with --sync zen or compare, got --sync pmean, which"
      " averages whole tables"
    )
  if flags.checkpoint and flags.sync == "compare":
    return "--checkpoint goes with --sync zen or pmean, got --sync compare"
  return processes.broken_rule(flags)


def broken_run(
  flags: argparse.Namespace, positive: Collection[str]
) -> str | None:
  """The same of the flags that every training program has."""
  for name in positive:
    value = getattr(flags, name)
    if value is not None and not value > 0:
      return f"--{name.replace('_', '-')} must be positive, got {value}"
  if flags.seed < 0:
    return f"--seed must not be negative, got {flags.seed}"
  if flags.resume and not flags.checkpoint:
    return "--resume needs --checkpoint DIR, got no directory"
  return None


def settings(
  flags: Mapping[str, object], names: Sequence[str]
) -> dict[str, object]:
  """Flag -> value, of what a run must share with the one that it resumes."""
  return {f"--{name.replace('_', '-')}": flags[name] for name in names}

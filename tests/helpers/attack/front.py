"""What a front is, and how cases are run against it."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np

Case = Any  # a tree of NumPy arrays


@dataclasses.dataclass(frozen=True)
class Front:
  """One compiled program, and its cases.

  Attributes:
    name: In the table, and in the seed of every case.
    build: Compiles: returns what runs a case.
    draw: A case by a generator of random numbers.
    check: Raises AssertionError where a result is wrong.
    weight: Of the cases of all fronts, a large table's being fewer.
  """

  name: str
  build: Callable[[], Callable[[Case], Any]]
  draw: Callable[[np.random.Generator], Case]
  check: Callable[[Case, Any], None]
  weight: float = 1.0

  @functools.cached_property
  def run(self) -> Callable[[Case], Any]:
    return self.build()

  def forget(self) -> None:
    """Drops what was compiled; a process may map only so many kernels."""
    self.__dict__.pop("run", None)
    jax.clear_caches()

  def case(self, seed: int, number: int) -> Case:
    """The case of a seed and a number; every front has its own."""
    return self.draw(
      np.random.default_rng([seed, zlib.crc32(self.name.encode()), number])
    )

  def holds(self, case: Case) -> None:
    """Runs a case; AssertionError where it is wrong."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
      self.check(case, self.run(case))


class Failure(NamedTuple):
  """A case that is wrong."""

  front: str
  seed: int
  number: int
  why: str
  smallest: str

  def __str__(self) -> str:
    again = f"--fronts {self.front!r} --seed {self.seed} --number {self.number}"
    return (
      f"{self.front}: case {self.number} of seed {self.seed}: {self.why}\n"
      f"  again: python -m tests.helpers.attack {again}\n"
      f"  smallest: {self.smallest}"
    )


def attack(
  front: Front, seed: int, numbers: Sequence[int]
) -> Iterator[Failure | None]:
  """Runs cases; a failure, or None, for each. An error is a failure, too."""
  for number in numbers:
    case = front.case(seed, number)
    try:
      front.holds(case)
      yield None
    except Exception as error:
      why = str(error)
      if not isinstance(error, AssertionError):
        why = f"{type(error).__name__}: {why}"
      less = _shown(smallest(front, case))
      yield Failure(front.name, seed, number, why, less)


def _fails(front: Front, case: Case) -> bool:
  try:
    front.holds(case)
  except Exception:
    return True
  return False


def smallest(front: Front, case: Case, tries: int = 400) -> Case:
  """`case` with as much set to zero as leaves it wrong.

  Floating arrays alone: halves of their elements, then halves of these.
  """
  leaves, structure = jax.tree.flatten(case)
  for i, leaf in enumerate(leaves):
    if not _is_floating(leaf):
      continue
    flat = leaf.reshape(-1)
    parts = [np.flatnonzero((flat != 0) | np.signbit(flat))]
    while parts and tries > 0:
      part = parts.pop()
      tries -= 1
      less = leaves[i].copy()
      less.reshape(-1)[part] = 0
      tried = structure.unflatten([*leaves[:i], less, *leaves[i + 1 :]])
      if len(part) and _fails(front, tried):
        leaves[i] = less
      elif len(part) > 1:
        parts += np.array_split(part, 2)
  return structure.unflatten(leaves)


def _is_floating(leaf: Any) -> bool:
  kind = np.asarray(leaf).dtype
  return jax.numpy.issubdtype(kind, jax.numpy.floating)


def _shown(case: Case) -> str:
  lines = []
  for path, leaf in jax.tree_util.tree_flatten_with_path(case)[0]:
    leaf = np.asarray(leaf)
    name = jax.tree_util.keystr(path) or "data"
    if not _is_floating(leaf):
      lines.append(f"{name} = {np.array2string(leaf, threshold=64)}")
      continue
    at = np.argwhere((leaf != 0) | np.signbit(leaf))[:12]
    held = ", ".join(f"{tuple(map(int, i))}: {leaf[tuple(i)]!r}" for i in at)
    lines.append(f"{name} {leaf.dtype}{list(leaf.shape)} = {{{held}}}")
  return "; ".join(lines)

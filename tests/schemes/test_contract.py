"""The contract: whatever the way of synchronizing, what `lax.pmean` means.

Ways to synchronize, ways to run, dtypes, numbers of devices, shapes and
capacities are sampled so that every choice is in some program, and every scheme
with and without a first round that is too small, with arrays and rows, and on
more than two devices; every data case then runs through every program.
`ZENJAX_CONTRACT_SEED` draws other programs.
Schemes are those of the registry; each row of `RUNNERS` is one line.
"""

import functools
import inspect
import os
import random
import typing
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
from kernel_cases import Layout
import numpy as np
import oracle
import pytest
import runners
import scheme_names
import steps

import zenjax

pytestmark = pytest.mark.optimized

# (scheme, partition); "grid" is the integer between "hash" and "columns".
SCHEMES = (
  *(("zen", partition) for partition in ("hash", "columns", "grid")),
  *((name, "hash") for name in scheme_names.PEERS),
  *((name, "hash") for name in scheme_names.DENSE_NAMES),
)
# Blocks of a few elements, or these small tables would have one or two.
_BLOCK = 8
GRIDS = tuple(row for row in SCHEMES if row[1] == "grid")
DEVICES = (1, 2, 3, 5, 8)
# Rows: not a multiple of n, one, fewer than n; widths: 1, below n, odd, wide.
SHAPES = (
  (300, 16),
  (257, 1),
  (41, 7),
  (1, 5),
  ("n-1", 3),
  (280, 33),
)
# XLA chooses the order, or sums of some devices are added to sums of others.
PAIRWISE = {"recursive_doubling", "dense_inside"}
# What a device holds: an array, or its nonzero rows alone.
FORMS = ("array", "rows")
# The first round: a static guess, one row, a few. More than fits always comes.
CAPACITIES = (None, (1, 1), (4, 12))


class Program(NamedTuple):
  """One compiled program of the contract table."""

  scheme: tuple[str, str]
  runner: str
  dtype: np.dtype
  n: int
  shape: tuple[int | str, int]
  capacities: tuple[int, int] | None
  op: oracle.Op
  form: str = "array"

  @property
  def rows(self) -> int:
    rows = self.shape[0]
    return max(1, self.n - 1) if isinstance(rows, str) else rows

  @property
  def width(self) -> int:
    return self.shape[1]

  def __str__(self):
    first = "x".join(map(str, self.capacities)) if self.capacities else "guess"
    return (
      f"{'-'.join(self.scheme)}-{self.runner}-{self.dtype.name}-n{self.n}"
      f"-{self.rows}x{self.width}-{first}-{self.op}-{self.form}"
    )

  @property
  def unit(self) -> int | str:
    return _BLOCK if scheme_names.in_blocks(self.scheme[0]) else "row"

  @property
  def units(self) -> int:
    if isinstance(self.unit, int):
      return -(-self.rows * self.width // self.unit)
    return self.rows

  @property
  def is_short(self) -> bool:
    """Whether the first round, at all owners, has less room than the table."""
    if self.capacities is None:
      return False
    return self.n * self.capacities[1] < self.units

  def options(self) -> dict:
    """Keyword arguments of `zenjax.sparse_pmean`."""
    scheme, partition = self.scheme
    if partition == "grid":
      partition = 2 if self.width % 2 else 4
    first = self.capacities
    if first is not None:
      first = (min(first[0], self.units), min(first[1], self.units))
    return {
      "scheme": scheme,
      "partition": partition,
      "capacities": first,
      "unit": self.unit,
    }


FACTORS: Any = (
  SCHEMES,
  tuple(runners.RUNNERS),
  cases.DTYPES,
  DEVICES,
  SHAPES,
  CAPACITIES,
  ("mean", "sum"),
  FORMS,
)


def possible(program: Program) -> bool:
  """A grid needs a divisor of `n` between 1 and `n`, blocks an array."""
  if program.scheme in GRIDS and program.n != 8:
    return False
  return not scheme_names.in_blocks(program.scheme[0]) or program.form != "rows"


def met_by(program: Program) -> set:
  """The choices that a program is an example of."""
  met = {*enumerate(program)}
  if program.n == 1 or program.scheme[0] in scheme_names.DENSE_NAMES:
    return met  # Nothing is put into buffers.
  return met | {
    (program.scheme, "short", program.is_short),
    (program.scheme, "form", program.form),
    # Two devices add in one order.
    (program.scheme, "many", program.n > 2),
  }


def programs() -> list[Program]:
  """Few and small programs in which all that `met_by` names is met."""
  rng = random.Random(int(os.environ.get("ZENJAX_CONTRACT_SEED", "0")))
  drawn = [Program(*map(rng.choice, FACTORS)) for _ in range(6000)]
  # Alone a device exchanges nothing.
  size = lambda program: (program.n == 1, program.n * program.rows)
  drawn = sorted(filter(possible, drawn), key=size)
  todo = set().union(*map(met_by, drawn))
  chosen = []
  while todo:
    best = max(drawn, key=lambda program: len(met_by(program) & todo))
    chosen.append(best)
    todo -= met_by(best)
  return chosen


def synchronize(program: Program):
  """What one device of a program does."""
  f = {"mean": zenjax.sparse_pmean, "sum": zenjax.sparse_psum}[program.op]
  call = {"array": _call, "rows": _call_on_rows}[program.form]
  return functools.partial(call, f, program.options())


def _call(f, options, x, axis_name):
  return f(x, axis_name, **options)


def _call_on_rows(f, options, x, axis_name):
  """As many rows as there can be: the others find it half empty."""
  rows = zenjax.SparseRows.from_dense(x, x.shape[0])
  return f(rows, axis_name, **options).to_dense()


def failures(run, program: Program, named_stacks) -> list[str]:
  """The messages of all cases that break the contract."""
  found = []
  for name, stack in named_stacks:
    result = run(stack)
    try:
      oracle.check(result, stack, program.op, label=name)
      oracle.check_same_bits(run(stack), result, label=f"{name}, repeated")
    except AssertionError as error:
      found.append(str(error))
  return found


@pytest.mark.parametrize("program", programs(), ids=str)
def test_every_case_on_every_shard(program):
  run = runners.RUNNERS[program.runner](synchronize(program), program.n)
  named_stacks = cases.every_case(
    program.n, program.rows, program.width, program.dtype
  )
  found = failures(run, program, named_stacks)
  assert not found, "\n".join(found)


def test_ids_all_on_one_owner():
  """The adversary knows the hash; the statistics must show that it does."""
  n, rows, width = 8, 3000, 6
  layout = Layout(num_rows=rows, groups=n)
  owner_of = np.asarray(jax.jit(layout.place)(np.arange(rows, dtype="i4"))[0])
  tx = zenjax.zen_sync(
    "data", sparse=True, partition="hash", capacities=(4, 12)
  )
  params = {"t": jnp.zeros((rows, width))}
  trainer = steps.Trainer(tx, params, runners.mesh(n))
  for seed in range(3):
    rng = np.random.default_rng(seed)
    stack = cases.one_owner(owner_of, 20, rng, n, rows, width, cases.FLOAT32)
    oracle.check(trainer({"t": stack})["t"], stack)
    numbers = zenjax.stats(trainer.state)["t"]
    np.testing.assert_allclose(numbers["pull_imbalance"], n, rtol=1e-5)


@pytest.mark.parametrize(
  ("scheme", "options"),
  [
    *(
      (name, {"capacities": (40, 40)})  # With room for all: nothing is dense.
      for name in sorted({"zen", *scheme_names.PEERS} - PAIRWISE)
    ),
    ("zen", {}),
  ],
)
def test_sums_run_rank_by_rank(scheme, options):
  """Bit for bit the float32 sum in the order of the devices."""
  n = 8
  program = functools.partial(zenjax.sparse_psum, scheme=scheme, **options)
  run = runners.RUNNERS["vmap"](program, n)
  for seed in range(5):
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-12, 12, (n, 300, 1))
    stack = scale * cases.normal(rng, n, 300, 9, cases.FLOAT32)
    ids = rng.integers(0, 40, (n, 20))
    stack = cases.keep(stack.astype(np.float32), ids)
    want = np.zeros((300, 9), np.float32)
    for local in stack:
      want += local
    got = np.abs(run(stack))
    oracle.check_same_bits(got, np.stack([np.abs(want)] * n))


def test_every_scheme_is_told_of():
  """By its name in the type and the docstring of the argument."""
  names = {*scheme_names.SPARSE_NAMES, *scheme_names.DENSE_NAMES}
  argument = inspect.signature(zenjax.zen_sync).parameters["scheme"]
  assert set(typing.get_args(argument.annotation)) == names
  told = zenjax.zen_sync.__doc__ or ""
  assert [name for name in names if f'`"{name}"`' not in told] == []

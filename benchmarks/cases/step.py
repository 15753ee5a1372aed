"""`step`: whole training steps, dense against rows, tables of any size.

Gradient, synchronization, optimizer and parameters, everything donated. The
same look-ups go to every table: of equally many distinct rows, spread over it.
With `--hosts` every host runs `python -m benchmarks.cases.step`.
Letters: `n` devices, `T` look-ups a device, `R` rows, `D` width.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

from benchmarks import campaign
from benchmarks import harness
from benchmarks import oracle
from benchmarks import table
from benchmarks.cases import sync
from benchmarks.cases import torch_rows
from benchmarks.cases.sync import AXIS
from benchmarks.harness import Built
from benchmarks.testbed import served
import zenjax

_RATE = 0.5
# Each with its state, of a table's size beside the parameters.
_OPTIMIZERS: dict[str, tuple[Callable[[], Any], float]] = {
  "adam": (lambda: optax.adam(_RATE), 2.0),
  "adagrad": (lambda: optax.adagrad(_RATE, initial_accumulator_value=0), 1.0),
  "rowwise_adagrad": (lambda: zenjax.rows.rowwise_adagrad(_RATE), 0.1),
  "sgd": (lambda: optax.sgd(_RATE), 0.0),
}
# float32 over two steps of an optimizer, against float64.
_RELATIVE = 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
  """The sizes that the variants on one table share."""

  rows: int
  width: int
  look_ups: int
  distinct: int  # rows that ids are drawn from
  optimizer: str
  batches: int


def _zen(inner):
  return optax.chain(zenjax.zen_sync(AXIS, sparse=True), inner)


def _rows(inner):
  return _zen(zenjax.lazy_rows(inner))


@dataclasses.dataclass(frozen=True, slots=True)
class _Variant:
  """A way to the update of a step."""

  transformation: Callable[[Any], Any]  # Of an optimizer.
  rows: bool  # Whether gradients are SparseRows.
  tuned: bool = False  # Whether `zenjax.tune` plans it after a rehearsal.
  whole_state: bool = True  # Whether devices hold the state of all rows.
  sharded: bool = False  # Whether each has its own rows alone.
  synced: bool = True  # Whether devices exchange anything.


_OWNERS = _Variant(
  lambda x: zenjax.sharded_optimizer(x, AXIS, sparse=True),
  rows=True,
  whole_state=False,
)
_SHARDED = _Variant(
  lambda x: zenjax.sharded_optimizer(x, AXIS),
  rows=True,
  whole_state=False,
  sharded=True,
)
VARIANTS = {
  "none": _Variant(lambda x: x, rows=False, synced=False),
  "none-rows": _Variant(zenjax.lazy_rows, rows=True, synced=False),
  "dense": _Variant(lambda x: optax.chain(sync.PMEAN, x), rows=False),
  "zen": _Variant(_zen, rows=False),
  "zen-tuned": _Variant(_zen, rows=False, tuned=True),
  "rows": _Variant(_rows, rows=True),
  "rows-tuned": _Variant(_rows, rows=True, tuned=True),
  "owners": _OWNERS,
  "owners-tuned": dataclasses.replace(_OWNERS, tuned=True),
  "sharded": _SHARDED,
  "sharded-tuned": dataclasses.replace(_SHARDED, tuned=True),
}
# Steps before `zenjax.tune`.
_REHEARSALS = 20


def build(
  name: str,
  setting: Setting,
  mesh: Mesh,
  compile: Callable[
    [jax.stages.Lowered], harness.Compiled
  ] = harness.compile_here,
) -> Built:
  """Compiles a variant and checks the parameters after two steps."""
  if name == torch_rows.NAME:
    return _build_torch(setting)
  variant = VARIANTS[name]
  seen = None
  if variant.tuned:
    rehearsal = _Runner(variant, setting, mesh, compile)
    for _ in range(_REHEARSALS):
      rehearsal()
    seen = rehearsal.params, rehearsal.state
    del rehearsal
  runner = _Runner(variant, setting, mesh, compile, seen)
  wrong = runner.check()
  usage: Any = runner.compiled.memory_analysis()
  facts = {
    "state_bytes": float(usage.argument_size_in_bytes),
    "temporary": float(usage.temp_size_in_bytes),
    "wire_bytes": runner.wire_bytes(),
  }
  return Built(run=runner, wrong=wrong, compile_s=runner.compile_s, facts=facts)


def _build_torch(setting):
  drawn = [_draw(setting, 1, seed) for seed in range(setting.batches)]
  shape = setting.rows, setting.width
  runner = torch_rows.Runner(shape, drawn, setting.optimizer, _RATE)
  touched, (grads,) = _gradients(drawn[0])
  want = _after_two_steps(grads, setting.optimizer)
  wrong = _count_wrong(*runner.rows(touched), want)
  names = "state_bytes", "temporary"
  facts = {name: getattr(runner, name) for name in names} | {"wire_bytes": 0.0}
  return Built(runner, wrong, runner.compile_s, facts)


def _gradients(batch):
  """Rows that devices touch, and of each device its `[k, D]` in float64."""
  ids, values = batch
  touched, at = np.unique(ids, return_inverse=True)
  pairs = zip(at.reshape(ids.shape), values)
  return touched, [oracle.row_sums(*pair, len(touched)) for pair in pairs]


def _count_wrong(got, nonzero, want):
  near = np.abs(got - want) <= _RELATIVE * np.maximum(np.abs(want), 1e-6)
  wrong = int(got.size - np.count_nonzero(near))
  return wrong + abs(int(nonzero) - int(np.count_nonzero(got)))


def _loss(params, ids, values):
  return jnp.sum(jnp.take(params, ids[0], axis=0, mode="clip") * values[0])


class _Runner(sync.Runner):
  """The step of a variant."""

  def __init__(self, variant, setting, mesh, compile, seen=None):
    self._setting, self._mesh, self._sharded = setting, mesh, variant.sharded
    self._synced = variant.synced
    inner = _OPTIMIZERS[setting.optimizer][0]()
    tx = variant.transformation(inner)
    if variant.sharded:
      whole = lambda: jnp.zeros((setting.rows, setting.width))
      shard = functools.partial(zenjax.tables.shard, tables=True)
      params = jax.jit(lambda: shard(whole(), mesh, AXIS))()
    else:
      params = sync.zeros(mesh, setting.rows, setting.width)[sync.LEAF]
    drawn = [_draw(setting, mesh.size, s) for s in range(setting.batches)]
    placed = [[sync.place(mesh, x, AXIS) for x in batch] for batch in drawn]
    self._first = drawn[0]
    which = {"rows": variant.rows, "compile": compile, "seen": seen}
    super().__init__(tx, _loss, mesh, params, placed, **which)

  def check(self) -> int:
    """Wrong elements after the first batch twice, on every device.

    The same rows twice: nothing that a lazy optimizer leaves out would happen.
    """
    self()
    self.steps = 0
    self()
    touched, each = _gradients(self._first)
    if self._synced:
      each = [np.mean(each, axis=0)] * len(each)
    here = [i for i, x in enumerate(self._mesh.devices) if _is_here(x)]
    wrong = 0
    for device, (got, nonzero) in zip(here, self._seen(touched)):
      want = _after_two_steps(each[device], self._setting.optimizer)
      wrong += _count_wrong(got, nonzero, want)
    return wrong

  def _seen(self, touched):
    """Yields touched rows, and how many numbers are not zero, of each copy."""
    if self._sharded:
      here = NamedSharding(self._mesh, PartitionSpec())
      rows = zenjax.tables.apply(lambda x: x[touched])

      own = lambda part: jax.lax.psum(_count_nonzero(part), AXIS)
      split = PartitionSpec(AXIS)
      count = jax.shard_map(
        own, mesh=self._mesh, in_specs=split, out_specs=PartitionSpec()
      )
      both = lambda x: (rows(x), count(x.value))
      found = jax.jit(both, out_shardings=here)(self.params)
      yield tuple(np.asarray(x.addressable_data(0)) for x in found)
      return
    read = jax.jit(lambda x, i: (x[i], _count_nonzero(x)))
    for shard in self.params.addressable_shards:
      yield tuple(map(np.asarray, read(shard.data, touched)))

  def wire_bytes(self) -> float:
    """Returns the bytes that a device receives in a step."""
    if not self._synced:
      return 0.0
    try:
      stats = zenjax.stats(self.state)
    except ValueError:
      n, size = self._mesh.size, self.params.nbytes
      return 2 * (n - 1) / n * size
    return sum(leaf["wire_bytes"] for leaf in stats.values())


def _count_nonzero(x):
  """Counts in pieces: XLA makes integers of all that it counts."""
  pieces = x.reshape(math.gcd(x.size, 32), -1)
  return jnp.sum(jax.lax.map(jnp.count_nonzero, pieces))


def _is_here(device):
  return device.process_index == jax.process_index()


def _draw(setting, n, seed):
  """Ids as a text has them, `[n, T]`, spread over the table, and values."""
  rng = np.random.default_rng(seed)
  weights = 1.0 / (np.arange(setting.distinct) + 2.7)
  shape = (n, setting.look_ups)
  ids = rng.choice(setting.distinct, shape, p=weights / weights.sum())
  spread = ids * (setting.rows // setting.distinct)
  values = oracle.values(rng, (*shape, setting.width))
  return spread.astype(np.int32), values


def _after_two_steps(grads, optimizer):
  """Parameters of `[k, D] float64` gradients, the same twice, from zero."""
  if optimizer == "sgd":
    return -_RATE * 2 * grads
  if optimizer == "adam":
    # Both moments over their corrections are the gradient and its square.
    return -_RATE * 2 * grads / (np.abs(grads) + 1e-8)
  squares = grads**2
  if optimizer == "rowwise_adagrad":
    squares = squares.mean(axis=1, keepdims=True)
  scale = np.where(squares > 0, squares, np.inf) ** -0.5
  return -_RATE * grads * scale * (1 + 2**-0.5)


def _dense_over(result, peers):
  """Returns how much longer the dense step of the same table takes."""
  _, rows = result.name.split()
  return table.median_s(peers, f"dense {rows}") / result.median_s


def _dense_adds(result, peers):
  """Returns what `pmean` adds to a step without, over what this one adds."""
  name, rows = result.name.split()
  variant = VARIANTS.get(name)
  if variant is None or not variant.synced:
    return math.nan
  of = lambda name: table.median_s(peers, f"{name} {rows}")
  nothing = of("none-rows" if variant.rows else "none")
  return (of("dense") - of("none")) / (result.median_s - nothing)


def _over_smallest(result, peers):
  """Time over that of the same variant on the smallest table."""
  variant, _ = result.name.split()
  same = [p for name, p in peers.items() if name.split()[0] == variant]
  first = min(same, key=lambda p: p.facts["state_bytes"])
  return result.median_s / first.median_s


COLUMNS = (
  table.fact("state\nMB", "state_bytes", unit=1e6),
  table.fact("temporary\nMB", "temporary", unit=1e6),
  table.fact("wire\nMB", "wire_bytes", ".2f", unit=1e6),
  *table.MEASURED,
  table.Column("dense\nover", _dense_over, ".1f"),
  table.Column("dense adds/\nadded", _dense_adds, ".1f"),
  table.Column("over\nsmallest", _over_smallest, ".2f"),
)


def cases(
  options: argparse.Namespace,
) -> list[harness.Case] | AbstractContextManager[list[harness.Case]]:
  """Every variant on every number of rows, all in one group: they take turns.

  Between hosts a context that yields them, on links of a known rate.

  Raises:
    ValueError: Too few devices, too little memory, or no such variant.
  """
  known = [*VARIANTS, torch_rows.NAME]
  names = harness.named("--variants", options.variants or list(VARIANTS), known)
  if torch_rows.NAME in names and (options.hosts or options.devices > 1):
    raise ValueError(
      f"`--variants {torch_rows.NAME}` runs on one device: add `--devices 1`."
    )
  if torch_rows.NAME in names and options.optimizer not in torch_rows.MAKE:
    raise ValueError(
      f"`--variants {torch_rows.NAME}` has no `--optimizer"
      f" {options.optimizer}`: take one of {', '.join(torch_rows.MAKE)}."
    )
  group = (
    f"{options.look_ups:,} look-ups a device, D = {options.width},"
    f" {options.optimizer}"
  )
  same = ("width", "look_ups", "optimizer", "batches")
  given = {name: getattr(options, name) for name in same}
  given["distinct"] = min(options.rows)
  which = {
    f"{name} {rows:,}": (name, Setting(rows=rows, **given))
    for rows, name in itertools.product(options.rows, names)
  }
  if options.hosts:
    _check_memory(names, options, options.hosts)
    rate = options.rate or ("unlimited" if options.loopback else "1gbit")
    told = {
      name: {"variant": variant, "setting": dataclasses.asdict(setting)}
      for name, (variant, setting) in which.items()
    }
    how = {"keep_memory": options.keep_memory}
    return campaign.cases("cases.step", options, rate, group, told, **how)
  mesh = harness.mesh(options.devices, AXIS)
  _check_memory(names, options, mesh.size, mesh)
  return [
    harness.case(group, name, build, *one, mesh) for name, one in which.items()
  ]


class _Worker(served.Worker):
  """This host's share of the steps."""

  def build(self, variant: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Compiles a variant and checks its parameters on this host."""
    built = build(variant, Setting(**setting), self.mesh, self.compiler.compile)
    assert built.run is not None  # As some of `cases.kernels` have none.
    self.cases.append(built.run)
    names = ("wrong", "compile_s", "facts")
    return {name: getattr(built, name) for name in names}


def _check_memory(names, options, devices, mesh=None) -> None:
  """Raises ValueError where this machine cannot hold all cases at once."""
  state, need = _OPTIMIZERS[options.optimizer][1], 0.0
  for name in names:
    variant = VARIANTS.get(name, VARIANTS["none-rows"])
    # The table, the state, and a gradient with its sum.
    tables = 1 + state / (1 if variant.whole_state else devices)
    tables += 0.1 if variant.rows else 2
    if variant.sharded:
      tables = (1.1 + state) / devices
    need += tables * devices * sum(options.rows) * options.width * 4
  remedy = "All take turns: ask for fewer or smaller tables, devices, variants."
  harness.require_memory(mesh, need, "--rows", remedy)


if __name__ == "__main__":
  served.main(_Worker)

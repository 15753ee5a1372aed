"""`gpu`: everything that one GPU can show, and nothing that it cannot.

Operations beside the floor, and all the local work of zen_sync for 8 devices
beside reads of their gradients, arrays and rows. One device does the work of 8:
under `vmap` with an axis name the exchange is a transpose in memory. A step of
arrays writes the sums over every gradient; what was sent is put back, which is
not timed.
`benchmarks/COLUMNS.md` says more.
"""

import argparse
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import math
from typing import Any, cast, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks import oracle
from benchmarks import record
from benchmarks import table
from benchmarks import workloads
from benchmarks.cases import kernels
from benchmarks.cases.kernels import DEVICES
from benchmarks.cases.sync import AXIS
from benchmarks.cases.sync import LEAF
from benchmarks.cases.sync import tuned
import zenjax
from zenjax.kernels import _dispatch
from zenjax.kernels._dispatch import Kernels

# Rows that devices draw theirs from, over those of one device: the union is
# 4.4 times as large then, as that of vocabularies is.
_POOL = 5.5


class Gradients:
  """`[8, R, D]` whose rows are known, always the same of a number of rows.

  Attributes:
    tables: On the device, handed from step to step; every step donates them.
    listed: The same as SparseRows, which no step changes.
    union: `[U]`, rows that any of them has.
  """

  def __init__(self, rows: int, width: int, density: float):
    rng = np.random.default_rng(rows)
    count = max(1, round(rows * density))
    pool = rng.choice(rows, min(rows, round(_POOL * count)), replace=False)
    each = range(DEVICES)
    found = [np.sort(rng.choice(pool, count, replace=False)) for _ in each]
    values = [oracle.values(rng, (count, width)) for _ in each]
    union = workloads.union(found)
    sums = np.zeros((len(union), width), np.float32)
    for mine, of in zip(found, values):
      sums[np.searchsorted(union, mine)] += of
    self.tables: Any = jnp.zeros((DEVICES, rows, width), jnp.float32)
    self.union = jnp.asarray(union, jnp.int32)
    ids = jnp.asarray(np.stack(found), jnp.int32)
    listed = lambda ids, values: zenjax.SparseRows(ids, values, rows)
    self.listed = jax.vmap(listed)(ids, jnp.asarray(np.stack(values)))
    self._sums = jnp.asarray(sums)

  def restore(self) -> jax.Array:
    """Puts back what was sent, whatever a step has left of it."""
    tables, self.tables = self.tables, None
    listed = self.listed.indices, self.listed.values
    self.tables = _restore(tables, *listed, self.union)
    return self.tables

  def wrong(self, synced: Any) -> int:
    """Elements that are not the sums, where there are none included."""
    if isinstance(synced, zenjax.SparseRows):
      first = jax.tree.map(lambda x: x[0], synced)
      same = jax.tree.map(lambda x: jnp.all(x == x[:1]), synced)
      if not all(jax.tree.leaves(same)):
        return self.listed.values.size  # Devices do not agree.
      synced = first.to_dense()[None]
    return int(_count_wrong(synced, self.union, self._sums))


@functools.partial(jax.jit, donate_argnums=0)
def _restore(tables, rows, values, union):
  def one(table, rows, values):
    table = table.at[union].set(0, unique_indices=True)
    return table.at[rows].set(values, unique_indices=True)

  return jax.vmap(one)(tables, rows, values)


@jax.jit
def _count_wrong(tables, union, sums):
  def one(table):
    got = table[union]
    elsewhere = jnp.count_nonzero(table) - jnp.count_nonzero(got)
    return jnp.count_nonzero(got != sums) + elsewhere

  return jnp.sum(jax.lax.map(one, tables))


class Work(NamedTuple):
  """How gradients are synchronized: by what owners, as rows, after `tune`."""

  partition: str
  rows: bool = False
  tuned: bool = True


class Sync:
  """The steps of one table, which `zenjax.tune` has planned after a first one.

  Attributes:
    shape: Rows, width and density of the gradients.
    states: What the checked step of a case left, by its name.
  """

  def __init__(self, rows: int, width: int, density: float):
    self.shape = rows, width, density
    self.states: dict[str, Any] = {}
    self._seen: dict[Work, Any] = {}

  @functools.cached_property
  def gradients(self) -> Gradients:
    return Gradients(*self.shape)

  def build(
    self, name: str, work: Work, kernels: Kernels, interpreted: bool
  ) -> harness.Built:
    """Compiles a step and checks it.

    `kernels` that are `interpreted` take no time that could be measured.
    """
    gradients, seen = self.gradients, None
    if work.tuned:
      if work not in self._seen:
        found = self._run(self._compile(work, None, "xla", False)[0], work)
        self._seen[work] = found[1]
      seen = self._seen[work]
    compiled, seconds = self._compile(work, seen, kernels, interpreted)
    synced, self.states[name] = self._run(compiled, work)
    usage: Any = compiled.memory_analysis()
    # What any way to find the nonzero rows of a gradient reads.
    needed = gradients.listed.values if work.rows else gradients.tables
    return harness.Built(
      run=None if interpreted else lambda: self._step(compiled, work),
      prepare=None if work.rows else gradients.restore,
      wrong=gradients.wrong(synced),
      compile_s=seconds,
      facts={
        "bytes": float(needed.nbytes),
        "temporary_bytes": float(usage.temp_size_in_bytes),
      },
    )

  def _step(self, compiled, work):
    gradients = self.gradients
    if work.rows:
      return compiled(gradients.listed)
    tables, gradients.tables = gradients.tables, None
    gradients.tables, state = compiled(tables)
    return gradients.tables, state

  def _run(self, compiled, work):
    """One step, and what its devices remember of it."""
    if not work.rows:
      self.gradients.restore()
    synced, state = self._step(compiled, work)
    return synced, jax.tree.map(lambda x: np.asarray(x[0]), state)

  def _compile(self, work, seen, kernels, interpreted):
    grads = self.gradients.listed if work.rows else self.gradients.tables
    donated = () if work.rows else (0,)
    with contextlib.ExitStack() as stack:
      if interpreted:
        stack.enter_context(_dispatch.interpreted("cuda"))
      return harness.compiled(
        step(work.partition, seen, kernels), grads, donate_argnums=donated
      )


def step(partition: Any, seen: Any, kernels: Kernels) -> Any:
  """8 gradients of a table to their sums, arrays in place, and 8 states."""
  tx = zenjax.zen_sync(
    AXIS, sparse=True, op="sum", partition=partition, kernels=kernels
  )

  def one(gradient):
    updates: dict[str, Any] = {LEAF: gradient}
    state = tx.init(updates)
    if seen is not None:
      state = tuned(state, seen)
    synced, state = tx.update(updates, state)
    return cast(dict[str, Any], synced)[LEAF], state

  return jax.vmap(one, axis_name=AXIS, axis_size=DEVICES)


_FIRST = ", first"
WORK = {
  "hash": Work("hash"),
  "columns": Work("columns"),
  "rows": Work("hash", rows=True),
  f"rows{_FIRST}": Work("hash", rows=True, tuned=False),
}
_INTERPRETED = " interpreted"
NO_GPU = (
  "No GPU here: the kernels were interpreted on a small table, which shows"
  " their answers. Nothing was measured on a GPU, and no time is of a kernel."
)
COLUMNS = (
  *kernels.COLUMNS[:-2],
  table.fact("temporary\nMB", "temporary_bytes", unit=1e6),
  *kernels.COLUMNS[-2:],
)


def run(options: argparse.Namespace) -> int:
  """Measures and prints; returns 1 if an answer was wrong, 130 on Ctrl-C.

  Raises:
    ValueError: The accelerator is no GPU, or has too little memory.
  """
  on_gpu = jax.default_backend() == "gpu"
  # Of a large table, and what an interpreter can do.
  sizes = (4_194_304, 128, 0.01) if on_gpu else kernels.INTERPRETED
  for name, size in zip(("rows", "width", "density"), sizes):
    setattr(options, name, getattr(options, name) or size)
  shape = options.rows, options.width, options.density
  _check_device(shape)
  sync = Sync(*shape)
  cases = _cases(options, sync, on_gpu)
  results, complete = harness.measure(cases, repeats=options.repeats)
  ratios = _ratios(results) if on_gpu else {}
  device = jax.devices()[0].device_kind
  title = f"gpu: {device if on_gpu else 'no GPU, ' + device}"
  table.show(f"{title}, JAX {jax.__version__}", results, COLUMNS)
  reports = {name: zenjax.report(s) for name, s in sync.states.items()}
  for name, report in list(reports.items())[-1:]:
    print(f"{name}:\n{report}\n")
  for name, ratio in ratios.items():
    print(f"{name}: {ratio:.2f} times one read of the gradient, {device}")
  if not on_gpu:
    print(NO_GPU)
  told = {
    "measured_on_gpu": on_gpu,
    "note": None if on_gpu else NO_GPU,
    "times_over_one_read": ratios,
    "reports": reports,
  }
  return record.finish(options, results, complete=complete, told=told)


def _check_device(shape):
  """Raises ValueError where the tables cannot be."""
  device = jax.devices()[0]
  if device.platform not in ("gpu", "cpu"):
    raise ValueError(
      f"`gpu` must run on a GPU, or on a CPU to try it, got {device.platform};"
      " set JAX_PLATFORMS=cuda or JAX_PLATFORMS=cpu."
    )
  rows, width, _ = shape
  # Beside the tables: temporaries and the rows that travel.
  need = 1.5 * DEVICES * rows * width * 4
  have = (device.memory_stats() or {}).get("bytes_limit", math.inf)
  if need > have:
    raise ValueError(
      f"`--rows` x `--width` must fit {DEVICES} times in memory, got"
      f" {rows} x {width}, which needs about {need / 1e9:.0f} GB of"
      f" {have / 1e9:.0f} GB: ask for fewer rows."
    )


def _cases(options, sync: Sync, on_gpu: bool) -> list[harness.Case]:
  # The other platform's kernels are seen by `kernels`.
  found = [c for c in kernels.cases(options) if not c.name.endswith(" tpu")]
  rows, width, density = sync.shape
  group = f"{DEVICES} x {rows:,} x {width}  {density:.1%}, all of zen_sync"
  copy = next(case for case in found if case.name == "copy")
  found.append(dataclasses.replace(copy, group=group))
  for label, work in WORK.items():
    for way in ("xla", "pallas"):
      interpreted = way == "pallas" and not on_gpu
      name = f"zen {label} {way}{_INTERPRETED if interpreted else ''}"
      which = name, work, way, interpreted
      found.append(harness.case(group, name, sync.build, *which))
  return found


def _ratios(results: Sequence[harness.Result]) -> dict[str, float]:
  """Times over one read: of `mask_pack`, and of everything."""
  found = {}
  for result in results:
    peers = {r.name: r for r in results if r.group == result.group}
    ratio = kernels.over_read(result, peers)
    if result.name.startswith(("mask_pack", "zen")) and math.isfinite(ratio):
      found[result.name] = ratio
  return found

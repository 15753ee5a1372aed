"""Where row sets come from: a recorded trace, or a workload that is drawn.

Both answer one question: which rows would `n` devices touch in a step? A trace
of fewer devices pools several steps into one of `n`; a workload is drawn anew
for every `n`.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from zenjax import traces
from zenjax._src.schemes.buffer_sizes import Table

# The devices of a workload's statistics, as those in `workloads` are stated.
_WORKLOAD_DEVICES = 8
_WORKLOAD_STEPS = 8

Sets = list[np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
  """One table, and what is known of its gradients.

  Attributes:
    tables: All tables that travel together.
    index: Which of them this is.
    devices: Devices of a step as it was recorded.
    steps: Steps there are.
    draw: From `n` to the sets of `n` devices, step by step. Empty where a trace
      has too few sets.
  """

  tables: tuple[Table, ...]
  index: int
  devices: int
  steps: int
  draw: Callable[[int], list[Sets]]
  pools: bool  # Whether more devices than `devices` are several steps' pooled.

  @property
  def table(self) -> Table:
    return self.tables[self.index]


def load(
  source: str, *, steps: int | None, seed: int, full_size: bool
) -> list[Observed]:
  """The tables of a trace, or the one of a workload.

  Args:
    source: A directory, or the name of a workload, which goes first.
    steps: So many only; by default all of a trace, 8 of a workload.
    seed: Of a workload's ids.
    full_size: A workload as published.

  Raises:
    ValueError: `source` is neither, or the trace is broken or too short.
  """
  if source in workloads.ALL_NAMES:
    workload = workloads.get(source, full_size=full_size)
    return [_of_workload(workload, steps or _WORKLOAD_STEPS, seed)]
  if not pathlib.Path(source).exists():
    raise ValueError(
      "`source` must be a directory that `train_lm.py --trace` wrote, or one of"
      f" {', '.join(workloads.ALL_NAMES)}, got {source!r}."
    )
  if full_size:
    raise ValueError(
      "`--full-size` goes with a workload, got a trace: leave it out."
    )
  return _of_trace(traces.read(source), steps)


def _of_workload(workload, steps, seed):
  f32 = jnp.dtype(jnp.float32)

  def draw(n: int) -> list[Sets]:
    seeds = range(seed, seed + steps)
    return [
      [np.unique(ids) for ids in workloads.ids(workload, n, s)] for s in seeds
    ]

  table = Table(
    name=workload.name,
    num_rows=workload.rows,
    width=workload.width,
    dtype=f32,
    wire_dtype=f32,
  )
  return Observed(
    tables=(table,),
    index=0,
    devices=_WORKLOAD_DEVICES,
    steps=steps,
    draw=draw,
    pools=False,
  )


def _of_trace(trace, steps):
  header = trace.header
  if steps is not None and steps > header.steps:
    raise ValueError(
      f"`--steps` must not exceed the {header.steps} steps of the trace, got"
      f" {steps}: ask for fewer or record more."
    )
  tables = tuple(_plan_table(table) for table in header.tables)
  return [
    Observed(
      tables=tables,
      index=index,
      devices=header.devices,
      steps=steps or header.steps,
      draw=functools.partial(cut, trace.sets[table.name][:steps]),
      pools=True,
    )
    for index, table in enumerate(tables)
  ]


def _plan_table(table: traces.TableInfo) -> Table:
  dtype = jnp.dtype(table.dtype)
  return Table(
    name=table.name,
    num_rows=table.rows,
    width=table.width,
    dtype=dtype,
    wire_dtype=dtype,
  )


def cut(recorded: list[Sets], n: int) -> list[Sets]:
  """Steps of `n` devices from recorded ones; what does not fill one is left.

  A step of more devices is cut into several; steps of fewer are pooled.
  """
  if n > len(recorded[0]):
    recorded = [[ids for step in recorded for ids in step]]
  return [
    step[low : low + n]
    for step in recorded
    for low in range(0, len(step) - n + 1, n)
  ]

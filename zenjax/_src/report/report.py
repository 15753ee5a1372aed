"""Prints what a run has exchanged, as tables for a person to read."""

from collections.abc import Callable, Mapping, Sequence
import textwrap
from typing import Any, NamedTuple

import jax
import numpy as np

from zenjax._src.compress import compress_state
from zenjax._src.compress.compress_state import CompressState
from zenjax._src.core import text
from zenjax._src.core.text import columns
from zenjax._src.report import stats
from zenjax._src.report import tune
from zenjax._src.sync import sharded_optimizer
from zenjax._src.sync import sync_state


def report(state: Any) -> str:
  """Returns a text that says what the last step exchanged.

  Print it after some steps, to see whether sparse synchronization pays and
  what `zenjax.tune` would change. `zenjax.stats` has the same numbers for a
  program.

  Args:
    state: An optimizer state with a `ZenSyncState`, `ShardedOptimizerState` or
      `CompressState` anywhere inside.

  Returns:
    Tables of text, each with a legend:

    - Sparse parameters: the scheme (zen's with its number of column groups, 1
      for hashed rows), the density on a device, the density of the union over
      devices, their ratio (growth), the imbalance of push and pull (the fullest
      buffer over the mean; 1 is even), rounds (1 if all rows fitted the first
      exchange), and megabytes received per device, compared with a dense
      all-reduce.
    - Tables of `zenjax.tables.shard`: the rows that a device looked up, the
      union that owners updated, the buffer size, exchanges of ids and rows,
      exchanges of gradients, and the same bytes.
    - `compress.all_reduce`: a line with the bytes received per device, compared
      with a dense all-reduce, and what a sparsifier counts.

    If all devices hold the same rows, a line asks whether the gradients were
    averaged before: sparse synchronization then saves little.

  Raises:
    ValueError: `state` holds none of these states.
    TypeError: `report` is called inside `jit`; call it on the state after the
      step.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> state = zenjax.zen_sync("data").init({"w": jnp.zeros(3)})
    >>> print(zenjax.report(state))
    zen_sync: no parameter is sent sparsely; all take a dense all-reduce.
  """
  sync_state.require_numbers(state, "report")
  syncs = sync_state.require(state, CompressState)
  lines = _compressed(state)
  if not lines or any(sync.leaves for sync in syncs):
    lines = [*_synced_leaves(state, syncs), *lines]
  return "\n".join(lines)


# --- one form for all tables --------------------------------------------------


class _Column(NamedTuple):
  """One column of a table.

  Attributes:
    heading: The first cell.
    value: The name of a statistic, or a function of all statistics of a row.
    form: Formats a number. Unknown numbers are shown as a dash.
    legend: Explains the column below the table.
  """

  heading: str
  value: str | Callable[[Mapping[str, float]], str | float]
  form: str = ""
  legend: str = ""

  def cell(self, numbers: Mapping[str, float]) -> str:
    key = self.value
    value = numbers[key] if isinstance(key, str) else key(numbers)
    if isinstance(value, str):
      return value
    return format(value, self.form) if np.isfinite(value) else "-"


def _table(
  title: str, known: stats.Stats, shown: Sequence[_Column], names: str = ""
) -> list[str]:
  """Returns the lines of a table: title, headings, a row each, legend."""
  rows = [(names, *(column.heading for column in shown))]
  rows += [(k, *(column.cell(s) for column in shown)) for k, s in known.items()]
  legend = "; ".join(column.legend for column in shown if column.legend)
  text = f"Last step. {legend}; -: not known."
  lines = textwrap.wrap(text, 120, break_on_hyphens=False)
  return [title, *columns(rows), *lines]


def _steps(nodes: Sequence[Any]) -> int:
  return max(int(stats.array(node.step)) for node in nodes)


def _title(by: str, steps: float, devices: float) -> str:
  taken, on = text.count(int(steps), "step"), text.count(int(devices), "device")
  return f"{by} after {taken} on {on}"


def _bytes(s: Mapping[str, float]) -> str:
  """Compares the bytes received with a dense all-reduce."""
  if s.get("went_dense"):
    return "dense"
  gain = stats.ratio(s["dense_bytes"], s["wire_bytes"])
  return f"{gain:.1f}x fewer" if gain > 1 else f"{1 / gain:.2f}x as many"


_ROUNDS = _Column("rounds", "rounds", ".0f", "rounds: exchanges needed")
_RECEIVED = (
  _Column(
    "MB received",
    lambda s: s["wire_bytes"] / 1e6,
    ".3f",
    "MB: received per device",
  ),
  _Column("MB dense", lambda s: s["dense_bytes"] / 1e6, ".3f"),
  _Column("bytes", _bytes, "", "bytes: compared with a dense all-reduce"),
)


# --- leaves that are sent sparsely --------------------------------------------


def _scheme(s: Mapping[str, float]) -> str:
  name = sync_state.SCHEMES[int(s["scheme"])]
  return f"zen/{s['column_groups']:.0f}" if name == "zen" else name


_SHAPE = _Column(
  "rows x width", lambda s: f"{s['num_rows']:.0f} x {s['width']:.0f}"
)
_UNION = (
  _Column("union", "union_density", ".2%", "union: rows of any device"),
  _Column("growth", "growth", ".2f", "growth: their ratio"),
  _Column(
    "push imb", "push_imbalance", ".2f", "imb: fullest buffer over the mean"
  ),
  _Column("pull imb", "pull_imbalance", ".2f"),
)
_SYNCED = (
  _SHAPE,
  _Column("scheme", _scheme, "", "zen/g: rows split in g column groups"),
  _Column("density", "density", ".2%", "density: nonzero rows of a device"),
  *_UNION,
  _ROUNDS,
  *_RECEIVED,
)
_SHARDED = (
  _SHAPE,
  _Column(
    "looked up", "density", ".2%", "looked up: distinct rows of a device"
  ),
  *_UNION,
  _Column("room", "room", ".0f", "room: buffer size for a pair of devices"),
  _Column(
    "fetches", "fetch_rounds", ".0f", "fetches: exchanges of ids and rows"
  ),
  _Column("rounds", "rounds", ".0f", "rounds: exchanges of gradients"),
  *_RECEIVED,
)


def _synced_leaves(
  state: Any, nodes: list[sync_state.ZenSyncState]
) -> list[str]:
  """Returns lines on all leaves of `zen_sync` and `sharded_optimizer`."""
  by = _synchronized_by(state)
  if not any(node.leaves for node in nodes):
    return [
      f"{by}: no parameter is sent sparsely; all take a dense all-reduce."
    ]
  steps = _steps(nodes)
  if not steps:
    return [f"{by}: no step was taken yet."]
  lines = []
  known, tables = stats.synced_leaves(state), stats.sharded_tables(state)
  if known:
    title = _title(by, steps, next(iter(known.values()))["devices"])
    lines += _table(title, known, _SYNCED, "leaf")
    lines += [
      f"{name}: all devices hold the same rows: were the gradients averaged"
      f" before {by}? Remove that pmean."
      for name, numbers in known.items()
      if _same_rows(numbers)
    ]
  if tables:
    devices = next(iter(tables.values()))["devices"]
    title = _title("sharded_optimizer, sharded tables,", steps, devices)
    lines += _table(title, tables, _SHARDED, "table")
  if not lines:
    leaves = [leaf for node in nodes for leaf in node.leaves.values()]
    devices = max(stats.numbers_of(leaf)[0].devices for leaf in leaves)
    if devices > 1:  # The state was moved.
      return [f"{by}: no step was taken on {devices} devices yet."]
    return [f"{by}: there is one device, so nothing was exchanged."]
  return lines + tune.told(state)


def _synchronized_by(state: Any) -> str:
  """Returns the names of the transformations that made the state."""
  kinds = {
    sharded_optimizer.ShardedOptimizerState: "sharded_optimizer",
    sync_state.ZenSyncState: "zen_sync",
  }
  is_one = lambda node: type(node) in kinds
  nodes = jax.tree.leaves(state, is_leaf=is_one)
  transforms = [kinds[type(node)] for node in nodes if is_one(node)]
  return " and ".join(dict.fromkeys(transforms))


def _same_rows(s: Mapping[str, float]) -> bool:
  """Returns True if all devices have the same rows, and not almost all."""
  if s["devices"] < 2 or not 0 < s["density"] < 0.9:
    return False
  # Counts are means in float32, so they are equal up to rounding only.
  return abs(s["union_density"] / s["density"] - 1) < 1e-6


# --- compressors --------------------------------------------------------------


def _compressed(state: Any) -> list[str]:
  lines = []
  for node in compress_state.nodes(state):
    steps, leaves = int(stats.array(node.step)), len(node.leaves)
    wire, dense = (
      float(stats.array(x)) for x in (node.wire_bytes, node.dense_bytes)
    )
    if not leaves:
      lines.append("compress.all_reduce: it compresses no parameter.")
    elif not steps:
      lines.append("compress.all_reduce: no step was taken yet.")
    else:
      received = "nothing received, because there is one device"
      if wire:
        less, ratio = "less", dense / wire
        if ratio < 1:
          less, ratio = "more", 1 / ratio
        received = (
          f"{text.size(wire)} received per device, {ratio:.1f}x {less} than by"
          " a dense all-reduce"
        )
      counts = [
        f"; {name.replace('_', '-')} {float(stats.array(x)):.3g}"
        for name, x in node.stats.items()
      ]
      lines.append(
        f"compress.all_reduce after {text.count(steps, 'step')}:"
        f" {text.count(leaves, 'parameter')}, {received}" + "".join(counts)
      )
  return lines

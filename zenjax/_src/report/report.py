"""Prints what a run has exchanged, as tables for a person to read."""

from collections.abc import Mapping, Sequence
import textwrap
from typing import Any

from zenjax._src.compress import compress_state
from zenjax._src.compress.compress_state import CompressState
from zenjax._src.core import text
from zenjax._src.report import stats
from zenjax._src.report import tune
from zenjax._src.sync import sync_state
from zenjax._src.sync.sharded_optimizer import ShardedOptimizerState
from zenjax._src.sync.sync_state import ZenSyncState


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
  lines = list(map(_compressed, compress_state.nodes(state)))
  if not lines or any(sync.leaves for sync in syncs):
    lines = [*_synced_leaves(state, syncs), *lines]
  return "\n".join(lines)


# --- one form for all tables --------------------------------------------------

# A column of a table: its heading, the format of a cell, and an explanation
# below the table, which may be empty.
_Column = tuple[str, str, str]


def _table(
  by: str, steps: int, names: str, known: stats.Stats, shown: Sequence[_Column]
) -> list[str]:
  """Returns the lines of a table: title, headings, a row each, legend."""
  devices = int(next(iter(known.values()))["devices"])
  taken, on = text.count(steps, "step"), text.count(devices, "device")
  rows = [(names, *(heading for heading, _, _ in shown))]
  for name, numbers in known.items():
    facts = _facts(numbers)
    cells = [form.format(**facts) for _, form, _ in shown]
    rows.append((name, *["-" if "nan" in cell else cell for cell in cells]))
  legend = "; ".join(legend for _, _, legend in shown if legend)
  legend = f"Last step. {legend}; -: not known."
  lines = textwrap.wrap(legend, 120, break_on_hyphens=False)
  return [f"{by} after {taken} on {on}", *text.columns(rows), *lines]


def _facts(s: Mapping[str, float]) -> dict[str, Any]:
  """Returns statistics of a leaf, with those that are read more easily."""
  scheme = sync_state.SCHEMES[int(s["scheme"])]
  if scheme == "zen":
    scheme = f"zen/{s['column_groups']:.0f}"
  gain = stats.ratio(s["dense_bytes"], s["wire_bytes"])
  compared = f"{gain:.1f}x fewer" if gain > 1 else f"{1 / gain:.2f}x as many"
  return {
    **s,
    "scheme": scheme,
    "wire_mb": s["wire_bytes"] / 1e6,
    "dense_mb": s["dense_bytes"] / 1e6,
    "compared": "dense" if s["went_dense"] else compared,
  }


_SHAPE = ("rows x width", "{num_rows:.0f} x {width:.0f}", "")
_UNION = (
  ("union", "{union_density:.2%}", "union: rows of any device"),
  ("growth", "{growth:.2f}", "growth: their ratio"),
  ("push imb", "{push_imbalance:.2f}", "imb: fullest buffer over the mean"),
  ("pull imb", "{pull_imbalance:.2f}", ""),
)
_RECEIVED = (
  ("MB received", "{wire_mb:.3f}", "MB: received per device"),
  ("MB dense", "{dense_mb:.3f}", ""),
  ("bytes", "{compared}", "bytes: compared with a dense all-reduce"),
)
_SYNCED = (
  _SHAPE,
  ("scheme", "{scheme}", "zen/g: rows split in g column groups"),
  ("density", "{density:.2%}", "density: nonzero rows of a device"),
  *_UNION,
  ("rounds", "{rounds:.0f}", "rounds: exchanges needed"),
  *_RECEIVED,
)
_SHARDED = (
  _SHAPE,
  ("looked up", "{density:.2%}", "looked up: distinct rows of a device"),
  *_UNION,
  ("room", "{room:.0f}", "room: buffer size for a pair of devices"),
  ("fetches", "{fetch_rounds:.0f}", "fetches: exchanges of ids and rows"),
  ("rounds", "{rounds:.0f}", "rounds: exchanges of gradients"),
  *_RECEIVED,
)

# --- leaves that are sent sparsely --------------------------------------------


def _synced_leaves(state: Any, nodes: list[ZenSyncState]) -> list[str]:
  """Returns lines on all leaves of `zen_sync` and `sharded_optimizer`."""
  by = _synchronized_by(state)
  if not any(node.leaves for node in nodes):
    return [
      f"{by}: no parameter is sent sparsely; all take a dense all-reduce."
    ]
  steps = max(int(stats.array(node.step)) for node in nodes)
  if not steps:
    return [f"{by}: no step was taken yet."]
  lines = []
  if known := stats.synced_leaves(state):
    lines += _table(by, steps, "leaf", known, _SYNCED)
    lines += [
      f"{name}: all devices hold the same rows: were the gradients averaged"
      f" before {by}? Remove that pmean."
      for name, numbers in known.items()
      if _same_rows(numbers)
    ]
  if tables := stats.sharded_tables(state):
    by_owners = "sharded_optimizer, sharded tables,"
    lines += _table(by_owners, steps, "table", tables, _SHARDED)
  if not lines:
    leaves = [leaf for node in nodes for leaf in node.leaves.values()]
    devices = max(stats.numbers_of(leaf)[0].devices for leaf in leaves)
    if devices > 1:  # The state was moved.
      return [f"{by}: no step was taken on {devices} devices yet."]
    return [f"{by}: there is one device, so nothing was exchanged."]
  return lines + tune.told(state)


def _synchronized_by(state: Any) -> str:
  """Returns the names of the transformations that made the state."""
  kinds = {ShardedOptimizerState: "sharded_optimizer", ZenSyncState: "zen_sync"}
  types: Any = ShardedOptimizerState | ZenSyncState
  nodes = sync_state.nodes(state, types)
  return " and ".join(dict.fromkeys([kinds[type(node)] for node in nodes]))


def _same_rows(s: Mapping[str, float]) -> bool:
  """Returns True if all devices have the same rows, and not almost all."""
  if s["devices"] < 2 or not 0 < s["density"] < 0.9:
    return False
  # Counts are means in float32, so they are equal up to rounding only.
  return abs(s["union_density"] / s["density"] - 1) < 1e-6


# --- compressors --------------------------------------------------------------


def _compressed(node: CompressState) -> str:
  """Returns a line on one `compress.all_reduce`."""
  if not node.leaves:
    return "compress.all_reduce: it compresses no parameter."
  number = lambda x: float(stats.array(x))
  if not number(node.step):
    return "compress.all_reduce: no step was taken yet."
  received = "nothing received, because there is one device"
  if wire := number(node.wire_bytes):
    ratio = number(node.dense_bytes) / wire
    less = f"{ratio:.1f}x less" if ratio >= 1 else f"{1 / ratio:.1f}x more"
    received = (
      f"{text.size(wire)} received per device, {less} than by a dense"
      " all-reduce"
    )
  steps = text.count(int(number(node.step)), "step")
  parameters = text.count(len(node.leaves), "parameter")
  line = f"compress.all_reduce after {steps}: {parameters}, {received}"
  for name, x in node.stats.items():
    line += f"; {name.replace('_', '-')} {number(x):.3g}"
  return line

"""What a run has shown, in numbers and as a table a person reads."""

from typing import Any

import numpy as np

from zenjax import _state
from zenjax._rows import _catch_up_state

# Percentiles of recent needs that pinned sizes should hold. A push that
# overflows costs another and a pull, so it is sized for most steps; a pull
# goes on in small chunks, so it is sized for what nearly every step fills.
_PUSH_PERCENTILE = 90
_PULL_PERCENTILE = 10


def stats(state: Any) -> dict[str, dict[str, float]]:
  """Numbers of the last step for each leaf that travels sparse.

  Args:
    state: An optimizer state with a `ZenSyncState` anywhere inside.

  Returns:
    By leaf name: `num_rows`, `width`, `devices`, `density` (nonzero rows of a
    device over all, mean), `union_density` (those of any device over all),
    `growth` (their ratio), `push_imbalance` (fullest pair over the mean),
    `pull_imbalance` (fullest owner over the mean), `rounds`, `overflow_rows`
    (of all devices, beyond the first push), `wire_bytes` and `dense_bytes`
    (received by a device; a ring all-reduce's), `went_dense`, `withheld`.
    Empty before the first step.

    With `on_overflow="carry"` `density` counts rows that waited too. Where
    `withheld` is 1 some wait again: `union_density` then counts those that
    came back, and `growth` is NaN.

  Raises:
    ValueError: There is no `ZenSyncState` in `state`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.zen_sync("data", sparse=True)
    >>> grads = jnp.zeros((2, 8, 4)).at[:, 3].set(1.0)
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
    >>> _, state = jax.jit(step)(grads)
    >>> zenjax.stats(jax.tree.map(lambda x: x[0], state))["leaf"]["density"]
    0.125
  """
  found: dict[str, dict[str, float]] = {}
  for node in _state.require(state):
    for name, leaf in node.leaves.items():
      if int(np.asarray(leaf.sizes)[0]):
        found[name] = _numbers(leaf)
  return found


def _numbers(leaf: _state.LeafState) -> dict[str, float]:
  sizes = _state.Sizes(*(int(x) for x in np.asarray(leaf.sizes)))
  last = _state.Last(*(float(x) for x in np.asarray(leaf.last)))
  # The union of some rows says nothing of how all of them overlap.
  growth = _ratio(last.union_rows, last.local_rows)
  growth = float("nan") if last.withheld else growth
  mean_owner = last.union_rows / sizes.row_groups
  return {
    "num_rows": sizes.num_rows,
    "width": sizes.width,
    "devices": sizes.devices,
    "scheme": sizes.scheme,
    "column_groups": sizes.column_groups,
    "density": last.local_rows / sizes.num_rows,
    "union_density": last.union_rows / sizes.num_rows,
    "growth": growth,
    "push_imbalance": _ratio(last.push_need, last.push_mean),
    "pull_imbalance": _ratio(last.pull_need, mean_owner),
    "rounds": last.rounds,
    "overflow_rows": last.overflow_rows,
    "wire_bytes": last.wire_bytes,
    "dense_bytes": last.dense_bytes,
    "went_dense": last.went_dense,
    "withheld": last.withheld,
  }


def _ratio(a: float, b: float) -> float:
  return a / b if b else 1.0


def advise(
  state: Any,
  percentiles: tuple[float, float] = (_PUSH_PERCENTILE, _PULL_PERCENTILE),
) -> dict[str, tuple[int, int]]:
  """Capacities to pin, from what recent steps needed.

  Args:
    state: An optimizer state with a `ZenSyncState` anywhere inside.
    percentiles: Of the push and of the pull. With `on_overflow="carry"` what
      does not fit waits: pin `(100, 100)` of steps taken without it.

  Returns:
    By leaf name `(push, pull)` for `zen_sync(capacities=...)`: of what the last
    64 steps needed, the 90th percentile of the push and the 10th of the pull,
    which goes on in small chunks. Steps above break-even do not count: they
    take the dense path whatever is pinned, and a first round large enough for
    them would cost the others as much. Leaves without another step, those that
    travel dense, and all before the first step are left out. Where
    `on_overflow="carry"` withheld rows, the pull is one of the rows that came
    back and may be too small.

    The sizes are for the scheme that took these steps: in another's first round
    they may move more than break-even, of which zen_sync warns.
  """
  advice: dict[str, tuple[int, int]] = {}
  for node in _state.require(state):
    steps = min(int(node.step), _state.HISTORY)
    for name, leaf in node.leaves.items():
      num_rows = int(np.asarray(leaf.sizes)[0])
      needs = np.asarray(leaf.history)[:steps]
      needs = needs[needs[:, 0] != _state.DENSE_STEP]
      if num_rows and len(needs) and not bool(leaf.dense):
        advice[name] = capacity(needs[:, 0], needs[:, 1], num_rows, percentiles)
  return advice


def capacity(
  pushes: np.ndarray,
  pulls: np.ndarray,
  num_rows: int,
  percentiles: tuple[float, float] = (_PUSH_PERCENTILE, _PULL_PERCENTILE),
) -> tuple[int, int]:
  """`(push, pull)` to pin for a table whose recent steps needed these."""
  push = max(1, int(np.percentile(pushes, percentiles[0])))
  pull = int(np.percentile(pulls, percentiles[1]))
  return min(push, num_rows), min(max(push, pull), num_rows)


_HEADINGS = (
  "leaf",
  "rows x width",
  "scheme",
  "density",
  "union",
  "growth",
  "push imb",
  "pull imb",
  "rounds",
  "overflow",
  "MB sent",
  "MB dense",
  "bytes",
  "pin (push, pull)",
)

_WITHHELD = (
  'rows wait: on_overflow="carry" keeps what did not fit for the next step;'
  " density counts all rows to send, union those that came back."
)


def report(state: Any) -> str:
  """A table of what the last step exchanged and what to pin.

  Args:
    state: An optimizer state with a `ZenSyncState` anywhere inside.

  Returns:
    Lines of text: for each sparse leaf its scheme (zen's with the number of
    column groups, 1 for hashed rows), its density on a device, that of the
    union over devices, their ratio (growth), imbalance of push and pull,
    rounds, rows that overflowed the first push, megabytes received by a
    device beside those of a dense all-reduce, whether zen_sync pays by bytes,
    and the `capacities=` to pin. Where `on_overflow="carry"` withheld rows
    there is nothing to compare, and a last line says what was counted. With
    `scheme="auto"` a line for each leaf shows what was predicted for every
    scheme, the chosen one first. Where rows of `lazy_rows(..., catch_up=True)`
    were behind when a step touched them, a line says how many and what to do.

  Raises:
    ValueError: There is no `ZenSyncState` in `state`.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> state = zenjax.zen_sync("data").init({"w": jnp.zeros(3)})
    >>> print(zenjax.report(state))
    zen_sync: no leaf travels sparse; every leaf takes psum.
  """
  lines = _lines(state, _state.require(state))
  return "\n".join([*lines, *_catch_up_state.late_lines(state)])


def _lines(state: Any, nodes: list[_state.ZenSyncState]) -> list[str]:
  if not any(node.leaves for node in nodes):
    return ["zen_sync: no leaf travels sparse; every leaf takes psum."]
  known, advice = stats(state), advise(state)
  if not known:
    return ["zen_sync: no step was taken on more than one device yet."]
  steps = max(int(node.step) for node in nodes)
  rows = [_HEADINGS]
  rows += [_line(name, s, advice.get(name)) for name, s in known.items()]
  devices = int(next(iter(known.values()))["devices"])
  title = f"zen_sync after {steps} steps on {devices} devices"
  lines = [title, *_columns(rows)]
  if advice:
    lines += [f"to pin: capacities={advice}"]
  lines += _predictions(nodes)
  if any(s["withheld"] for s in known.values()):
    lines += [_WITHHELD]
  return lines


def _line(
  name: str, s: dict[str, float], pin: tuple[int, int] | None
) -> tuple[str, ...]:
  return (
    name,
    f"{s['num_rows']:.0f} x {s['width']:.0f}",
    _scheme(s),
    *(_percent(s[key]) for key in ("density", "union_density")),
    *(
      _number(s[key]) for key in ("growth", "push_imbalance", "pull_imbalance")
    ),
    f"{s['rounds']:.0f}",
    f"{s['overflow_rows']:.0f}",
    f"{s['wire_bytes'] / 1e6:.3f}",
    f"{s['dense_bytes'] / 1e6:.3f}",
    _bytes(s),
    str(pin) if pin else "-",
  )


def _scheme(s: dict[str, float]) -> str:
  name = _state.SCHEMES[int(s["scheme"])]
  return f"zen/{s['column_groups']:.0f}" if name == "zen" else name


def _percent(part: float) -> str:
  """A leaf that is summed dense from the start is not looked at."""
  return f"{part:.2%}" if np.isfinite(part) else "-"


def _number(x: float) -> str:
  return f"{x:.2f}" if np.isfinite(x) else "-"


def _predictions(nodes: list[_state.ZenSyncState]) -> list[str]:
  """A line for each leaf for which `scheme="auto"` chose."""
  lines = []
  for node in nodes:
    for name, leaf in node.leaves.items():
      seconds = np.asarray(leaf.predicted)
      if not seconds.any():
        continue
      order = np.argsort(seconds, kind="stable")
      times = [f"{_state.PREDICTED[i]} {seconds[i] * 1e3:.3g}" for i in order]
      lines.append(f"auto, predicted ms for {name}: {', '.join(times)}")
  return lines


def _bytes(s: dict[str, float]) -> str:
  """Whether zen_sync pays for a leaf, by bytes."""
  if s["withheld"]:
    return "rows wait"
  if s["went_dense"]:
    return "dense"
  gain = _ratio(s["dense_bytes"], s["wire_bytes"])
  return f"{gain:.1f}x fewer" if gain > 1 else f"{1 / gain:.2f}x as many"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
  widths = [max(len(cell) for cell in column) for column in zip(*rows)]
  return [
    "  ".join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths))
    ).rstrip()
    for row in rows
  ]

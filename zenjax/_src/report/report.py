"""What a run has shown, as a table a person reads."""

from typing import Any

import jax
import numpy as np

from zenjax._src.core.text import columns
from zenjax._src.report import stats
from zenjax._src.rows import catching_up
from zenjax._src.sync import owner_update
from zenjax._src.sync import sync_state

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


_LEGEND = (
  "of the last step. density: rows of a device that are not zero; union: of all"
  " devices; growth: their ratio;",
  "zen/g: rows split in g column groups; imb: the fullest buffer over the mean;"
  " rounds: exchanges it took;",
  "overflow: rows beyond the first push; MB: received by a device; bytes:"
  " beside a dense all-reduce.",
)

_SAME_ROWS = (
  "{}: all devices hold the same rows: were the gradients averaged before {}?"
  " remove that pmean."
)


def report(state: Any) -> str:
  """A table of what the last step exchanged and what to pin.

  Args:
    state: An optimizer state with a `ZenSyncState`, `SparsifierState` or
      `ErrorFeedbackState` anywhere inside.

  Returns:
    Lines of text: for each sparse leaf its scheme (zen's with the number of
    column groups, 1 for hashed rows), its density on a device, that of the
    union over devices, their ratio (growth), imbalance of push and pull (the
    fullest buffer over the mean: 1 is even), rounds (exchanges it took: 1 where
    all fitted the first), rows that overflowed the first push, megabytes
    received by a device beside those of a dense all-reduce, whether zen_sync
    pays by bytes, and the `capacities=` to pin. Below, what the columns are.

    Where devices hold the same rows a line asks whether their gradients were
    averaged before: then each sends what all have, and little is saved. Where
    `on_overflow="carry"` withheld rows there is nothing to compare, and a last
    line says what was counted. With `scheme="auto"` a line for each leaf shows
    what was predicted for every scheme, the chosen one first. Where rows of
    `lazy_rows(..., catch_up=True)` were behind when a step touched them, a line
    says how many and what to do.

    For each sparsifier (`exdyna`, `micro`) the density wanted and got, the
    threshold, build-up, imbalance of the selections, norm of the residuals,
    rounds, megabytes beside those of a dense all-reduce, and the `capacity=`
    to pin. For each leaf of `error_feedback` the density wanted and got,
    threshold, build-up, imbalance and norm of the residuals; on devices of
    several processes a line says who has them.

  Raises:
    ValueError: There is none of these in `state`.
    TypeError: It is called inside `jit`; call it on the state after the step.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> state = zenjax.zen_sync("data").init({"w": jnp.zeros(3)})
    >>> print(zenjax.report(state))
    zen_sync: no leaf travels sparse; every leaf takes psum.
  """
  sync_state.require_numbers(state, "report")
  lines = [*_sparsifier_lines(state), *stats.lines(state)]
  if not lines or sync_state.find(state):
    lines = [*_lines(state, sync_state.require(state)), *lines]
  return "\n".join([*lines, *catching_up.late_lines(state)])


def _sparsifier_lines(state: Any) -> list[str]:
  if not stats.find(state):
    return []
  known = stats.numbers(state)
  if not known:
    return ["sparsifier: no step was taken yet."]
  first = next(iter(known.values()))
  title = f"after {first['steps']:.0f} steps on {first['devices']:.0f} devices"
  return [
    f"sparsifier {title}",
    *columns(stats.rows(known)),
    *stats.LEGEND,
  ]


def _lines(state: Any, nodes: list[sync_state.ZenSyncState]) -> list[str]:
  by = _synchronized_by(state)
  if not any(node.leaves for node in nodes):
    return [f"{by}: no leaf travels sparse; every leaf takes psum."]
  known, advice = stats.of_leaves(nodes), stats.advise(state)
  steps = max(int(node.step) for node in nodes)
  if not steps:
    return [f"{by}: no step was taken yet."]
  if not known:
    alone = "step was" if steps == 1 else f"{steps} steps were"
    return [f"{by}: the {alone} taken on one device: nothing was exchanged."]
  rows = [_HEADINGS]
  rows += [_line(name, s, advice.get(name)) for name, s in known.items()]
  devices = int(next(iter(known.values()))["devices"])
  title = f"{by} after {steps} steps on {devices} devices"
  lines = [title, *columns(rows), *_LEGEND]
  lines += [_SAME_ROWS.format(k, by) for k, s in known.items() if _same_rows(s)]
  if advice:
    lines += [f"to pin: capacities={advice}"]
  lines += _predictions(nodes)
  if any(s["withheld"] for s in known.values()):
    lines += [_WITHHELD]
  return lines


def _synchronized_by(state: Any) -> str:
  """Names of the transformations that the state is of."""
  kinds = {
    owner_update.OwnerState: "owner_update",
    sync_state.ZenSyncState: "zen_sync",
  }
  is_one = lambda node: type(node) in kinds
  nodes = jax.tree.leaves(state, is_leaf=is_one)
  found = [kinds[type(node)] for node in nodes if is_one(node)]
  return " and ".join(dict.fromkeys(found))


def _same_rows(s: dict[str, float]) -> bool:
  """Whether the union has no row more than a device; all rows tell nothing."""
  if s["withheld"] or s["devices"] < 2 or not 0 < s["density"] < 1:
    return False
  # Counts went through float32.
  return abs(s["union_density"] / s["density"] - 1) < 1e-6


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
  name = sync_state.SCHEMES[int(s["scheme"])]
  return f"zen/{s['column_groups']:.0f}" if name == "zen" else name


def _percent(part: float) -> str:
  """A leaf that is summed dense from the start is not looked at."""
  return f"{part:.2%}" if np.isfinite(part) else "-"


def _number(x: float) -> str:
  return f"{x:.2f}" if np.isfinite(x) else "-"


def _predictions(nodes: list[sync_state.ZenSyncState]) -> list[str]:
  """A line for each leaf for which `scheme="auto"` chose."""
  lines = []
  for node in nodes:
    for name, leaf in node.leaves.items():
      seconds = np.asarray(leaf.predicted)
      if not seconds.any():
        continue
      order = np.argsort(seconds, kind="stable")
      times = [
        f"{sync_state.PREDICTED[i]} {seconds[i] * 1e3:.3g}" for i in order
      ]
      lines.append(f"auto, predicted ms for {name}: {', '.join(times)}")
  return lines


def _bytes(s: dict[str, float]) -> str:
  """Whether zen_sync pays for a leaf, by bytes."""
  if s["withheld"]:
    return "rows wait"
  if s["went_dense"]:
    return "dense"
  gain = stats.ratio(s["dense_bytes"], s["wire_bytes"])
  return f"{gain:.1f}x fewer" if gain > 1 else f"{1 / gain:.2f}x as many"

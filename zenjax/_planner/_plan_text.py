"""A plan as a person reads it, alone and beside what a run has shown."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from zenjax._columns import columns

_HEADINGS = (
  "leaf",
  "shape",
  "travels",
  "exchange",
  "ms",
  "pmean ms",
  "MB",
  "runner-up",
  "ms",
  "because",
)
_COMPARED = (
  "leaf",
  "travels",
  "union planned",
  "seen",
  "ratio",
  "MB planned",
  "seen",
  "ratio",
)


# Times as many bytes as rows tell of: no error of a prediction.
_PADDED = 1.5
# As fast by this, or not worth a word.
_NOTICED = 1.05


def table(plan: Any) -> str:
  """See `Plan`."""
  devices = math.prod(n for _, n in plan.mesh)
  axes = " x ".join(f"{name} {n}" for name, n in plan.mesh)
  machine = f" on {plan.machine}" if plan.machine else ""
  lines = [f"plan for {devices} devices ({axes}){machine}"]
  open_to = [leaf for leaf in plan.leaves if _has_choice(leaf)]
  if open_to:
    lines += columns(
      [_HEADINGS, *(_line(leaf) for leaf in open_to)], last_left=True
    )
  lines += _rest([leaf for leaf in plan.leaves if not _has_choice(leaf)])
  if plan.dense_seconds:
    lines.append(_times(plan))
  lines.append(verdict(plan))
  return "\n".join(lines)


def _times(plan: Any) -> str:
  """Of a whole step, or of its exchanges where no more is known."""
  told = (
    f"{_ms(plan.seconds)} ms, with pmean alone {_ms(plan.dense_seconds)} ms"
  )
  if not plan.compute_seconds:
    return f"all exchanges: {told}; compute_seconds was not given"
  kind = "beside" if plan.overlap else "after"
  return (
    f"a step: {told}, without any exchange {_ms(plan.compute_seconds)} ms;"
    f" exchanges run {kind} the backward pass"
  )


def _has_choice(leaf: Any) -> bool:
  """Whether there was one; of a plan by hand, whether one was made."""
  return bool(leaf.runner_up) or leaf.scheme != "dense"


def _rest(leaves: Sequence[Any]) -> list[str]:
  """What has no choice: most leaves of most models."""
  if not leaves:
    return []
  count = f"{len(leaves)} leaves" if len(leaves) > 1 else leaves[0].name
  size = sum(leaf.wire_bytes for leaf in leaves) / 1e6
  least = _ms(max(leaf.seconds for leaf in leaves))
  return [
    f"pmean, {size:.3g} MB a device, at least {least} ms: {count} without"
    " another way"
  ]


def verdict(plan: Any) -> str:
  """Whether anything gains, in one sentence."""
  gain = plan.dense_seconds / plan.seconds if plan.dense_seconds else 1.0
  what = "a step is" if plan.compute_seconds else "exchanges are"
  if not plan.pays and gain > _NOTICED:
    return (
      "no leaf gains by a sparse exchange. zen_sync sums small leaves in one"
      f" buffer, and {what} predicted to be {gain:.2f}x as fast for it."
    )
  if not plan.pays:
    return "plain pmean is best for every leaf: leave zen_sync out."
  if not plan.dense_seconds:
    return "no time was predicted."
  return f"{what} predicted to be {gain:.2f}x as fast as with pmean alone."


def _line(leaf: Any) -> tuple[str, ...]:
  dense = leaf.scheme == "dense"
  return (
    leaf.name,
    "x".join(map(str, leaf.shape)) or "-",
    "pmean" if dense else leaf.choice,
    "-" if dense else str(leaf.group),
    _ms(leaf.seconds),
    _ms(leaf.dense_seconds),
    f"{leaf.wire_bytes / 1e6:.3g}",
    leaf.runner_up or "-",
    _ms(leaf.runner_up_seconds),
    leaf.reason or "-",
  )


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:.3g}"


def comparison(
  plan: Any, measured: Mapping[str, Mapping[str, float]], seconds: float | None
) -> str:
  """See `Plan.compare`."""
  if seconds is not None and not 0 < seconds < math.inf:
    raise ValueError(
      f"`seconds` must be what a step took, positive, got {seconds!r}; leave it"
      " out where it was not measured."
    )
  sparse = [leaf for leaf in plan.leaves if leaf.scheme != "dense"]
  missing = sorted(leaf.name for leaf in sparse if leaf.name not in measured)
  if missing:
    raise ValueError(
      f"`measured` must tell of every leaf that the plan sends sparse, and does"
      f" not of {missing}; give `zenjax.stats(state)` after a step with"
      " `zen_sync(plan=plan)`."
    )
  found = [_Compared(leaf, measured[leaf.name]) for leaf in sparse]
  found.sort(key=lambda c: -c.error)
  lines = columns([_COMPARED, *(c.line() for c in found)], left=2)
  padded = [c.leaf.name for c in found if c.is_padded]
  if padded:
    lines.append(
      f"more bytes than their rows need: {', '.join(padded)}; first rounds are"
      " guessed until they are pinned, as by zenjax.retune"
    )
  if seconds is not None and not plan.compute_seconds:
    lines.append(
      f"a step: {_ms(seconds)} ms seen; planned were exchanges alone,"
      f" {_ms(plan.seconds)} ms, for compute_seconds was not given"
    )
  elif seconds is not None:
    lines.append(
      f"a step: {_ms(plan.seconds)} ms planned, {_ms(seconds)} ms seen,"
      f" ratio {_ratio(seconds, plan.seconds)}"
    )
  return "\n".join(lines)


class _Compared:
  """One leaf as planned and as seen."""

  def __init__(self, leaf: Any, seen: Mapping[str, float]):
    self.leaf = leaf
    self.union = seen["union_density"] * seen["num_rows"]
    self.bytes = seen["wire_bytes"]
    self.went_dense = bool(seen.get("went_dense", 0))

  @property
  def error(self) -> float:
    """How far off bytes are, as a factor."""
    if not self.leaf.wire_bytes or not self.bytes:
      return math.inf
    return abs(math.log(self.bytes / self.leaf.wire_bytes))

  @property
  def is_padded(self) -> bool:
    """Whether bytes, not rows, are more than was planned."""
    leaf = self.leaf
    if leaf.capacities is not None or self.went_dense or not leaf.union:
      return False
    rows = max(self.union / leaf.union, 1.0)
    return self.bytes > _PADDED * rows * leaf.wire_bytes

  def line(self) -> tuple[str, ...]:
    leaf = self.leaf
    planned = "assumed" if leaf.union is None else f"{leaf.union:.0f}"
    return (
      leaf.name,
      leaf.choice,
      planned,
      f"{self.union:.0f}",
      _ratio(self.union, leaf.union),
      f"{leaf.wire_bytes / 1e6:.3g}",
      f"{self.bytes / 1e6:.3g}",
      _ratio(self.bytes, leaf.wire_bytes),
    )


def _ratio(seen: float, planned: float | None) -> str:
  return f"{seen / planned:.2f}" if planned else "-"

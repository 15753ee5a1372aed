"""`utility`: whether compressed gradients would shorten a step at all."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
from typing import Any

from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.low_bit import LowBit
from zenjax._src.compress.power_sgd import PowerSGD
from zenjax._src.compress.sign import Sign
from zenjax._src.core import text
from zenjax._src.core.arguments import AxisName
from zenjax._src.machine.cost import PMEAN
from zenjax._src.machine.cost import Prediction
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import choice
from zenjax._src.planner import predictions
from zenjax._src.planner import questions
from zenjax._src.planner import timeline
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.planner.timeline import Part
from zenjax._src.sync import plans

_COMPRESSORS = (LowBit(8), LowBit(4), Sign(), PowerSGD(4))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UtilityWay:
  """One way to synchronize all gradients, as `zenjax.planner.utility` sees it.

  Attributes:
    name: `"pmean"`, `"pmean in bfloat16"`, `"zen_sync"` for row gradients of
      tables and whole dense gradients, or a compressor of dense gradients.
    seconds: Predicted time of a step.
    gain: How much shorter a step is than with `pmean`: 0.5 for half the time.
    wire_bytes: Bytes that a device receives in a step.

  Example:
    >>> import zenjax
    >>> zenjax.planner.UtilityWay(
    ...   name="pmean", seconds=0.2, gain=0.0, wire_bytes=1e6
    ... ).gain
    0.0
  """

  name: str
  seconds: float
  gain: float
  wire_bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Utility:
  """The answer of `zenjax.planner.utility`. Print it to see a table.

  Attributes:
    ways: All ways, `pmean` first; compressors only if a leaf is large enough.
    needed_ratio: How many times fewer bytes plain all-reduces would need, so
      that the backward pass hides them. Infinite if one all-reduce, at the end
      of the backward pass, takes all dense gradients. Compressors start after
      the backward pass, so fewer bytes make them faster in any case.
    compute_seconds: Time of a step without any exchange.
    machine: Name of the topology.

  Example:
    >>> import zenjax
    >>> way = zenjax.planner.UtilityWay(
    ...   name="pmean", seconds=0.2, gain=0.0, wire_bytes=1e6
    ... )
    >>> zenjax.planner.Utility(
    ...   ways=(way,), needed_ratio=3.0, compute_seconds=0.1, machine="mine"
    ... ).best.name
    'pmean'
  """

  ways: tuple[UtilityWay, ...]
  needed_ratio: float
  compute_seconds: float
  machine: str

  @property
  def best(self) -> UtilityWay:
    """The fastest way; `pmean` if the gain may be an error of predictions."""
    plain, fastest = self.ways[0], min(self.ways, key=lambda way: way.seconds)
    return fastest if fastest.gain > plans.ERROR else plain

  def __str__(self) -> str:
    lines = [
      (x.name, text.ms(x.seconds), f"{x.gain:+.0%}", text.size(x.wire_bytes))
      for x in self.ways
    ]
    hidden = "plain all-reduces finish during the backward pass"
    if math.isinf(self.needed_ratio):
      hidden = (
        "one all-reduce takes all dense gradients after the backward pass"
      )
    elif self.needed_ratio > 1:
      ratio = f"{self.needed_ratio:.3g}"
      hidden = f"{hidden} if dense gradients have {ratio} times fewer bytes"
    return "\n".join(
      [
        f"a step on {self.machine}, {text.ms(self.compute_seconds)} ms of it"
        " computation",
        *text.columns([("way", "ms", "gain", "received"), *lines]),
        hidden,
      ]
    )


def utility(
  value_and_grad: Callable[..., Any],
  *args: Any,
  topology: Topology,
  compute_seconds: float,
  backward_seconds: float | None = None,
  compressors: Sequence[Compressor] = _COMPRESSORS,
  local_seconds: Mapping[str, float] | None = None,
  axis_name: AxisName = "data",
  profile: Mapping[str, Profile] | None = None,
  trace: str | os.PathLike | None = None,
) -> Utility:
  """Predicts whether compressed gradients would shorten a step at all.

  Ask it before you compress. A plain `pmean` overlaps with the backward pass:
  dense gradients are all-reduced in buckets while others are still computed,
  and only the last bucket is waited for. Compressors start when all gradients
  are there. On fast links that is often slower, although it sends less. `plan`
  predicts steps in the same way, but chooses for each gradient, and sends
  compressed gradients in parts. This function compares one compressor for all
  dense gradients with another.

  With `zenjax.value_and_grad`, matrices that are as tall as a table, but used
  whole, count as dense. With `jax.value_and_grad`, they count as tables, of
  whose rows a step touches one percent. `all_reduce` compresses such matrices
  only if you give it a plan, or choose them by `leaves=`.

  Gradients of tables are complete at the end of the backward pass. `pmean`
  waits for them, all other ways send their rows by `zen_sync`.

  Args:
    value_and_grad: As for `plan`.
    *args: Its arguments on one device: arrays or shapes.
    topology: The machine, as for `plan`.
    compute_seconds: Time of a step on one device without any exchange.
    backward_seconds: The part of it that is the backward pass. By default two
      thirds.
    compressors: The compressors to compare.
    local_seconds: Measured times to encode and decode the gradients of a step,
      by `str(compressor)`, from `zenjax.planner.measure_compressors`. By
      default, they are predicted from the memory bandwidth of the topology.
    axis_name: As for `plan`.
    profile: As for `plan`.
    trace: As for `plan`.

  Returns:
    The predicted steps.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: An argument is out of range or names something unknown.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> def loss(w, x):
    ...   return jnp.mean((x @ w) ** 2)
    >>> shapes = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2
    >>> ask = lambda network: zenjax.planner.utility(
    ...   jax.value_and_grad(loss), *shapes, compute_seconds=0.01,
    ...   topology=zenjax.planner.Topology.network(network, 8, machine="h100"),
    ... )
    >>> ask("400 Gbit/s").best.name, ask("1 Gbit/s").best.name
    ('pmean', 'PowerSGD(4)')

  References:
    Agarwal et al., [On the Utility of Gradient Compression in Distributed
    Training Systems](https://arxiv.org/abs/2103.00543), MLSys 2022.
  """
  question = questions.ask(
    value_and_grad, args, topology, axis_name, profile, trace
  )
  compressors = questions.compressors_of(compressors)
  compute_s = questions.time("compute_seconds", compute_seconds)
  backward_s = compute_s * timeline.BACKWARD
  if backward_seconds is not None:
    backward_s = questions.time("backward_seconds", backward_seconds)
    if backward_s > compute_s:
      raise ValueError(
        "`backward_seconds` must not exceed `compute_seconds`, got"
        f" {backward_s} and {compute_s}."
      )
  question = dataclasses.replace(
    question,
    compressors=compressors,
    local_seconds=questions.measured(local_seconds, compressors),
  )
  model = _Model(question, compute_s, backward_s)
  plain_s, plain_bytes = model.pmean()
  found = [("pmean", plain_s, plain_bytes)]
  found.append(("pmean in bfloat16", *model.pmean(0.5)))
  if model.tables:
    found.append(("zen_sync", *model.by_rows()))
  for compressor in compressors:
    if model.taken_by(compressor):
      found.append((str(compressor), *model.by_rows(compressor)))
  return Utility(
    ways=tuple(
      UtilityWay(name=n, seconds=s, gain=1 - s / plain_s, wire_bytes=b)
      for n, s, b in found
    ),
    needed_ratio=model.needed_ratio(),
    compute_seconds=compute_s,
    machine=topology.name,
  )


class _Model:
  """Step times of a question; each method returns seconds and bytes."""

  def __init__(self, question: Question, compute_s: float, backward_s: float):
    self.question, self.cost = question, question.model
    self.compute_s, self.backward_s = compute_s, backward_s
    self.ways = predictions.every_way(question)
    both = list(zip(question.gradients, self.ways))
    # Tables are the gradients that some scheme could send by rows.
    is_table = lambda ways: any(way.scheme != PMEAN.scheme for way in ways)
    self.tables = [ways for _, ways in both if is_table(ways)]
    self.dense = [gradient for gradient, ways in both if not is_table(ways)]

  def pmean(self, part: float = 1.0) -> tuple[float, float]:
    """Sums whole arrays, of which a cast leaves a `part` of the bytes."""
    dense_s = self._overlapped(self.dense, part=part)
    whole = timeline.all_reduced(self.cost, part * _bytes(self.dense))
    arrays = [ways[PMEAN] for ways in self.tables]
    tables_s = sum(x.once_s + part * (x.seconds - x.once_s) for x in arrays)
    return dense_s + tables_s, whole.received + part * _received(arrays)

  def taken_by(self, compressor: Compressor) -> list[Gradient]:
    """Returns the gradients that a compressor can take."""
    way = PMEAN._replace(compressor=str(compressor))
    both = zip(self.question.gradients, self.ways)
    return [gradient for gradient, ways in both if way in ways]

  def by_rows(
    self, compressor: Compressor | None = None
  ) -> tuple[float, float]:
    """Sends rows of tables, and compresses or sums dense gradients."""
    chosen = choice.choose(self.tables) or []
    rows = [ways[way] for ways, way in zip(self.tables, chosen)]
    rest, sent, parts = self.dense, [], []
    if compressor is not None:
      mine = self.taken_by(compressor)
      rest = [x for x in self.dense if x not in mine]
      rate = predictions.seconds_per_byte(self.question, compressor)
      sent = [predictions.compressed(self.question, compressor, rate, mine)]
      parts = [Part.of(x, ready=1.0) for x in sent]
    whole = timeline.all_reduced(self.cost, _bytes(rest))
    seconds = self._overlapped(rest, parts) + choice.seconds(rows)
    return seconds, _received([*rows, whole, *sent])

  def needed_ratio(self) -> float:
    """How many times fewer bytes the backward pass could hide."""
    is_alone = self.question.topology.devices == 1
    if len(self._buckets(self.dense)) == 1 and not is_alone:
      return math.inf
    wire = timeline.all_reduced(self.cost, _bytes(self.dense))
    return (wire.seconds - wire.once_s) / self.backward_s

  def _overlapped(
    self,
    gradients: Sequence[Gradient],
    others: Sequence[Part] = (),
    part: float = 1.0,
  ) -> float:
    """A step in which a `part` of gradients is summed during backward."""
    parts = [*self._buckets(gradients, part), *others]
    return timeline.seconds(parts, self.compute_s, self.backward_s)

  def _buckets(
    self, gradients: Sequence[Gradient], part: float = 1.0
  ) -> list[Part]:
    sizes = [(x.ready, part * x.dense_bytes) for x in gradients]
    return timeline.buckets(self.cost, sizes)


def _bytes(gradients: Sequence[Gradient]) -> float:
  return float(sum(x.dense_bytes for x in gradients))


def _received(predictions: Sequence[Prediction]) -> float:
  return sum(x.received for x in predictions)

"""Finds the ways of a table that train as the user's program for one device."""

from collections.abc import Sequence

from zenjax._src.machine.cost import Ways
from zenjax._src.planner.optimizer_facts import Optimizer
from zenjax._src.planner.questions import Gradient
from zenjax._src.planner.questions import Question
from zenjax._src.sync.plans import form_of
from zenjax._src.sync.plans import OF_ARRAYS
from zenjax._src.sync.plans import OF_OWNERS
from zenjax._src.sync.plans import ROWS
from zenjax._src.sync.plans import SHARDED
from zenjax._src.sync.plans import XLA
from zenjax._src.sync.plans import ZERO1

# Why a table cannot have some forms.
MOVES = (
  "`tx` may change rows that have no gradient, so an array of all rows would"
  " train differently"
)
SUMS = (
  "`tx` sums over all rows, but each device would see only some of them. To"
  " clip by a norm, give `clip_norm=`"
)
# The same if gradients are compressed, inside `zenjax.data_parallel`.
_APART = (
  "updates depend on a norm of all gradients, and owners of rows do not see"
  " compressed gradients"
)
_BY_XLA = "XLA shards no tables in a per-device step"
_COPIES = (
  "a per-device step has no copies of sharded tables along a second axis"
)


def ways(question: Question, predicted: Sequence[Ways]) -> list[Ways]:
  """Returns the ways of each gradient that give the same training.

  Args:
    question: The question.
    predicted: Every way of each gradient.

  Raises:
    ValueError: A form is demanded, but is not one of them, or there is none,
      because the optimizer mixes the rows of a table.
  """
  optimizer = question.optimizer
  return [
    of_leaf
    if optimizer is None or gradient.look_ups is None
    else _of_table(question, gradient, of_leaf, optimizer)
    for gradient, of_leaf in zip(question.gradients, predicted)
  ]


def beside_compressed(question: Question) -> dict[str, str]:
  """Returns why tables cannot have some forms if gradients are compressed."""
  refused = {XLA: _BY_XLA}
  if len(question.axes) > 1:
    refused[SHARDED] = _COPIES
  if question.optimizer is not None and question.optimizer.sums_all:
    refused |= {form: _APART for form in OF_OWNERS}
  return refused


def _of_table(
  question: Question, gradient: Gradient, of_leaf: Ways, optimizer: Optimizer
) -> Ways:
  """Returns the ways of a table that give the same training."""
  refused: dict[str, str] = {}
  if gradient.name not in optimizer.resting:
    refused |= {k: MOVES for k in OF_ARRAYS}
  if question.per_device:
    refused |= beside_compressed(question)
  if optimizer.sums:
    refused |= {k: SUMS for k in OF_OWNERS}
  mixing = optimizer.mixing.get(gradient.name)
  if mixing:
    refused |= {k: mixing for k in (ROWS, *OF_OWNERS)}
  possible = {
    way: x for way, x in of_leaf.items() if form_of(way.scheme) not in refused
  }
  if mixing and not possible:
    raise ValueError(
      "`tx` must update a row by that row alone, or by sums over all gradients."
      f" For table {gradient.name!r}, {mixing}. Give this table another"
      " optimizer, such as `optax.adagrad`, with `optax.partition`."
    )
  form = question.forms.get(gradient.name)
  forms = {form_of(way.scheme) for way in of_leaf}
  if form is None or form in forms - set(refused):
    return possible
  missing = {
    XLA: f"its shape {gradient.shape} must have two dimensions and a number of"
    f" rows that {question.topology.devices} devices divide",
    ZERO1: "this form needs a topology with one level",
    SHARDED: "the plan is for only one device"
    if question.topology.devices == 1
    else "the table does not have two dimensions",
  }
  raise ValueError(
    f"`forms[{gradient.name!r}]` cannot be {form!r}, because"
    f" {refused[form] if form in forms else missing[form]}. Leave the form out"
    " to let the plan choose."
  )

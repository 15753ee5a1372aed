"""Parts of the planner that its tests, and those of benchmarks, take alone."""

from collections.abc import Sequence

from zenjax._src.machine import local_work
from zenjax._src.planner import choosing
from zenjax._src.planner import gradient_trace
from zenjax._src.planner import record
from zenjax._src.planner import recorded_runs
from zenjax._src.planner import table_forms
from zenjax._src.planner.choosing import Question
from zenjax._src.planner.gradient_trace import Gradient
from zenjax._src.planner.timeline import Assignment
from zenjax._src.planner.timeline import Exchange
from zenjax._src.planner.timeline import GroupCosts
from zenjax._src.planner.timeline import iteration_seconds
from zenjax._src.planner.timeline import NEVER
from zenjax._src.planner.timeline import Option
from zenjax._src.planner.timeline import search
from zenjax._src.planner.timeline import Tensor
from zenjax._src.rows.sharded_tables import words_of_step
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.sync import plans

__all__ = (
  "Assignment",
  "buffer_sizes",
  "choosing",
  "each_by",
  "Exchange",
  "Gradient",
  "gradient_trace",
  "GroupCosts",
  "iteration_seconds",
  "local_work",
  "NEVER",
  "Option",
  "plans",
  "Question",
  "record",
  "recorded_runs",
  "search",
  "Table",
  "table_forms",
  "Tensor",
  "words_of_step",
)


def each_by(tensors: Sequence[Tensor], names: Sequence[str]) -> Assignment:
  """Returns one exchange for each tensor, by the option so named."""
  found = []
  for j, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
    option = tensor.option(name)
    assert option is not None, (tensor.name, name)
    found.append(Exchange(j, j + 1, option))
  return tuple(found)

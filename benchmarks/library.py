"""The parts inside zenjax that benchmarks look at, and users do not.

Where one of these moves, only its line here changes.
"""

from zenjax._src.core import indexing as indexing
from zenjax._src.core import partition as partition
from zenjax._src.planner import overlap as overlap
from zenjax._src.planner import plan_model as plan_model
from zenjax._src.planner import predictions as predictions
from zenjax._src.planner import questions as questions

"""Predicts step times, and chooses how gradients and tables are handled.

Use `plan` to choose how each gradient is synchronized on a machine, and pass
the result to `zen_sync(plan=...)`. Use `plan_tables` to choose whether tables
are replicated or sharded, and `TablePlan.set_up` to train so. Use `record` to
write the rows that a run touches to a trace, which both functions can read.
"""

from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.measure import measure_links
from zenjax._src.machine.measure import measure_work
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner import traces
from zenjax._src.planner.compressor_work import measure_compressors
from zenjax._src.planner.measured_plans import measure_plans
from zenjax._src.planner.plan_model import plan
from zenjax._src.planner.record import record
from zenjax._src.planner.record import Recorder
from zenjax._src.planner.table_plan import plan_tables
from zenjax._src.planner.table_plan import TableForm
from zenjax._src.planner.table_plan import TablePlan
from zenjax._src.planner.table_program import Program
from zenjax._src.planner.utility import Utility
from zenjax._src.planner.utility import utility
from zenjax._src.planner.utility import UtilityWay
from zenjax._src.report.stats import profile
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan

__all__ = (
  "LeafPlan",
  "Link",
  "measure_compressors",
  "measure_links",
  "measure_plans",
  "measure_work",
  "plan",
  "plan_tables",
  "Plan",
  "profile",
  "Profile",
  "Program",
  "record",
  "Recorder",
  "TableForm",
  "TablePlan",
  "Topology",
  "traces",
  "utility",
  "Utility",
  "UtilityWay",
  "Work",
)

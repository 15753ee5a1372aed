"""Predicts step times, and chooses how gradients and tables are handled.

Use `plan` to choose how each table is held and each gradient synchronized on a
machine, and `set_up` to train so, or pass the plan to `zen_sync(plan=...)`. Use
`utility` to find out whether compressed gradients would shorten a step at all,
and `record` to write the rows that a run touches to a trace, which both read.
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
from zenjax._src.planner.program import Program
from zenjax._src.planner.program import set_up
from zenjax._src.planner.record import record
from zenjax._src.planner.record import Recorder
from zenjax._src.planner.utility import Utility
from zenjax._src.planner.utility import utility
from zenjax._src.planner.utility import UtilityWay
from zenjax._src.report.stats import profile
from zenjax._src.sync.plans import Alternative
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan

__all__ = (
  "Alternative",
  "LeafPlan",
  "Link",
  "measure_compressors",
  "measure_links",
  "measure_plans",
  "measure_work",
  "plan",
  "Plan",
  "profile",
  "Profile",
  "Program",
  "record",
  "Recorder",
  "set_up",
  "Topology",
  "traces",
  "utility",
  "Utility",
  "UtilityWay",
  "Work",
)

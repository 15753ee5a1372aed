"""Sparse gradient synchronization for JAX, as an optax transformation."""

from zenjax import packed
from zenjax._src.core.sparse_rows import SparseRows
from zenjax._src.machine.cost import Profile
from zenjax._src.machine.link_models import Link
from zenjax._src.machine.link_models import Work
from zenjax._src.machine.local_work import measure_work
from zenjax._src.machine.measure import measure_links
from zenjax._src.machine.topologies import Level
from zenjax._src.machine.topologies import Topology
from zenjax._src.planner.make import plan
from zenjax._src.planner.record import record
from zenjax._src.planner.record import Recorder
from zenjax._src.planner.retune import retune
from zenjax._src.planner.retune import Retuned
from zenjax._src.report.check import check
from zenjax._src.report.check import Checked
from zenjax._src.report.report import report
from zenjax._src.report.stats import advise
from zenjax._src.report.stats import profile
from zenjax._src.report.stats import sparsifier_stats
from zenjax._src.report.stats import stats
from zenjax._src.rows.catching_up import catch_up
from zenjax._src.rows.catching_up import CatchUpState
from zenjax._src.rows.explain import explain_tables
from zenjax._src.rows.explain import Explanation
from zenjax._src.rows.explain import TableUse
from zenjax._src.rows.lazy import apply_updates
from zenjax._src.rows.lazy import lazy_rows
from zenjax._src.rows.norm import clip_by_global_norm
from zenjax._src.rows.row_adagrad import row_adagrad
from zenjax._src.rows.row_adagrad import RowAdagradState
from zenjax._src.rows.value_and_grad import grad
from zenjax._src.rows.value_and_grad import value_and_grad
from zenjax._src.sparsify.error_feedback import error_feedback
from zenjax._src.sparsify.exdyna import exdyna
from zenjax._src.sparsify.exdyna import micro
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.sparsifier_state import SparsifierState
from zenjax._src.sparsify.sparsifier_state import SparsifierStats
from zenjax._src.sparsify.top_k import random_k
from zenjax._src.sparsify.top_k import threshold
from zenjax._src.sparsify.top_k import top_k
from zenjax._src.sync.owner_update import owner_update
from zenjax._src.sync.owner_update import OwnerState
from zenjax._src.sync.plans import LeafPlan
from zenjax._src.sync.plans import Plan
from zenjax._src.sync.sync_state import ZenSyncState
from zenjax._src.sync.zen_sync import sparse_pmean
from zenjax._src.sync.zen_sync import sparse_psum
from zenjax._src.sync.zen_sync import zen_sync
from zenjax._src.training.data_parallel import data_parallel
from zenjax._src.training.global_values import global_norm
from zenjax._src.training.global_values import weighted_mean
from zenjax._src.training.placement import as_varying
from zenjax._src.training.placement import init
from zenjax._src.training.placement import state_specs
from zenjax._src.training.reshard import reshard
from zenjax._version import __version__

__all__ = (
  "__version__",
  "advise",
  "apply_updates",
  "as_varying",
  "catch_up",
  "CatchUpState",
  "check",
  "Checked",
  "clip_by_global_norm",
  "data_parallel",
  "error_feedback",
  "ErrorFeedbackState",
  "exdyna",
  "explain_tables",
  "Explanation",
  "global_norm",
  "grad",
  "init",
  "lazy_rows",
  "LeafPlan",
  "Level",
  "Link",
  "measure_links",
  "measure_work",
  "micro",
  "owner_update",
  "OwnerState",
  "packed",
  "plan",
  "Plan",
  "profile",
  "Profile",
  "random_k",
  "record",
  "Recorder",
  "report",
  "reshard",
  "retune",
  "Retuned",
  "row_adagrad",
  "RowAdagradState",
  "sparse_pmean",
  "sparse_psum",
  "SparseRows",
  "sparsifier_stats",
  "SparsifierState",
  "SparsifierStats",
  "state_specs",
  "stats",
  "TableUse",
  "threshold",
  "top_k",
  "Topology",
  "value_and_grad",
  "weighted_mean",
  "Work",
  "zen_sync",
  "ZenSyncState",
)

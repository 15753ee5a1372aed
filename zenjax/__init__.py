"""Sparse gradient synchronization for JAX, as an optax transformation."""

from zenjax import packed
from zenjax._check import check
from zenjax._check import Checked
from zenjax._cost import Profile
from zenjax._data_parallel import data_parallel
from zenjax._link import Link
from zenjax._link import Work
from zenjax._of_all import global_norm
from zenjax._of_all import weighted_mean
from zenjax._owner_update import owner_update
from zenjax._owners import OwnerState
from zenjax._placement import as_varying
from zenjax._placement import init
from zenjax._placement import state_specs
from zenjax._planner._levels import Level
from zenjax._planner._links import measure_links
from zenjax._planner._make import plan
from zenjax._planner._plan import LeafPlan
from zenjax._planner._plan import Plan
from zenjax._planner._record import record
from zenjax._planner._record import Recorder
from zenjax._planner._retune import retune
from zenjax._planner._retuned import Retuned
from zenjax._planner._topology import Topology
from zenjax._planner._work import measure_work
from zenjax._profile import profile
from zenjax._report import report
from zenjax._reshard import reshard
from zenjax._rows._catch_up import catch_up
from zenjax._rows._catch_up_state import CatchUpState
from zenjax._rows._explain import explain_tables
from zenjax._rows._explain import Explanation
from zenjax._rows._explain import TableUse
from zenjax._rows._lazy import apply_updates
from zenjax._rows._lazy import lazy_rows
from zenjax._rows._norm import clip_by_global_norm
from zenjax._rows._row_adagrad import row_adagrad
from zenjax._rows._row_adagrad import RowAdagradState
from zenjax._rows._sparse_rows import SparseRows
from zenjax._rows._value_and_grad import grad
from zenjax._rows._value_and_grad import value_and_grad
from zenjax._sparsify._error_feedback import error_feedback
from zenjax._sparsify._exdyna import exdyna
from zenjax._sparsify._exdyna import micro
from zenjax._sparsify._local import random_k
from zenjax._sparsify._local import threshold
from zenjax._sparsify._local import top_k
from zenjax._sparsify._state import ErrorFeedbackState
from zenjax._sparsify._state import SparsifierState
from zenjax._sparsify._state import SparsifierStats
from zenjax._sparsify._stats import sparsifier_stats
from zenjax._state import ZenSyncState
from zenjax._stats import advise
from zenjax._stats import stats
from zenjax._transform import sparse_pmean
from zenjax._transform import sparse_psum
from zenjax._transform import zen_sync
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

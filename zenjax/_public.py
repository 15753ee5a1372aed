"""Lists all public names of `zenjax`, and where each is defined."""

from zenjax import compress
from zenjax import packed
from zenjax import planner
from zenjax import rows
from zenjax import tables
from zenjax._src.gradients.value_and_grad import value_and_grad
from zenjax._src.report.check import check_step
from zenjax._src.report.check import StepCheck
from zenjax._src.report.report import report
from zenjax._src.report.stats import stats
from zenjax._src.report.tune import tune
from zenjax._src.rows.lazy import apply_updates
from zenjax._src.rows.lazy import lazy_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.sync.delayed import delayed
from zenjax._src.sync.sharded_optimizer import sharded_optimizer
from zenjax._src.sync.sharded_optimizer import ShardedOptimizerState
from zenjax._src.sync.sync_state import ZenSyncState
from zenjax._src.sync.zen_sync import sparse_pmean
from zenjax._src.sync.zen_sync import sparse_psum
from zenjax._src.sync.zen_sync import zen_sync
from zenjax._src.training.data_parallel import data_parallel
from zenjax._src.training.global_values import global_norm
from zenjax._src.training.global_values import weighted_mean
from zenjax._src.training.local_steps import local_steps
from zenjax._src.training.per_device import per_device
from zenjax._src.training.placement import init_state
from zenjax._src.training.placement import state_specs
from zenjax._src.training.placement import unreduced
from zenjax._src.training.reshard import from_checkpoint
from zenjax._src.training.reshard import to_checkpoint
from zenjax._version import __version__

__all__ = (
  "__version__",
  "apply_updates",
  "check_step",
  "compress",
  "data_parallel",
  "delayed",
  "from_checkpoint",
  "global_norm",
  "init_state",
  "lazy_rows",
  "local_steps",
  "packed",
  "per_device",
  "planner",
  "report",
  "rows",
  "sharded_optimizer",
  "ShardedOptimizerState",
  "sparse_pmean",
  "sparse_psum",
  "SparseRows",
  "state_specs",
  "stats",
  "StepCheck",
  "tables",
  "to_checkpoint",
  "tune",
  "unreduced",
  "value_and_grad",
  "weighted_mean",
  "zen_sync",
  "ZenSyncState",
)

"""Sparse gradient synchronization for JAX, as an optax transformation."""

from zenjax._cost import Link
from zenjax._cost import Profile
from zenjax._cost import Work
from zenjax._data_parallel import data_parallel
from zenjax._placement import as_varying
from zenjax._placement import init
from zenjax._placement import reshard
from zenjax._placement import state_specs
from zenjax._profile import profile
from zenjax._report import advise
from zenjax._report import report
from zenjax._report import stats
from zenjax._rows._sparse_rows import SparseRows
from zenjax._state import ZenSyncState
from zenjax._transform import sparse_pmean
from zenjax._transform import sparse_psum
from zenjax._transform import zen_sync
from zenjax._version import __version__

__all__ = (
  "__version__",
  "advise",
  "as_varying",
  "data_parallel",
  "init",
  "Link",
  "profile",
  "Profile",
  "report",
  "reshard",
  "sparse_pmean",
  "sparse_psum",
  "SparseRows",
  "state_specs",
  "stats",
  "Work",
  "zen_sync",
  "ZenSyncState",
)

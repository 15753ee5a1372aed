"""Eight fake CPU devices and strict numerics for every test."""

import importlib.util
import os
import pathlib
import signal
import sys
import tempfile

# Compiling is most of the time. What a process has compiled serves those that
# it starts, and LLVM optimizes nothing. JAX and XLA read both as they are
# imported. JAX writes its cache in place, so no two workers share a folder: one
# would read what the other has half written. A compiler without its device
# cannot read back what it compiled.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if not importlib.util.find_spec("libtpu"):
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="zenjax-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
  if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
      os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["PYTEST_XDIST_WORKER"]
    )
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell has what it starts in the background ignore Ctrl-C, and processes that
# tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# Importlib mode leaves `sys.path` alone.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "helpers"))

# "ci" draws the same cases on every run; "explore" is for hunting by hand:
# ZENJAX_HYPOTHESIS=explore python -m pytest tests/schemes/test_properties.py
_COMMON = {
  "deadline": None,
  "database": None,
  "print_blob": True,
  "suppress_health_check": [
    hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.data_too_large,
  ],
}
hypothesis.settings.register_profile("ci", derandomize=True, **_COMMON)
hypothesis.settings.register_profile("explore", **_COMMON)
hypothesis.settings.load_profile(os.environ.get("ZENJAX_HYPOTHESIS", "ci"))


@pytest.fixture
def as_optax_computes():
  """Optax promotes dtypes and ranks."""
  with jax.numpy_dtype_promotion("standard"):
    with jax.numpy_rank_promotion("allow"):
      yield

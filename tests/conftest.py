"""Eight fake CPU devices and strict numerics for every test."""

import os
import pathlib
import sys

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

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

"""Which implementation of an operation a program runs."""

import forced
import jax
import jax.numpy as jnp
import pytest
from runners import AXIS

import zenjax
from zenjax.kernels import _dispatch
from zenjax.kernels.operations import OPERATIONS

TX = zenjax.zen_sync(AXIS, sparse=True, capacities=(8, 8))
GRADS = {"t": jnp.zeros((2, 8, 4)).at[:, 3].set(1.0)}


def step(local):
  return TX.update(local, TX.init(local))[1]


def ran_by(sync, *grads):
  """Names of the operations that a program runs, by implementation."""
  with _dispatch.recording() as calls:
    jax.eval_shape(jax.vmap(sync, axis_name=AXIS), *grads)
  return {
    by: list(dict.fromkeys(c.name for c in calls if bool(c.kernels) == kernel))
    for by, kernel in (("XLA", False), ("Pallas", True))
  }


def test_reference_runs_where_nothing_was_measured():
  assert ran_by(step, GRADS) == {"XLA": list(OPERATIONS), "Pallas": []}


def test_kernels_that_are_forced_run():
  with _dispatch.forced("cuda", interpret=True):
    assert ran_by(step, GRADS)["Pallas"] == list(OPERATIONS)
  with _dispatch.forced(None):
    assert ran_by(step, GRADS)["XLA"] == list(OPERATIONS)
  # Rows of bfloat16 cannot be moved one by one on a TPU.
  with _dispatch.forced("tpu", interpret=True):
    ran = ran_by(step, {"t": GRADS["t"].astype(jnp.bfloat16)})
  assert "expand" in ran["XLA"] and "mask_pack" in ran["Pallas"]


@pytest.mark.parametrize("platform", ["cuda", None])
def test_the_switch_is_obeyed_whatever_is_forced(platform):
  """Two tables that travel as one by XLA alone: kernels read one table."""
  grads = GRADS | {"u": GRADS["t"]}

  def ran(kernels):
    tuning = zenjax.Tuning(kernels=kernels)
    tx = zenjax.zen_sync(AXIS, sparse=True, tuning=tuning)
    return ran_by(lambda local: tx.update(local, tx.init(local))[1], grads)

  with _dispatch.forced(platform, interpret=True):
    assert ran("xla")["Pallas"] == []
    assert ran("pallas") == {"XLA": [], "Pallas": list(OPERATIONS)}
  assert ran("auto") == ran("xla") == {"XLA": ["merge"], "Pallas": []}


def test_rows_need_no_mask():
  def sync(ids, values):
    rows = zenjax.SparseRows(ids, values, 8)
    return zenjax.sparse_psum(rows, AXIS).to_dense()

  ran = ran_by(sync, jnp.array([[3, 1], [1, 2]]), jnp.ones((2, 2, 4)))
  assert ran == {"XLA": ["merge"], "Pallas": []}


@pytest.mark.parametrize("platform, kernels", [("tpu", True), ("cpu", False)])
def test_follows_the_platform_of_the_program(platform, kernels, monkeypatch):
  """A kernel measured on TPUs runs on them alone."""
  forced.mask_pack_measured_on(monkeypatch, "tpu")
  mapped = jax.jit(jax.vmap(step, axis_name=AXIS))
  text = mapped.trace(GRADS).lower(lowering_platforms=(platform,)).as_text()
  assert ("tpu_custom_call" in text) == kernels

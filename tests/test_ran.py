"""What a report says of the implementation is what the program runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runners import AXIS

import zenjax
from zenjax import _masked
from zenjax import _ran
from zenjax.kernels import _dispatch
from zenjax.kernels import operations
from zenjax.kernels._dispatch import Call
from zenjax.kernels._dispatch import EVERYWHERE
from zenjax.kernels.operations import OPERATIONS

ALL = "mask_pack, compact, merge, expand"
TX = zenjax.zen_sync(AXIS, sparse=True, capacities=(8, 8))


def step(local):
  return TX.update(local, TX.init(local))[1]


def state_of(grads):
  state = jax.jit(jax.vmap(step, axis_name=AXIS))(grads)
  return jax.tree.map(lambda x: x[0], state)


GRADS = {"t": jnp.zeros((2, 8, 4)).at[:, 3].set(1.0)}


def last_line(state):
  return zenjax.report(state).splitlines()[-1]


def test_reference_runs_where_nothing_was_measured():
  state = state_of(GRADS)
  assert last_line(state) == f"local operations: {ALL} by XLA"
  numbers = zenjax.stats(state)["t"]
  assert (numbers["by_xla"], numbers["by_pallas"]) == (4, 0)


def ran_by(sync, *grads):
  """What a program here runs, which is traced and not run."""
  with _dispatch.recording() as calls:
    jax.eval_shape(jax.vmap(sync, axis_name=AXIS), *grads)
  number = _ran.number(calls)
  assert isinstance(number, int)
  return _ran.decode(number)


def test_kernels_that_are_forced_are_told():
  with _dispatch.forced("cuda", interpret=True):
    assert ran_by(step, GRADS)["Pallas"] == list(OPERATIONS)
  with _dispatch.forced(None):
    assert ran_by(step, GRADS)["XLA"] == list(OPERATIONS)
  # Rows of bfloat16 cannot be moved one by one on a TPU.
  with _dispatch.forced("tpu", interpret=True):
    told = ran_by(step, {"t": GRADS["t"].astype(jnp.bfloat16)})
  assert "expand" in told["XLA"] and "mask_pack" in told["Pallas"]


def test_rows_need_no_mask():
  def sync(ids, values):
    rows = zenjax.SparseRows(ids, values, 8)
    return zenjax.sparse_psum(rows, AXIS).to_dense()

  told = ran_by(sync, jnp.array([[3, 1], [1, 2]]), jnp.ones((2, 2, 4)))
  assert told == {"XLA": ["merge"], "Pallas": []}


@pytest.mark.parametrize("platform, kernels", [("tpu", True), ("cpu", False)])
def test_follows_the_platform_of_the_program(platform, kernels, monkeypatch):
  """A kernel measured on TPUs runs on them alone."""
  measured = dataclasses.replace(
    operations.mask_pack, measured={"tpu": "a.json"}
  )
  monkeypatch.setattr(_masked, "mask_pack", measured)
  mapped = jax.jit(jax.vmap(step, axis_name=AXIS))
  text = mapped.trace(GRADS).lower(lowering_platforms=(platform,)).as_text()
  assert ("tpu_custom_call" in text) == kernels


def test_one_platform_can_run_both():
  calls = [
    Call("mask_pack", frozenset({"tpu"})),
    Call("compact", frozenset({"cuda", "tpu"})),
    Call("compact", frozenset()),
    Call("merge", frozenset({EVERYWHERE})),
  ]
  number = functools.partial(_ran.number, calls)
  here = _ran.decode(int(jax.jit(number)()))
  assert here == {"XLA": ["mask_pack", "compact"], "Pallas": ["merge"]}
  assert _ran.decode(_ran._encode(calls, "cuda")) == {
    "XLA": ["mask_pack", "compact"],
    "Pallas": ["compact", "merge"],
  }
  codes = [_ran._encode(calls, name) for name in ("tpu", "cuda")]
  for platform, code in zip(("tpu", "cuda"), codes):
    lowered = jax.jit(number).trace().lower(lowering_platforms=(platform,))
    assert f"dense<{code}>" in lowered.as_text()
  assert np.unique(codes).size == 2

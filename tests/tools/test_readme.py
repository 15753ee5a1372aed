"""The README's code, as a reader would paste it."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import zenjax

_README = pathlib.Path(__file__).resolve().parents[2] / "README.md"

in_checkout = pytest.mark.skipif(not _README.is_file(), reason="no checkout")


def _block(heading: str) -> str:
  section = _README.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
  return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def _loss(params, ids, targets):
  logits = params["embed"][ids] @ params["w"]
  return jnp.mean((logits.sum(-1) - targets) ** 2)


def _names():
  return {
    "jax": jax,
    "optax": optax,
    "zenjax": zenjax,
    "loss_fn": _loss,
    "params": {"embed": jnp.zeros((20_000, 32)), "w": jnp.zeros((32, 8))},
    "ids": jnp.zeros(64, jnp.int32),
    "targets": jnp.zeros(64),
    "mesh": jax.make_mesh((8,), ("data",)),
  }


@in_checkout
def test_planning_prints_a_plan_that_zen_sync_takes(capsys):
  names = _names()
  exec(_block("Planning"), names)
  out = capsys.readouterr().out
  assert "plan for 8 devices (data 8) on h100 on 25 Gbit/s, 1 net" in out
  assert "embed  20000x32" in out and "as fast as with pmean alone" in out
  state = names["tx"].init(names["params"])
  assert set(state[0].leaves) == {"embed"}


@in_checkout
def test_a_step_runs():
  """That of "Use": traced, on all devices."""
  names = _names()
  exec(_block("Use"), names)
  shapes = (names["params"], names["opt_state"])
  params, _, loss = jax.eval_shape(
    names["train"], *shapes, names["ids"], names["targets"]
  )
  assert loss.shape == () and params["embed"].shape == (20_000, 32)


@in_checkout
def test_dense_models_have_a_chain():
  names = _names()
  exec(_block("Dense models"), names)
  params = {"w": jnp.zeros((256, 256))}
  state = zenjax.init(names["tx"], params, names["mesh"], "data")
  assert isinstance(state[1], zenjax.ZenSyncState)

"""A program that trains, saves every step, and may be killed while it saves.

It goes on from the last complete step of a directory, and writes losses and the
final table to DIRECTORY.npz. While it saves one step it kills itself: as soon
as the step has a folder (`begun`), or when all is complete but the folder's
name (`named`).
"""

import asyncio
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint.path import atomicity

import zenjax

ROWS, WIDTH, DEVICES = 1003, 4, 2
# A program that waited so long for its end would fail.
_LONG = 300


def _kill() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


class _Begun(atomicity.AtomicRenameTemporaryPath):
  """A folder that gets its last name too late for anyone to see it."""

  async def finalize(self):
    await asyncio.sleep(_LONG)


class _Named(atomicity.AtomicRenameTemporaryPath):
  """A step's folder whose process dies when it is to get its last name.

  The folder of its arrays has got its own.
  """

  async def finalize(self):
    if self.get_final().name.isdigit():
      assert (self.get() / "default").exists()
      _kill()
    await super().finalize()


_MOMENTS = {"begun": _Begun, "named": _Named}


def loss_fn(params, ids, targets):
  return optax.l2_loss(params["table"][ids].sum((1, 2)), targets).mean()


def batch_of(step):
  rng = np.random.default_rng(step)
  ids = rng.integers(0, ROWS, (8, 3)).astype(np.int32)
  return ids, rng.normal(size=8).astype(np.float32)


def main(directory, steps, doomed=-1, moment=""):
  jax.config.update("jax_num_cpu_devices", DEVICES)
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  split = jax.NamedSharding(mesh, jax.P("data"))
  tx = zenjax.sharded_optimizer(optax.adam(0.05), "data", mesh=mesh)
  table = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
  params = {"table": table.astype(np.float32)}
  params = zenjax.tables.shard(params, mesh, "data", tables=True)
  state = params, tx.init(params)

  @jax.jit
  def step(state, ids, targets):
    params, opt_state = state
    loss, grads = zenjax.value_and_grad(loss_fn)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  usual = ocp.CheckpointManagerOptions(max_to_keep=2)
  losses, first = {}, 0
  with ocp.CheckpointManager(directory, options=usual) as manager:
    if (last := manager.latest_step()) is not None:
      like = ocp.args.StandardRestore(zenjax.to_checkpoint(state), strict=False)
      saved = manager.restore(last, args=like)
      state, first = zenjax.from_checkpoint(saved, mesh, "data"), last + 1
    for i in range(first, steps):
      state, loss = step(state, *jax.device_put(batch_of(i), split))
      losses[str(i)] = np.asarray(loss)
      args = ocp.args.StandardSave(zenjax.to_checkpoint(state))
      if i == doomed:
        manager.wait_until_finished()
        options = ocp.CheckpointManagerOptions(
          max_to_keep=2, temporary_path_class=_MOMENTS[moment]
        )
        dying = ocp.CheckpointManager(directory, options=options)
        dying.save(i, args=args)
        if moment == "begun":
          _await_folder(pathlib.Path(directory), i)
          _kill()
        dying.wait_until_finished()
      manager.save(i, args=args)
  tables = zenjax.tables.unshard(state[0])
  np.savez(f"{directory}.npz", table=jnp.asarray(tables["table"]), **losses)


def _await_folder(directory, step):
  """Returns once there is an incomplete folder of `step`."""
  until = time.monotonic() + _LONG
  while not list(directory.glob(f"{step}.*")):
    if time.monotonic() > until:
      sys.exit(f"no save of step {step} was seen")
    time.sleep(0.001)

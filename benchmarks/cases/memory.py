"""`memory`: what making, moving and saving a sharded table takes at most.

Of one process: the peak of its resident memory in each phase, beyond what it
had before, in parts of table and state. Linux counts the peak anew after each.
"""

import argparse
import gc
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from benchmarks import record
from benchmarks import table
import zenjax

_WIDTH = 32
# glibc gives back what is freed, and does not keep it for the next phase.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
_PROCESS = pathlib.Path("/proc/self")


def run(options: argparse.Namespace) -> int:
  """Prints the peaks, measured in a process with an allocator set up.

  Raises:
    ValueError: The system has no `/proc/self/clear_refs`.
  """
  if not (_PROCESS / "clear_refs").exists():
    raise ValueError("`memory` reads /proc/self/clear_refs, which Linux has.")
  if any(os.environ.get(k) != v for k, v in _ALLOCATOR.items()):
    command = [sys.executable, "-m", "benchmarks.run", *sys.argv[1:]]
    return subprocess.run(command, env=os.environ | _ALLOCATOR).returncode
  jax.config.update("jax_num_cpu_devices", options.devices)
  _phases(options, 4_000)  # Libraries and threads are there before.
  found = _phases(options, options.rows)
  each = 2 * options.rows * _WIDTH * 4
  rows = [[name, f"{peak / each:.2f}"] for name, peak in found.items()]
  title = f"peaks over {each / 1e6:,.0f} MB of table and state"
  table.show_rows(title, ["phase", "times"], rows)
  peaks = {name: peak / each for name, peak in found.items()}
  record.save(options, {"complete": True, "bytes": each, "peaks": peaks})
  return 0


def _status(name: str) -> int:
  """Returns a number of kB of `/proc/self/status` in bytes."""
  lines = (_PROCESS / "status").read_text().splitlines()
  (line,) = [line for line in lines if line.startswith(name)]
  return int(line.split()[1]) * 1024


def _phases(options: argparse.Namespace, rows: int) -> dict[str, int]:
  """Returns the peak of each phase in bytes, beyond what was there before."""
  automatic = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((options.devices,), ("data",), axis_types=automatic)
  tx = zenjax.sharded_optimizer(optax.adagrad(0.05), "data", mesh=mesh)
  column = jnp.arange(_WIDTH, dtype=jnp.float32)[None]
  made_of = lambda ids: 0.001 * (ids[:, None] % 97 + column)

  def make():
    described = {"t": zenjax.tables.init_by_rows(made_of, rows)}
    params = zenjax.tables.shard(described, mesh, "data")
    return params, tx.init(params)

  def loss(params, ids, targets):
    found = params["t"][ids].mean(1).sum(-1)
    return optax.l2_loss(found, targets).mean()

  def step(state, ids, targets):
    params, opt_state = state
    _, grads = zenjax.value_and_grad(loss)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  ids = (np.random.default_rng(0).zipf(1.2, (512, 4)) % rows).astype(np.int32)
  batch = (ids, np.sin(ids[:, 0]).astype(np.float32))
  split = jax.NamedSharding(mesh, jax.P("data"))
  batch = jax.device_put(batch, split)
  compiled = jax.jit(step, donate_argnums=0)
  peaks, base = {}, _status("VmRSS")

  def phase(name, result):
    jax.block_until_ready(result)
    gc.collect()
    peaks[name] = _status("VmHWM") - base
    (_PROCESS / "clear_refs").write_text("5")
    return result

  (_PROCESS / "clear_refs").write_text("5")
  with tempfile.TemporaryDirectory() as place:
    path = pathlib.Path(place) / "at"
    state = phase("make", make())
    state = phase("steps", compiled(compiled(state, *batch), *batch))
    saved = phase(
      "to the form to save", zenjax.to_checkpoint(state, donate=True)
    )
    del state
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, saved)
      checkpointer.wait_until_finished()
    phase("save", saved)
    state = phase(
      "back", zenjax.from_checkpoint(saved, mesh, "data", donate=True)
    )
    del saved, state
    form = zenjax.from_checkpoint(make(), donate=True)
    form = jax.tree.map(ocp.utils.to_shape_dtype_struct, form)
    phase("a form to restore into", ())
    with ocp.StandardCheckpointer() as checkpointer:
      restored = phase("restore", checkpointer.restore(path, form))
    moved = zenjax.from_checkpoint(restored, mesh, "data", donate=True)
    phase("to the mesh", compiled(moved, *batch))
  return peaks

"""Planning: which way each gradient should take on a machine, before and after.

    python examples/planning.py [--steps 20]

Plans for hosts of H100s that need not be there, from the program alone. Records
which rows the first steps touch, plans for more devices from that, trains by
the plan, and compares it with what the run has shown.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

import zenjax

ROWS, WIDTH, BATCH = 20_000, 64, 512  # ids of a device in a step


def loss_fn(params, ids, targets):
  hidden = jnp.tanh(params["embed"][ids] @ params["hidden"])
  return optax.l2_loss(hidden.sum(-1), targets).mean()


def first_params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0))
  return {
    "embed": jax.random.normal(keys[0], (ROWS, WIDTH)) / WIDTH,
    "hidden": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH,
  }


def batch(step: int, devices: int):
  ids = np.random.default_rng(step).zipf(1.3, devices * BATCH) % ROWS
  return ids.astype(np.int32), np.sin(ids).astype(np.float32)


def train(tx, mesh, steps: int, recorder=None):
  """Trains; a recorder sees the local gradients of every step."""

  def step(state, ids, targets):  # what one device does
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, ids, targets)
    seen = recorder.rows(grads) if recorder else {}
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), (loss, seen)

  params = jax.device_put(first_params(), NamedSharding(mesh, PartitionSpec()))
  state = params, zenjax.init_state(tx, params, mesh, "data")
  run = jax.jit(zenjax.data_parallel(step, mesh, "data"), donate_argnums=0)
  for i in range(steps):
    inputs = batch(i, mesh.size)
    state, (loss, seen) = run(state, *inputs)
    if recorder:
      recorder.write(seen)
    if i in (0, steps - 1):
      print(f"step {i}  loss {loss:.5f}", flush=True)
  return state[1]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=20)
  steps = parser.parse_args().steps
  jax.config.update("jax_num_cpu_devices", 8)  # where nothing else is attached
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  local = first_params(), *batch(0, 1)  # one device's; they are traced, not run
  gradient = jax.value_and_grad(loss_fn)
  adagrad = optax.adagrad(0.02)

  def machine(hosts: int):
    return zenjax.planner.Topology.network("25gbit", hosts, machine="h100")

  print("Before a step was taken, densities are assumed:")
  plan = zenjax.planner.plan(gradient, *local, topology=machine(mesh.size))
  print(plan)

  with tempfile.TemporaryDirectory() as trace:
    recorder = zenjax.planner.record(trace, local[0], steps=8)
    tx = optax.chain(zenjax.zen_sync("data"), adagrad)
    train(tx, mesh, 8, recorder)
    print("\nFor 64 hosts, from the rows that 8 steps touched:")
    options = {"topology": machine(64), "trace": trace}
    print(zenjax.planner.plan(gradient, *local, **options))
    options = {"topology": machine(mesh.size), "trace": trace}
    plan = zenjax.planner.plan(gradient, *local, **options)

  print("\nTraining by the plan for the devices at hand:")
  tx = optax.chain(zenjax.zen_sync("data", plan=plan), adagrad)
  opt_state = train(tx, mesh, steps)
  print(plan.compare(zenjax.stats(opt_state)))


if __name__ == "__main__":
  main()

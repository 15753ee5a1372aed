"""sharded_optimizer: each device keeps 1/n of the optimizer state of a table.

    python examples/sharded_optimizer.py [--steps 30]

The owner of a row, which sums its gradients, updates it by Adam as well. Losses
are those of zen_sync and lazy_rows, which keep all state on every device. Half
way the state is saved in the order of rows, and half of the devices go on.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

import zenjax

ROWS, WIDTH, BATCH = 50_000, 32, 1024  # ids a step, of all devices together

OWNERS = zenjax.sharded_optimizer(optax.adam(0.01), "data")
EVERYWHERE = optax.chain(
  zenjax.zen_sync("data"), zenjax.lazy_rows(optax.adam(0.01))
)


def loss_fn(params, ids, targets):
  return optax.l2_loss(params["table"][ids].sum(-1), targets).mean()


def compiled(tx, mesh):
  def step(state, ids, targets):  # what one device does
    params, opt_state = state
    loss, grads = zenjax.value_and_grad(loss_fn)(params, ids, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (zenjax.apply_updates(params, updates), opt_state), loss

  return jax.jit(zenjax.data_parallel(step, mesh, "data"))


def batch(step: int):
  ids = np.random.default_rng(step).zipf(1.3, BATCH) % ROWS
  return ids, np.sin(ids)


def megabytes(tree) -> float:
  """Returns the size of what the first device has of some arrays."""
  leaves = jax.tree.leaves(tree)
  return sum(x.addressable_shards[0].data.nbytes for x in leaves) / 1e6


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=30)
  steps = parser.parse_args().steps
  jax.config.update("jax_num_cpu_devices", 8)  # where nothing else is attached
  devices = jax.devices()
  mesh = jax.sharding.Mesh(devices, ("data",))
  start = {"table": jnp.zeros((ROWS, WIDTH))}
  start = jax.device_put(start, NamedSharding(mesh, PartitionSpec()))

  losses = {}
  for name, tx in (("everywhere", EVERYWHERE), ("owners", OWNERS)):
    state = start, zenjax.init_state(tx, start, mesh, "data")
    print(f"{name}: {megabytes(state[1]):.2f} MB of state on a device")
    run, losses[name] = compiled(tx, mesh), []
    for i in range(steps):
      if i == steps // 2 and tx is OWNERS:
        # The form to save, which fits any number of devices.
        saved = zenjax.to_checkpoint(state)
        mesh = jax.sharding.Mesh(devices[: len(devices) // 2], ("data",))
        state = zenjax.from_checkpoint(saved, mesh, "data")
        run = compiled(tx, mesh)
        print(f"{mesh.size} devices go on: {megabytes(state[1]):.2f} MB on one")
      state, loss = run(state, *batch(i))
      losses[name].append(float(loss))
    first, *_, last = losses[name]
    print(f"step 0 loss {first:.5f}, step {steps - 1} loss {last:.5f}")
  apart = np.max(np.abs(np.subtract(losses["owners"], losses["everywhere"])))
  print(f"losses are {apart:.1e} apart at most")


if __name__ == "__main__":
  main()

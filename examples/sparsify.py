"""Compresses dense gradients: fewer bits, or a small part now, the rest later.

    python examples/sparsify.py [--density 0.05] [--steps 200]

Trains a network without tables by `pmean`, in 8 bits, by `exdyna`, which lets
no two devices select the same element, and by the largest elements of each
device with momentum correction, which `zen_sync` sends. Prints losses and bytes
of each.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

import zenjax

INPUTS, HIDDEN, BATCH = 64, 512, 256


def first_params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0))
  return {
    "hidden": jax.random.normal(keys[0], (INPUTS, HIDDEN)) / INPUTS**0.5,
    "out": jax.random.normal(keys[1], (HIDDEN,)) / HIDDEN**0.5,
  }


def loss_fn(params, x, y):
  return optax.l2_loss(jnp.tanh(x @ params["hidden"]) @ params["out"], y).mean()


def train(tx, mesh, steps: int) -> tuple[list[float], optax.OptState]:
  def step(state, x, y):  # what one device does
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  params = jax.device_put(first_params(), NamedSharding(mesh, PartitionSpec()))
  # What waits differs between devices, so zenjax makes the state.
  state = params, zenjax.init_state(tx, params, mesh, "data")
  run = jax.jit(zenjax.data_parallel(step, mesh, "data"), donate_argnums=0)
  rng, losses = np.random.default_rng(0), []
  for _ in range(steps):
    x = rng.standard_normal((BATCH, INPUTS), np.float32)
    state, loss = run(state, x, np.sin(2 * x[:, 0]))
    losses.append(float(loss))
  return losses, state[1]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--density", type=float, default=0.05)
  parser.add_argument("--steps", type=int, default=200)
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", 8)  # where nothing else is attached
  mesh = jax.make_mesh((jax.device_count(),), ("data",))

  pmean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
  largest = zenjax.sparsify.error_feedback(
    zenjax.sparsify.top_k(args.density / mesh.size), "data", momentum=0.9
  )
  # Before what waits stand sums of gradients: no momentum after `largest`.
  chains = {
    "pmean": optax.chain(pmean, optax.sgd(0.05, momentum=0.9)),
    "int8": optax.chain(
      zenjax.compress.all_reduce(zenjax.compress.LowBit(bits=8), "data"),
      optax.sgd(0.05, momentum=0.9),
    ),
    "exdyna": optax.chain(
      zenjax.sparsify.exdyna("data", density=args.density),
      optax.sgd(0.05, momentum=0.9),
    ),
    "top_k": optax.chain(
      largest,
      zenjax.zen_sync("data", sparse=True, unit="element"),
      optax.sgd(0.05),
    ),
  }
  for name, tx in chains.items():
    losses, opt_state = train(tx, mesh, args.steps)
    last = np.mean(losses[-20:])
    print(f"{name}: step 0 loss {losses[0]:.4f}, last 20 loss {last:.4f}")
    if name != "pmean":
      print(zenjax.report(opt_state))


if __name__ == "__main__":
  main()

"""Compresses dense gradients: fewer bits, or a small part now, the rest later.

    python examples/sparsify.py [--density 0.05] [--steps 200]

Trains a network without tables by `pmean` and with three compressors: 8 bits,
`ExDyna`, in which no two devices select the same element, and `TopK` with
momentum before the selection (Deep Gradient Compression). Prints losses and
bytes of each.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

import zenjax
from zenjax import compress

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
  momentum = optax.sgd(0.05, momentum=0.9)
  int8 = compress.LowBit(bits=8)
  exdyna = compress.ExDyna(args.density)
  largest = compress.TopK(args.density / mesh.size)
  # Momentum of the vector `out`, which is too small to compress.
  others = optax.chain(zenjax.zen_sync("data"), optax.trace(0.9))
  chains = {
    "pmean": optax.chain(pmean, momentum),
    str(int8): optax.chain(compress.all_reduce(int8, "data"), momentum),
    str(exdyna): optax.chain(compress.all_reduce(exdyna, "data"), momentum),
    str(largest): optax.chain(
      compress.all_reduce(largest, "data", momentum=0.9, others=others),
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

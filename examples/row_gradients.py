"""Row gradients: no gradient of a table's size is made, and none is swept.

    python examples/row_gradients.py [--steps 60]

Trains a Flax model twice, by dense gradients and `pmean`, and by the rows that
a step looks up. Adagrad leaves rows without a gradient alone, so both learn the
same; steps by rows cost by their look-ups and not by the table.
"""

import argparse
import time

from flax import nnx
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

import zenjax

VOCABULARY, WIDTH = 50_000, 32
DOCUMENTS, WORDS = 64, 16  # of one device in a step, and in a document


class Classifier(nnx.Module):
  """Mean of word vectors, one logit."""

  def __init__(self, rngs: nnx.Rngs):
    self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

  def __call__(self, ids: jax.Array) -> jax.Array:  # [B, WORDS] -> [B]
    return self.out(self.words(ids).mean(axis=1))[:, 0]


def documents(rng: np.random.Generator, count: int):
  """Words as common as in text; a label says which half of them prevails."""
  ids = (rng.zipf(1.3, (count, WORDS)) % VOCABULARY).astype(np.int32)
  return ids, (np.where(ids % 2, 1, -1).sum(-1) > 0).astype(np.float32)


def train(mesh, tx, value_and_grad, steps: int) -> list[float]:
  graph, params = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)

  def loss_fn(params, ids, labels):
    logits = nnx.merge(graph, params)(ids)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

  def step(state, ids, labels):  # what one device does
    params, opt_state = state
    loss, grads = value_and_grad(loss_fn)(params, ids, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  rng = np.random.default_rng(0)
  if value_and_grad is zenjax.value_and_grad:
    print(zenjax.rows.explain_tables(loss_fn, params, *documents(rng, 2)))
  params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  state = params, zenjax.init_state(tx, params, mesh, "data")
  run = jax.jit(zenjax.data_parallel(step, mesh, "data"), donate_argnums=0)
  rng = np.random.default_rng(1)
  losses, seconds = [], []
  for _ in range(steps):
    batch = documents(rng, DOCUMENTS * mesh.size)
    start = time.perf_counter()
    state, loss = run(state, *batch)
    losses.append(float(loss))
    seconds.append(time.perf_counter() - start)
  print(f"{np.median(seconds):.4f} s a step, loss {losses[0]:.4f}", end="")
  print(f" at first, loss {losses[-1]:.4f} after {steps} steps\n", flush=True)
  return losses


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=60)
  steps = parser.parse_args().steps
  jax.config.update("jax_num_cpu_devices", 8)  # where nothing else is attached
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  adagrad = optax.adagrad(0.1)

  print("dense gradients, pmean:")
  pmean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
  dense = train(mesh, optax.chain(pmean, adagrad), jax.value_and_grad, steps)
  print("row gradients, zen_sync:")
  tx = optax.chain(zenjax.zen_sync("data"), zenjax.lazy_rows(adagrad))
  rows = train(mesh, tx, zenjax.value_and_grad, steps)
  apart = np.max(np.abs(np.subtract(rows, dense)))
  print(f"losses are {apart:.1e} apart at most")


if __name__ == "__main__":
  main()

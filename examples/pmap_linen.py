"""zen_sync under `pmap`: a Flax linen model that learns to classify documents.

The gradient of `nn.Embed` holds only the rows of the words that a device has
seen; the two dense layers are averaged as `lax.pmean` does.

    python examples/pmap_linen.py [--steps 100]
"""

import argparse
import functools

from flax import jax_utils
from flax import linen as nn
import jax
import numpy as np
import optax

import zenjax

VOCABULARY = 20_000
WORDS = 32  # in a document
DOCUMENTS = 64  # of one step, on each device

TX = optax.chain(zenjax.zen_sync("data"), optax.adagrad(0.2))


class Classifier(nn.Module):
  """Mean of word vectors, one hidden layer, one logit."""

  @nn.compact
  def __call__(self, words: jax.Array) -> jax.Array:  # [B, WORDS] -> [B]
    x = nn.Embed(VOCABULARY, 32)(words).mean(axis=1)
    x = nn.relu(nn.Dense(32)(x))
    return nn.Dense(1)(x)[:, 0]


MODEL = Classifier()


def loss_fn(params, words, labels):
  logits = MODEL.apply(params, words)
  return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


@functools.partial(jax.pmap, axis_name="data", donate_argnums=(0, 1))
def train_step(params, opt_state, words, labels):
  # Inside pmap gradients are local; zen_sync is what averages them.
  loss, grads = jax.value_and_grad(loss_fn)(params, words, labels)
  updates, opt_state = TX.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  return params, opt_state, jax.lax.pmean(loss, "data")


def documents(rng: np.random.Generator, devices: int):
  """Words as common as in text; a label says which half of them prevails."""
  shape = (devices, DOCUMENTS, WORDS)
  words = (rng.zipf(1.6, shape) % VOCABULARY).astype(np.int32)
  labels = (np.where(words % 2, 1, -1).sum(-1) > 0).astype(np.float32)
  return words, labels


def train(steps: int) -> list[float]:
  devices = jax.local_device_count()
  rng = np.random.default_rng(0)
  words, _ = documents(rng, devices)
  params = jax.jit(MODEL.init)(jax.random.key(0), words[0])
  opt_state = jax_utils.replicate(TX.init(params))
  params = jax_utils.replicate(params)

  losses = []
  for step in range(steps):
    batch = documents(rng, devices)
    params, opt_state, loss = train_step(params, opt_state, *batch)
    losses.append(float(loss[0]))  # the same on every device
    if step % 20 == 0 or step == steps - 1:
      print(f"step {step:4}  loss {losses[-1]:.4f}", flush=True)
  print(zenjax.report(jax_utils.unreplicate(opt_state)))
  return losses


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=100)
  args = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", 8)  # where nothing else is attached
  train(args.steps)


if __name__ == "__main__":
  main()

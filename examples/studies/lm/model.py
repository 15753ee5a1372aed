"""A word-level language model whose two tables are read by look-ups only.

Letters: B windows, L predictions of a window, N = B * L, S negatives, V words,
D width.
"""

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

import zenjax

_CONTEXT = 4  # How many words, the present one included, are seen directly.


class LanguageModel(nnx.Module):
  """Embeds a few past words and predicts the next one from them.

  Nearly all parameters sit in `embed` and `softmax`, as in recommenders and
  models of large vocabularies. Training reads both by `take`: their gradients
  are zero but for the rows of a batch's words and negatives.
  """

  def __init__(self, vocab: int, width: int, *, rngs: nnx.Rngs):
    init = nnx.initializers.normal(width**-0.5)
    self.embed = nnx.Embed(vocab, width, embedding_init=init, rngs=rngs)
    self.softmax = nnx.Embed(vocab, width, embedding_init=init, rngs=rngs)
    self.hidden = nnx.Linear(_CONTEXT * width, 2 * width, rngs=rngs)
    self.out = nnx.Linear(2 * width, width, rngs=rngs)

  def __call__(self, words: jax.Array) -> jax.Array:
    """Maps [B, L] int32 words to [B, L, D] states that predict the next."""
    length = words.shape[1]
    x = self.embed(words)
    past = jnp.pad(x, ((0, 0), (_CONTEXT - 1, 0), (0, 0)))
    seen = [past[:, k : k + length] for k in range(_CONTEXT)]
    hidden = nnx.gelu(self.hidden(jnp.concatenate(seen, axis=-1)))
    return self.out(hidden)


def sampled_loss(
  model: LanguageModel,
  windows: jax.Array,
  negatives: jax.Array,
  axis_name: str | None = None,
) -> jax.Array:
  """Estimates the mean cross-entropy from a sample of the vocabulary.

  The softmax's denominator is the true word's term plus an importance-weighted
  sum over negatives (Bengio and Senecal, 2003), so the loss can be compared
  with `exact_loss`.

  Args:
    model: The model.
    windows: [B, L + 1] int32, negative where a window is padded.
    negatives: [S] int32, drawn from the log-uniform law.
    axis_name: The axis of the devices that share the batch. The loss is then
      this device's share: the mean of shares is the whole batch's, and so is
      that of gradients.

  Returns:
    A scalar, nats a word.
  """
  words = jnp.maximum(windows, 0)  # Whatever padding is taken for.
  states = model(words[:, :-1])
  states = states.reshape(-1, states.shape[-1])  # [N, D]
  targets = words[:, 1:].reshape(-1)  # [N]
  true = jnp.sum(states * model.softmax(targets), axis=-1, keepdims=True)
  other = states @ model.softmax(negatives).T  # [N, S]
  other -= jnp.log(_expected_count(negatives, model.softmax.num_embeddings))
  # A negative that is the target itself is in the denominator already.
  other = jnp.where(negatives == targets[:, None], -jnp.inf, other)
  logits = jnp.concatenate([true, other], axis=-1)
  losses = jax.nn.logsumexp(logits, axis=-1) - true[:, 0]
  return _mean(losses, windows[:, 1:].reshape(-1) >= 0, axis_name)


def _mean(
  losses: jax.Array, counted: jax.Array, axis_name: str | None
) -> jax.Array:
  if axis_name is not None:
    return zenjax.weighted_mean(losses, counted, axis_name)
  return jnp.sum(losses * counted) / jnp.sum(counted)


def _expected_count(negatives: jax.Array, vocab: int) -> jax.Array:
  probability = jnp.log1p(1 / (negatives + 1.0)) / jnp.log(vocab + 1.0)
  return negatives.size * probability


def exact_loss(
  model: LanguageModel,
  windows: jax.Array,
  axis_name: str | None = None,
  *,
  chunk: int = 64,
) -> jax.Array:
  """Returns the mean cross-entropy over the whole vocabulary.

  Logits are made for `chunk` words at a time, so memory is `chunk * V` and not
  `N * V`.

  Args:
    model: The model.
    windows: As for `sampled_loss`; `chunk` divides B * L.
    axis_name: As for `sampled_loss`.
    chunk: Predictions at a time.

  Returns:
    A scalar, nats a word.
  """
  words = jnp.maximum(windows, 0)
  states = model(words[:, :-1])
  table = model.softmax.embedding[...]  # [V, D]

  def loss(part):
    states, targets = part
    logits = states @ table.T  # [chunk, V]
    true = jnp.take_along_axis(logits, targets[:, None], axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - true[:, 0]

  states = states.reshape(-1, chunk, states.shape[-1])
  targets = words[:, 1:].reshape(-1, chunk)
  losses = lax.map(loss, (states, targets)).reshape(-1)
  return _mean(losses, windows[:, 1:].reshape(-1) >= 0, axis_name)

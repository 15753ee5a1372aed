"""The example programs' models, as the hosts of a testbed train them.

Letters: `n` hosts.
"""

from collections.abc import Callable
import dataclasses
import itertools
import pathlib
import sys
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

_EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
# They are programs, which import each other by plain names.
sys.path.append(str(_EXAMPLES))

_SEED = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
  """What is trained, and on what.

  Attributes:
    params: Of `nnx.split`, the same on all hosts.
    loss: Of the parameters and one host's part of a batch.
    batches: Of all hosts, arrays that are split along their first dimension.
  """

  params: Any
  loss: Callable[..., jax.Array]
  batches: list[tuple[np.ndarray, ...]]


def language_model(hosts: int, batches: int) -> Model:
  """`train_lm.py`: the standard library's text, a small vocabulary and batch.

  Two tables of 20,000 x 128, 1,024 tokens and 512 negatives a host.
  """
  from examples import corpus
  from examples import lm_data
  from examples import lm_model

  vocab, width, tokens, negatives = 20_000, 128, 1024, 512
  text = corpus.load_tokens(None)
  windows, _ = lm_data.split(lm_data.cap_vocabulary(text.ids, vocab))
  drawn = lm_data.batches(
    windows,
    devices=hosts,
    batch_tokens=tokens,
    negatives=negatives,
    vocab=vocab,
    seed=_SEED,
  )
  graph, params = _drawn(
    lambda rngs: lm_model.LanguageModel(vocab, width, rngs=rngs)
  )

  def loss(params, windows, negatives):
    return lm_model.sampled_loss(nnx.merge(graph, params), windows, negatives)

  taken = itertools.islice(drawn, batches)
  return Model(params, loss, [(b.windows, b.negatives) for b in taken])


def click_model(hosts: int, batches: int) -> Model:
  """`train_dlrm.py`: the planted log, 26 tables of 16 columns.

  Half of a hundredth of Criteo's rows, 256 clicks a host.
  """
  from examples import dlrm_model
  from examples import dlrm_rows
  from examples import dlrm_source

  size = 256 * hosts
  tables = dlrm_rows.table_rows(0.005)
  graph, params = _drawn(lambda rngs: dlrm_model.Dlrm(tables, 16, rngs=rngs))

  def loss(params, labels, numbers, ids):
    return dlrm_model.log_loss(nnx.merge(graph, params), labels, numbers, ids)

  rows = dlrm_source.PlantedSource(_SEED).batches(0, size, 0)
  drawn = [
    dlrm_rows.as_batch(of_step, tables)
    for of_step in itertools.islice(rows, batches)
  ]
  return Model(params, loss, [(b.labels, b.numbers, b.ids) for b in drawn])


def _drawn(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Any, Any]:
  """A module's graph, and parameters that no program is compiled to draw."""
  shapes = nnx.eval_shape(lambda: make(nnx.Rngs(_SEED)))
  graph, params = nnx.split(shapes, nnx.Param)
  rng = np.random.default_rng(_SEED)
  draw = lambda x: 0.05 * rng.standard_normal(x.shape, np.float32)
  return graph, jax.tree.map(draw, params)


def small(hosts: int, batches: int) -> Model:
  """A table and a layer, for a look at whether all works."""
  rng = np.random.default_rng(_SEED)
  params = {
    "table": rng.standard_normal((20_000, 8), np.float32),
    "layer": rng.standard_normal((8, 1), np.float32),
  }

  def loss(params, ids):
    return jnp.mean((params["table"][ids] @ params["layer"]) ** 2)

  ids = rng.integers(0, 20_000, (batches, 16 * hosts), np.int32)
  return Model(params, loss, [(of_step,) for of_step in ids])


MODELS: dict[str, Callable[[int, int], Model]] = {
  "lm": language_model,
  "dlrm": click_model,
  "small": small,
}

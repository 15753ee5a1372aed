"""The example programs' models as the hosts train them: compiled, timed.

Letters: `n` hosts.
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools
import time
from typing import Any

from flax import nnx
import jax
from jax import lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.cases import sync
from benchmarks.cases.sync import AXIS
from benchmarks.testbed import served
import zenjax

_SEED = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
  """A model, and the batches that it is trained on."""

  params: Any  # Of `nnx.split`, the same on all hosts.
  loss: Callable[..., jax.Array]  # Of one host's part of a batch.
  # Of all hosts, arrays that are split along their first dimension.
  batches: list[tuple[np.ndarray, ...]]


def language_model(hosts: int, batches: int) -> Model:
  """`studies.lm`: the standard library's text, a small vocabulary and batch.

  Two tables of 20,000 x 128, 1,024 tokens and 512 negatives a host.
  """
  from examples.studies.lm import corpus
  from examples.studies.lm import data
  from examples.studies.lm import model

  vocab, width, tokens, negatives = 20_000, 128, 1024, 512
  text = corpus.load_tokens(None)
  windows, _ = data.split(data.cap_vocabulary(text.ids, vocab))
  drawn = data.batches(
    windows,
    devices=hosts,
    batch_tokens=tokens,
    negatives=negatives,
    vocab=vocab,
    seed=_SEED,
  )
  made = functools.partial(model.LanguageModel, vocab, width)
  graph, params = _drawn(made)

  def loss(params, windows, negatives):
    return model.sampled_loss(nnx.merge(graph, params), windows, negatives)

  taken = itertools.islice(drawn, batches)
  return Model(params, loss, [(b.windows, b.negatives) for b in taken])


def click_model(hosts: int, batches: int) -> Model:
  """`studies.dlrm`: the planted log, 26 tables of 16 columns.

  Half of a hundredth of Criteo's rows, 256 clicks a host.
  """
  from examples.studies.dlrm import model
  from examples.studies.dlrm import rows
  from examples.studies.dlrm.planted import Planted

  size = 256 * hosts
  tables = rows.table_rows(0.005)
  graph, params = _drawn(functools.partial(model.Dlrm, tables, 16))

  def loss(params, labels, numbers, ids):
    return model.log_loss(nnx.merge(graph, params), labels, numbers, ids)

  log = Planted(_SEED).batches(0, size, 0)
  drawn = (rows.as_batch(b, tables) for b in itertools.islice(log, batches))
  return Model(params, loss, [(b.labels, b.numbers, b.ids) for b in drawn])


def _drawn(make: Callable[..., nnx.Module]) -> tuple[Any, Any]:
  """A module's graph, and parameters that no program is compiled to draw."""
  shapes = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(_SEED)))
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


# float32 sums over hosts in another order, and again in the layers behind.
_RELATIVE = 1e-3


# The optimizer of the example programs.
adagrad = functools.partial(
  optax.adagrad, 0.03, initial_accumulator_value=0.0, eps=1e-10
)


def alone() -> optax.GradientTransformation:
  """No exchange; gradients are written to memory all the same.

  Without the barrier XLA makes one loop of gradient and optimizer, and what an
  exchange adds would be charged with taking that apart.
  """
  whole = optax.stateless(lambda grads, _: lax.optimization_barrier(grads))
  return optax.chain(whole, adagrad())


class Place:
  """A model's parameters and batches, where the hosts have them."""

  def __init__(self, model: Model, on: served.Worker):
    self.model, self.mesh, self.compile = model, on.mesh, on.compiler.compile
    place = lambda x: sync.place(on.mesh, x, AXIS)
    self.batches = [tuple(map(place, batch)) for batch in model.batches]

  def params(self) -> Any:
    """Fresh ones: a step takes them."""
    place = lambda x: sync.place(self.mesh, np.asarray(x))
    return jax.tree.map(place, self.model.params)

  def own_part(self) -> tuple[Any, ...]:
    """Shapes of one host's part of a batch."""
    n = self.mesh.size
    return tuple(
      jax.ShapeDtypeStruct((len(x) // n, *x.shape[1:]), x.dtype)
      for x in self.model.batches[0]
    )


class Program(sync.Runner):
  """The step of `tx`, whose gradients are of rows if `rows` says so."""

  def __init__(self, place: Place, tx: Any, rows: bool = False):
    given = place.model.loss, place.mesh, place.params(), place.batches
    options = {"rows": rows, "tell": True, "compile": place.compile}
    super().__init__(tx, *given, **options)

  def __call__(self) -> None:
    """Takes a step and waits for it."""
    jax.block_until_ready((super().__call__(), self.state))

  def params_here(self) -> Any:
    """Returns the parameters that this host has."""
    return jax.tree.map(served.here, self.params)

  def state_here(self) -> Any:
    """Returns this host's part of the optimizer's state."""
    return jax.tree.map(served.here, self.state)

  def squares(self) -> list[np.ndarray]:
    """Adagrad's sums of squared gradients on this host."""
    found = optax.tree.get(self.state, "sum_of_squares")
    return list(map(served.here, jax.tree.leaves(found)))

  def time(self, common_start: Callable[[], float]) -> float:
    """Seconds until this host is through, from when all have begun."""
    start = common_start()
    self()
    return time.monotonic() - start


def sent_and_kept(program: Program, rate: float) -> dict[str, np.ndarray]:
  """Takes a first step of SGD; returns all that became of its gradients.

  By name, in float64: the update, over the rate, and the mean over hosts of
  what waits in residuals. If nothing is lost it is the mean gradient.
  """
  before = program.params_here()
  program()
  found = {
    name: (before[name] - after.astype(np.float64)) / rate
    for name, after in program.params_here().items()
  }
  is_one = lambda x: isinstance(x, zenjax.compress.CompressState)
  state = multihost_utils.process_allgather(program.state, tiled=True)
  nodes = [state]
  for node in nodes:  # The parts of a plan are in each other.
    for inner in filter(is_one, jax.tree.leaves(node, is_leaf=is_one)):
      nodes.append(inner.others)
      for name, kept in inner.residuals.items():
        found[name] += np.asarray(kept.value, np.float64).mean(axis=0)
  return found


def count_far(got: np.ndarray, want: np.ndarray, relative: float) -> int:
  """Elements that are off by more than so much of the largest one."""
  return int(np.sum(np.abs(got - want) > relative * np.abs(want).max()))


def wrong(got: list[np.ndarray], want: list[np.ndarray]) -> int:
  """Elements that differ by more than rounding does."""
  return sum(
    int(np.sum(np.abs(x - y) > _RELATIVE * (np.abs(y) + 1e-6 * np.max(y))))
    for x, y in zip(got, want, strict=True)
  )

"""Models with tables, for `tables`: parameters, loss, batches, an oracle.

Letters: `n` hosts, `N` examples of all hosts in a step, `R` rows of a table.
"""

from collections.abc import Callable, Hashable, Sequence
import dataclasses
import functools
import itertools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import ngram_memory
from examples.studies.dlrm import model as dlrm_model
from examples.studies.dlrm import planted
from examples.studies.dlrm import rows as dlrm_rows
import zenjax

# Batches that repeat.
BATCHES = 16
# Rates of Adagrad, and what squares begin with.
RATE, START, EPS = 0.05, 0.1, 1e-7
# Gradients of a mean over thousands of clicks are small, and 0.1 would drown
# what tables learn.
CLICK_RATE, CLICK_START = 0.01, 1e-6
_ADAGRAD = optax.adagrad(RATE, initial_accumulator_value=START, eps=EPS)
# Look-ups of an example of each look-up of the table of `bags`.
_BAG = 10
_ZIPF = 1.145
_WINDOWS = 16  # Of the n-gram model, a host's.
_CLICKS, _WIDTH = 512, 16  # Rows of a log of a host, columns of all tables.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
  """What a run is asked for.

  Attributes:
    model: Name in `MODELS`.
    rows: Of the table, or of all tables together.
    width: Columns, of `bags`.
    tokens: Rows that a host looks up, of `bags`.
    look_ups: How often the model looks up rows of the table, of `bags`.
  """

  model: str
  rows: int
  width: int
  tokens: int
  look_ups: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A model, and what trains it.

  Attributes:
    params: Whole, in NumPy.
    tables: The same tree, True for what is only looked up.
    loss: Of parameters and a batch, the mean over its examples.
    tx: The optimizer, of whole parameters.
    batches: Those of all hosts, each a tuple of arrays `[N, ...]`.
    ids: Rows that some examples look up, of each table.
    bare: The same without tables, where that makes sense.
  """

  params: Any
  tables: Any
  loss: Callable[..., Any]
  tx: optax.GradientTransformation
  batches: Sequence[tuple[np.ndarray, ...]]
  ids: Callable[..., list[np.ndarray]]
  bare: "Model | None" = None

  def part(self, batch: Sequence[np.ndarray], host: int, hosts: int) -> Any:
    """The examples of one host."""
    return [np.split(x, hosts)[host] for x in batch]

  def ideal_bytes(self, hosts: int) -> float:
    """Bytes that a host must receive in a step, a mean over batches.

    Of tables that rows of lie with an owner each: an id, a row and its gradient
    for each distinct row that a host looks up with another host, and the id of
    that gradient. All else is summed by a ring.
    """
    leaves, tables = map(jax.tree.leaves, (self.params, self.tables))
    rows = [x.nbytes / len(x) for x, is_ in zip(leaves, tables) if is_]
    dense = sum(x.nbytes for x, is_ in zip(leaves, tables) if not is_)
    distinct = np.zeros(len(rows))
    for batch, host in itertools.product(self.batches, range(hosts)):
      found = self.ids(*self.part(batch, host, hosts))
      distinct += [len(np.unique(x)) for x in found]
    distinct /= len(self.batches) * hosts
    words = sum(k * (2 * row + 2 * 4) for k, row in zip(distinct, rows))
    return (hosts - 1) / hosts * float(words + 2 * dense)

  def losses(self, steps: int) -> list[float]:
    """Losses of the plain program on one device, of whole batches."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
      value, grads = jax.value_and_grad(self.loss)(params, *batch)
      updates, state = self.tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, value

    with jax.default_device(jax.local_devices()[0]):
      params = jax.tree.map(jnp.array, self.params)
      state, found = self.tx.init(params), []
      for batch in self.batches[:steps]:
        params, state, value = step(params, state, *batch)
        found.append(float(value))
    return found


def bags_loss(params: Any, ids: Any, y: Any) -> Any:
  """Bags of rows, each through a vector of its own."""
  bags = jnp.split(ids, len(params["w"]), axis=1)
  found = jnp.stack([params["table"][x].mean(1) for x in bags], axis=1)
  # At once: Gloo would sum the gradient of each vector by itself.
  out = jnp.einsum("bkd,kd->b", found, params["w"], precision="highest")
  return optax.l2_loss(out, y).mean()


def _bags(setting: Setting, hosts: int) -> Model:
  rng = np.random.default_rng(0)
  w = rng.standard_normal((setting.look_ups, setting.width), np.float32)
  draw = rng.standard_normal((setting.rows, setting.width), np.float32)
  bag = _BAG * setting.look_ups
  shape = BATCHES, hosts * (setting.tokens // bag), bag
  ids = rng.permutation(setting.rows)[rng.zipf(_ZIPF, shape) % setting.rows]
  y = np.sin(ids[:, :, 0]).astype(np.float32)
  return Model(
    params={"table": 0.05 * draw, "w": w},
    tables={"table": True, "w": False},
    loss=bags_loss,
    tx=_ADAGRAD,
    batches=list(zip(ids.astype(np.int32), y)),
    ids=lambda ids, y: [ids],
  )


def _ngram(setting: Setting, hosts: int) -> Model:
  heads = len(ngram_memory.ORDERS) * ngram_memory.HEADS
  # Nearly equal, each another, and all together what hosts divide.
  sizes = np.array(setting.rows // heads - np.arange(heads), np.uint32)
  sizes[-1] += setting.rows - sizes.sum()
  ids, lower = ngram_memory.text()
  rng = np.random.default_rng(0)
  length = ngram_memory.T + 1
  starts = rng.integers(len(ids) - length, size=(BATCHES, hosts * _WINDOWS, 1))
  batches = [(x.astype(np.int32),) for x in ids[starts + np.arange(length)]]
  params = jax.tree.map(
    np.array, ngram_memory.first_params(sizes, ngram_memory.D)
  )
  tables = {name: name == "memory" for name in params}
  none = sizes[:0]

  def loss(params, windows):
    return ngram_memory.loss_fn(params, windows, jnp.asarray(lower), sizes)

  def bare(params, windows):
    return ngram_memory.loss_fn(params, windows, jnp.asarray(lower), none)

  def looked_up(windows):
    with jax.default_device(jax.local_devices()[0]):
      words = jnp.asarray(lower[windows[:, :-1]])
      return [np.asarray(ngram_memory.slots(words, sizes))]

  adagrad, adam = zenjax.rows.rowwise_adagrad(RATE), optax.adam(3e-3)
  parts: dict[Hashable, Any] = {True: adagrad, False: adam}
  without = jax.tree.map(np.array, ngram_memory.first_params(none))
  del without["memory"]
  made = Model(
    params=params,
    tables=tables,
    loss=loss,
    tx=optax.partition(parts, lambda params: {k: tables[k] for k in params}),
    batches=batches,
    ids=looked_up,
  )
  without = dataclasses.replace(
    made,
    params=without,
    tables=dict.fromkeys(without, False),
    loss=bare,
    ids=lambda windows: [],
  )
  return dataclasses.replace(made, bare=without)


def _dlrm(setting: Setting, hosts: int) -> Model:
  scale = setting.rows / sum(dlrm_rows.CARDINALITIES)
  # 2, 4, 8 or 16 hosts divide them.
  sizes = [-(-rows // 16) * 16 for rows in dlrm_rows.table_rows(scale)]
  with jax.default_device(jax.local_devices()[0]):
    model = dlrm_model.Dlrm(sizes, _WIDTH, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model, nnx.Param)
  params = jax.tree.map(np.array, nnx.to_pure_dict(params))
  log = planted.Planted(0).batches(0, hosts * _CLICKS, 0)
  found = [dlrm_rows.as_batch(x, sizes) for x in itertools.islice(log, BATCHES)]

  def loss(params, labels, numbers, ids):
    _, state = nnx.split(nnx.eval_shape(lambda: model), nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    return dlrm_model.log_loss(nnx.merge(graph, state), labels, numbers, ids)

  tables = {k: jax.tree.map(lambda _: False, v) for k, v in params.items()}
  tables["tables"]["embedding"] = True
  first = np.cumsum(sizes) - sizes
  return Model(
    params=params,
    tables=tables,
    loss=loss,
    tx=optax.adagrad(
      CLICK_RATE,
      initial_accumulator_value=CLICK_START,
      eps=CLICK_START * 1e-4,
    ),
    batches=[x.arrays for x in found],
    ids=lambda labels, numbers, ids: [ids + first],
  )


# Each with the rows that it has by default.
MODELS = {
  "bags": (_bags, 100_000),
  "ngram": (_ngram, 1 << 20),
  "dlrm": (_dlrm, 700_000),
}


def make(setting: Setting, hosts: int) -> Model:
  """Makes the model of a run."""
  return MODELS[setting.model][0](setting, hosts)

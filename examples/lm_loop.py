"""Data-parallel training with zenjax: the step, the loop, and what it saw."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import signal
import statistics
import time

from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lm_data import Batch
from lm_data import LENGTH
from lm_model import exact_loss
from lm_model import LanguageModel
from lm_model import sampled_loss
import lm_trace
import numpy as np
import optax
from tqdm import tqdm

import zenjax

AXIS = "data"

# Steps whose time says nothing: the first one compiles, memory is still cold.
_WARM_UP = 3


@dataclasses.dataclass(slots=True)
class History:
  """What the steps of one run gave, in order.

  Attributes:
    losses: nats a word, the mean over devices.
    seconds: time of a step.
    stats: `zenjax.stats` after a step: leaf name -> numbers. Empty dicts
      for pmean.
  """

  losses: list[float] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)
  stats: list[dict[str, dict[str, float]]] = dataclasses.field(
    default_factory=list
  )

  @property
  def step_time(self) -> float:
    """Median seconds of the steps after the warm up."""
    return statistics.median(self.seconds[_WARM_UP:] or self.seconds)


def pmean(axis_name: str) -> optax.GradientTransformation:
  """What most programs do: a dense mean of all gradients."""
  return optax.stateless(lambda updates, _: lax.pmean(updates, axis_name))


SYNC = {"zen": zenjax.zen_sync, "pmean": pmean}


def optimizer(sync: str, learning_rate: float) -> optax.GradientTransformation:
  # Adagrad reads and writes one accumulator of a table's size, Adam two, and
  # Adam's momentum moves even the rows that no word of the batch touched. On
  # CPU devices that share two cores such sweeps of the tables would hide the
  # synchronization. SGD sweeps less still, but hardly learns rare words.
  # The accumulator starts at zero: a gradient's entries are means over many
  # thousand words, and optax's default of 0.1 would drown them.
  return optax.chain(
    SYNC[sync](AXIS),
    optax.adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-10),
  )


class Trainer:
  """A model's parameters and optimizer state on a mesh, and its two programs.

  Attributes:
    params: parameters, equal on all devices.
    opt_state: optimizer state; it holds zen_sync's statistics.
  """

  def __init__(
    self,
    *,
    vocab: int,
    width: int,
    seed: int,
    sync: str,
    learning_rate: float,
    mesh: Mesh,
    recorder: lm_trace.Recorder | None = None,
  ):
    tx = optimizer(sync, learning_rate)
    model = LanguageModel(vocab, width, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    self._sync = sync
    self.params = jax.device_put(params, NamedSharding(mesh, P()))
    self.opt_state = zenjax.init(tx, self.params, mesh, AXIS)
    self._split = NamedSharding(mesh, P(AXIS))
    specs = zenjax.state_specs(self.opt_state, AXIS)
    self._step = _compiled_step(graph, tx, mesh, specs)
    self._recorder = recorder
    if recorder:
      tables = lm_trace.sparse_tables(self.params, AXIS)
      recorder.start(tables, mesh.size)
      seen = functools.partial(lm_trace.nonzero_rows, tables=tables)
      self._traced_step = _compiled_step(graph, tx, mesh, specs, seen)
    self._exact_loss = _compiled_exact_loss(graph, mesh)

  def step(self, batch: Batch) -> float:
    """Trains on one batch and returns its loss."""
    windows, negatives = jax.device_put(
      (batch.windows, batch.negatives), self._split
    )
    recorder = self._recorder
    if recorder and not recorder.wants_more:
      recorder = self._recorder = None
    run = self._traced_step if recorder else self._step
    self.params, self.opt_state, loss, seen = run(
      self.params, self.opt_state, windows, negatives
    )
    if recorder:
      recorder.write(seen)
    return float(loss)  # Waits for the step: it is timed, and can be stopped.

  def stats(self) -> dict[str, dict[str, float]]:
    """What zen_sync saw in the last step, by leaf; nothing for pmean."""
    return zenjax.stats(self.opt_state) if self._sync == "zen" else {}

  def perplexity(self, windows: np.ndarray) -> float:
    """Exact perplexity of [m, L + 1] words; devices divide m."""
    windows = jax.device_put(windows, self._split)
    return float(np.exp(self._exact_loss(self.params, windows)))


def _compiled_step(graph, tx, mesh, specs, seen=lambda grads: ()):
  """`seen(grads)` of every device is returned beside the loss."""

  def step(params, opt_state, windows, negatives):
    def loss_fn(params):
      return sampled_loss(nnx.merge(graph, params), windows, negatives)

    # Of the varying view the gradients stay local: zen_sync averages them.
    varying = zenjax.as_varying(params, AXIS)
    loss, grads = jax.value_and_grad(loss_fn)(varying)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(loss, AXIS), seen(grads)

  step = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(), specs, P(AXIS), P(AXIS)),
    out_specs=(P(), specs, P(), P(AXIS)),
  )
  return jax.jit(step, donate_argnums=(0, 1))


def _compiled_exact_loss(graph, mesh):
  def loss(params, windows):
    return lax.pmean(exact_loss(nnx.merge(graph, params), windows), AXIS)

  return jax.jit(
    jax.shard_map(loss, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
  )


class Interrupt:
  """Makes Ctrl-C a request: `requested` is set, the work in progress ends.

  A second Ctrl-C kills the program: an exception in the middle of a step would
  tear down XLA while its devices compute.
  """

  def __init__(self):
    self.requested = False

  def __enter__(self) -> "Interrupt":
    self._before = signal.signal(signal.SIGINT, self._request)
    return self

  def __exit__(self, *_) -> None:
    signal.signal(signal.SIGINT, self._before)

  def _request(self, *_) -> None:
    self.requested = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def fit(
  trainer: Trainer,
  batches: Iterator[Batch],
  steps: range,
  *,
  label: str,
  interrupt: Interrupt,
  after_step: Callable[[int], object] = lambda step: None,
) -> History:
  """Runs `steps`, or fewer on Ctrl-C, under a progress bar.

  Args:
    trainer: What is trained.
    batches: One batch a step.
    steps: Numbers of the steps to run.
    label: Name of the run.
    interrupt: Looked at after every step.
    after_step: Called with the number of steps done so far.

  Returns:
    The history of the steps that were run.
  """
  history = History()
  bar = tqdm(
    steps, desc=label, initial=steps.start, total=steps.stop, mininterval=1
  )
  for step, batch in zip(bar, batches):
    if interrupt.requested:
      break
    start = time.perf_counter()
    history.losses.append(trainer.step(batch))
    history.seconds.append(time.perf_counter() - start)
    history.stats.append(trainer.stats())
    tokens = len(batch.windows) * LENGTH / history.seconds[-1]
    bar.set_postfix_str(
      f"loss {history.losses[-1]:.3f}, {tokens:,.0f} tokens/s",
      refresh=False,
    )
    after_step(step + 1)
  bar.close()
  return history

"""A data-parallel training step of any model, with either synchronization."""

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from examples.studies.common import cluster
from examples.studies.common.cluster import AXIS
from examples.studies.common.loop import Batch
from examples.studies.common.sparsifier import Sparsifier
import zenjax


def adagrad(learning_rate: float) -> optax.GradientTransformation:
  """Returns Adagrad for gradients that are means over thousands of examples.

  The accumulator starts at zero: optax's default of 0.1 would drown them.
  """
  return optax.adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-10)


class Trainer:
  """A model's parameters and optimizer state on a mesh, and its two programs.

  Args:
    make: Makes the model, with its first parameters.
    loss: Of the model and one device's part of a batch's arrays.
    evaluate: What is taken on held-out data, of the model and one device's
      part of some arrays.
    optimizer: Makes updates of mean gradients.
    mesh: The devices.
    sync: "zen", "pmean", or "sharded": tables are split over devices, each row
      with the device that owns it. Or a transformation that averages dense
      gradients over `AXIS`.
    grads: "dense", or "rows" of the tables that are only looked up, as always
      of sharded ones.
    sparsifier: Takes the place of either, for dense gradients.
    joined: Whether the devices' results of `evaluate` are joined along their
      first axis; else they are equal.

  Attributes:
    params: parameters, equal on all devices but for sharded tables.
    opt_state: optimizer state; it holds zen_sync's or a sparsifier's numbers.
  """

  def __init__(
    self,
    make: Callable[[], nnx.Module],
    loss: Callable[..., jax.Array],
    evaluate: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    sync: str | optax.GradientTransformation = "pmean",
    grads: str = "dense",
    sparsifier: Sparsifier | None = None,
    joined: bool = False,
  ):
    grads = "rows" if sync == "sharded" else grads
    tx = _transform(optimizer, sync, grads, sparsifier)
    graph, _ = nnx.split(nnx.eval_shape(make), nnx.Param)
    first = lambda: nnx.split(make(), nnx.Param)[1]
    self._sync, self._sparsifier = sync, sparsifier
    self._mesh, self._split = mesh, NamedSharding(mesh, P(AXIS))
    if sync == "sharded":  # Inside jit no device makes a whole table.
      shard = jax.jit(lambda: zenjax.tables.shard(first(), mesh, AXIS))
      self.params = shard()
    else:
      self.params = cluster.place(first(), NamedSharding(mesh, P()))
    self.opt_state = zenjax.init_state(tx, self.params, mesh, AXIS)
    specs = lambda: zenjax.state_specs((self.params, self.opt_state), AXIS)
    self._compile = lambda seen: _compiled_step(
      graph, loss, tx, mesh, specs(), grads, seen
    )
    self._step = self._compile(_nothing)
    self._evaluate = _compiled_evaluation(
      graph, evaluate, mesh, specs()[0], joined
    )
    self._recorder: zenjax.planner.Recorder | None = None

  def step(self, batch: Batch) -> float:
    """Trains on one batch and returns its loss."""
    recorder = self._recorder
    recording = recorder is not None and recorder.wants_more
    self.params, self.opt_state, loss, seen = (
      self._recorded_step if recording else self._step
    )(self.params, self.opt_state, cluster.place(batch.arrays, self._split))
    if recorder and recording:
      recorder.write(seen)
    return float(loss)  # Waits for the step: it is timed, and can be stopped.

  def stats(self) -> dict[str, dict[str, float]]:
    """Returns numbers of zen_sync or a sparsifier in the last step."""
    if self._sparsifier:
      return self._sparsifier.stats(self.opt_state)
    counts = self._sync in ("zen", "sharded")
    return zenjax.stats(self.opt_state) if counts else {}

  @property
  def saved(self) -> dict[str, Any]:
    """What a checkpoint holds: sharded tables in the order of their rows."""
    state = {"params": self.params, "opt_state": self.opt_state}
    return zenjax.to_checkpoint(state) if self._sync == "sharded" else state

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on from what was `saved`."""
    if self._sync == "sharded":
      state = zenjax.from_checkpoint(state, self._mesh, AXIS)
    self.params, self.opt_state = state["params"], state["opt_state"]

  def evaluate(self, *arrays: np.ndarray) -> np.ndarray:
    """Evaluates arrays whose first axis the devices divide."""
    placed = cluster.place(arrays, self._split)
    return cluster.gathered(self._evaluate(self.params, placed))

  def record(self, directory: str, steps: int) -> None:
    """Records which rows the first steps touch."""
    try:
      recorder = zenjax.planner.record(directory, self.params, steps=steps)
    except ValueError as error:
      raise SystemExit(
        f"--trace: {error} Here: raise --vocab or lower --width"
      ) from error
    self._recorder = recorder
    self._recorded_step = self._compile(recorder.rows)

  def recorded(self) -> int:
    """Returns the number of steps in the trace."""
    return self._recorder.written if self._recorder else 0


def _transform(
  optimizer: optax.GradientTransformation,
  sync: str | optax.GradientTransformation,
  grads: str,
  sparsifier: Sparsifier | None,
) -> optax.GradientTransformation:
  """Chains synchronization and optimizer, for the form the gradients have."""
  if sparsifier:
    return optax.chain(sparsifier.transformation(), optimizer)
  if not isinstance(sync, str):
    return optax.chain(sync, optimizer)
  if sync == "pmean":
    # What most programs do: a dense mean of all gradients.
    mean = optax.stateless(lambda updates, _: lax.pmean(updates, AXIS))
    return optax.chain(mean, optimizer)
  if sync == "sharded":
    return zenjax.sharded_optimizer(optimizer, AXIS)
  if grads == "rows":
    optimizer = zenjax.lazy_rows(optimizer)
  return optax.chain(zenjax.zen_sync(AXIS), optimizer)


def _nothing(grads: Any) -> tuple[()]:
  return ()


def _compiled_step(graph, loss, tx, mesh, specs, grads_are, seen):
  """Compiles a step, which returns `seen(grads)` of every device as well."""

  def step(params, opt_state, arrays):
    def loss_fn(params):
      return loss(nnx.merge(graph, params), *arrays)

    if grads_are == "rows":
      # Rows that were looked up, of the tables that only are; all are local.
      mine, grads = zenjax.value_and_grad(loss_fn)(params)
    else:
      # Of the varying view the gradients stay local: zen_sync averages them.
      varying = zenjax.unreduced(params, AXIS)
      mine, grads = jax.value_and_grad(loss_fn)(varying)
    updates, opt_state = tx.update(grads, opt_state, params)
    # As `optax.apply_updates`, and for updates that are rows.
    params = zenjax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(mine, AXIS), seen(grads)

  step = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(*specs, P(AXIS)),
    out_specs=(*specs, P(), P(AXIS)),
  )
  return jax.jit(step, donate_argnums=(0, 1))


def _compiled_evaluation(graph, evaluate, mesh, specs, joined):
  @zenjax.tables.apply  # Fetches rows of sharded tables.
  def run(params, arrays):
    return evaluate(nnx.merge(graph, params), *arrays)

  return jax.jit(
    jax.shard_map(
      run,
      mesh=mesh,
      in_specs=(specs, P(AXIS)),
      out_specs=P(AXIS) if joined else P(),
    )
  )

"""Data-parallel training: devices, the loop over steps, and what it saw."""

from collections.abc import Callable, Iterator
import dataclasses
import os
import statistics
import time
from typing import Protocol, TypeVar

from interrupts import Interrupt
import jax
from jax.sharding import Mesh
import numpy as np
from tqdm import tqdm

AXIS = "data"

_CPU_DEVICES = 8

# Steps whose time says nothing: the first one compiles, memory is still cold.
_WARM_UP = 3


def make_mesh(count: int | None = None) -> Mesh:
  """Devices in a row. A CPU plays several, or there is nothing to send.

  Args:
    count: The first so many; by default all.

  Raises:
    ValueError: There are fewer.
  """
  chosen = "xla_force_host_platform_device_count" in os.getenv("XLA_FLAGS", "")
  if jax.config.jax_num_cpu_devices < 0 and not chosen:
    # Must precede the first use of a device; accelerators do not mind it.
    jax.config.update("jax_num_cpu_devices", max(_CPU_DEVICES, count or 0))
  devices = jax.devices()
  if count is not None and count > len(devices):
    raise ValueError(f"must be at most {len(devices)}, got {count}")
  return Mesh(np.array(devices[:count]), (AXIS,))


class Batch(Protocol):
  """What all devices train on in one step."""

  @property
  def size(self) -> int:
    """Of how many units it is."""
    ...


_Batch = TypeVar("_Batch", bound=Batch)
_TakenBatch = TypeVar("_TakenBatch", bound=Batch, contravariant=True)


class Trainer(Protocol[_TakenBatch]):
  """What `fit` trains."""

  def step(self, batch: _TakenBatch) -> float:
    """Trains on one batch, waits for it, and returns its loss."""
    ...

  def stats(self) -> dict[str, dict[str, float]]:
    """What zen_sync saw in the last step, by leaf; nothing for pmean."""
    ...


@dataclasses.dataclass(slots=True)
class History:
  """What the steps of one run gave, in order.

  Attributes:
    losses: the mean over devices.
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


def fit(
  trainer: Trainer[_Batch],
  batches: Iterator[_Batch],
  steps: range,
  *,
  label: str,
  unit: str,
  interrupt: Interrupt,
  after_step: Callable[[int], object] = lambda step: None,
  note: Callable[[], str] = lambda: "",
  history: History | None = None,
) -> History:
  """Runs `steps`, or fewer on Ctrl-C, under a progress bar.

  Args:
    trainer: What is trained.
    batches: One batch a step.
    steps: Numbers of the steps to run.
    label: Name of the run.
    unit: What a batch's size counts: "tokens".
    interrupt: Looked at after every step.
    after_step: Called with the number of steps done so far.
    note: What the progress bar shows beside loss and speed.
    history: What grows with the steps, for `after_step` to look at.

  Returns:
    The history of the steps that were run.
  """
  history = History() if history is None else history
  bar = tqdm(
    steps,
    desc=label,
    initial=steps.start,
    total=steps.stop,
    mininterval=1,
    disable=jax.process_index() > 0,
  )
  for step, batch in zip(bar, batches):
    if interrupt.agreed():
      break
    start = time.perf_counter()
    history.losses.append(trainer.step(batch))
    history.seconds.append(time.perf_counter() - start)
    history.stats.append(trainer.stats())
    rate = batch.size / history.seconds[-1]
    after_step(step + 1)
    shown = f"loss {history.losses[-1]:.3f}, {rate:,.0f} {unit}/s{note()}"
    bar.set_postfix_str(shown, refresh=False)
  bar.close()
  return history

"""NumPy models in float64 of training with state that differs on devices."""

from typing import NamedTuple

import numpy as np


class Sgd:
  """SGD, with momentum if there is any."""

  def __init__(
    self, rate: float, momentum: float = 0.0, nesterov: bool = False
  ):
    self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
    self.trace = 0.0

  def __call__(self, w, g):
    self.trace = g + self.momentum * self.trace
    moved = g + self.momentum * self.trace if self.nesterov else self.trace
    return w - self.rate * moved


class AdamW:
  """AdamW with the defaults of optax."""

  def __init__(self, rate: float, decay: float = 1e-4):
    self.rate, self.decay, self.count = rate, decay, 0
    self.mu = self.nu = 0.0

  def __call__(self, w, g):
    self.count += 1
    self.mu = 0.9 * self.mu + 0.1 * g
    self.nu = 0.999 * self.nu + 0.001 * g**2
    mu = self.mu / (1 - 0.9**self.count)
    nu = self.nu / (1 - 0.999**self.count)
    return w - self.rate * (mu / (np.sqrt(nu) + 1e-8) + self.decay * w)


class Problem(NamedTuple):
  """A regression: examples of each round, device and step, and targets."""

  x: np.ndarray  # [rounds, n, every, examples, 3]
  y: np.ndarray  # [rounds, n, every, examples, 2]

  def one(self, *at: int) -> "Problem":
    """The examples of a round, of one device, or of one step."""
    return Problem(self.x[at], self.y[at])


def problem(rounds: int, n: int, every: int, seed: int = 0) -> Problem:
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((rounds, n, every, 5, 3)).astype(np.float32)
  y = rng.standard_normal((rounds, n, every, 5, 2)).astype(np.float32)
  return Problem(x, y)


def loss(w, batch):
  """The mean squared error, in NumPy and in JAX."""
  return ((batch.x @ w - batch.y) ** 2).mean()


def gradient(w, batch):
  wrong = batch.x.astype(np.float64) @ w - batch.y
  return 2 / wrong.size * batch.x.T @ wrong


def delayed_sgd(w, data: Problem, rate: float, means: bool = True):
  """Each step moves by the gradients of the step before; every is 1."""
  steps, n = data.x.shape[:2]
  saved = np.zeros((n, *w.shape))
  for step in range(steps):
    new = [gradient(w, data.one(step, i, 0)) for i in range(n)]
    w = w - rate * (saved.mean(axis=0) if means else saved.sum(axis=0))
    saved = np.stack(new)
  return w, saved


def diloco(w, data: Problem, inner, outer):
  """Returns parameters, and the losses and inner optimizers of devices.

  Args:
    w: First parameters.
    data: What devices see.
    inner: Makes the optimizer of a device.
    outer: The optimizer of mean pseudo-gradients.
  """
  rounds, n, every = data.x.shape[:3]
  optimizers = [inner() for _ in range(n)]
  losses = np.zeros((rounds, n, every))
  for r in range(rounds):
    moved = []
    for i in range(n):
      own = w
      for k in range(every):
        batch = data.one(r, i, k)
        losses[r, i, k] = loss(own, batch)
        own = optimizers[i](own, gradient(own, batch))
      moved.append(w - own)
    w = outer(w, np.mean(moved, axis=0))
  return w, losses.mean(axis=2), optimizers


def momentum_of_each(w, data: Problem, rate: float, decay: float):
  """Momentum on each device, then a mean, then SGD; every is 1."""
  steps, n = data.x.shape[:2]
  traces = np.zeros((n, *w.shape))
  for step in range(steps):
    new = [gradient(w, data.one(step, i, 0)) for i in range(n)]
    traces = np.stack(new) + decay * traces
    w = w - rate * traces.mean(axis=0)
  return w, traces

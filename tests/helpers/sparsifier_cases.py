"""Small sparsifiers and gradients that their tests share."""

from typing import Any

import numpy as np
import sparsifier_models as models

SIZE = 1_200
F32 = np.dtype(np.float32)


def exdyna(n: int, size: int = SIZE, density: float = 0.05, **options: Any):
  return models.ExDyna(size, n, density, blocks=64, align=4, **options)


def micro(n: int, size: int = SIZE, density: float = 0.05, **options: Any):
  return models.Micro(size, n, density, **options)


def top_k(n: int, **options: Any):
  return models.ErrorFeedback(SIZE, n, models.TopK(60), **options)


def hard_threshold(n: int, **options: Any):
  selector = models.HardThreshold(0.4, k=60)
  return models.ErrorFeedback(SIZE, n, selector, **options)


def random_k(n: int, **options: Any):
  def draw(step: int):
    rng = np.random.default_rng(step)
    return [rng.integers(0, SIZE, 60) for _ in range(n)]

  return models.ErrorFeedback(SIZE, n, models.RandomK(draw, 60), **options)


EXCLUSIVE = {"exdyna": exdyna, "micro": micro}
LOCAL = {"top_k": top_k, "threshold": hard_threshold, "random_k": random_k}
EVERY = EXCLUSIVE | LOCAL


def laplace(seed: int, n: int, size: int = SIZE, scale: float = 0.1):
  rng = np.random.default_rng(seed)
  return rng.laplace(0, scale, (n, size)).astype(np.float32)


def skewed(seed: int, n: int, size: int = SIZE):
  """Large at the end of the vector, small at its start."""
  return laplace(seed, n, size) * np.geomspace(0.1, 10, size, dtype=F32)


def train(model, steps: int, draw=laplace) -> list[Any]:
  """What every step returned, on gradients `draw(step, n)`."""
  return [model.step(draw(step, model.n)) for step in range(steps)]

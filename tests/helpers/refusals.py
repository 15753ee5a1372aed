"""Bad input: functions traced on two devices, and what a message must name."""

from collections.abc import Iterator
import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zenjax

N = 2
TABLE = jax.ShapeDtypeStruct((N, 40, 4), jnp.float32)


def trace(f, *stacks):
  """Traces `f` on one of `N` devices; nothing is compiled or allocated."""
  return jax.eval_shape(
    jax.vmap(f, axis_name="data", axis_size=N), *(stacks or (TABLE,))
  )


def trace_pmean(*stacks, **options):
  return trace(lambda x: zenjax.sparse_pmean(x, "data", **options), *stacks)


def names(error, *words):
  """The message holds every word."""
  message = str(error.value)
  missing = [word for word in words if word not in message]
  assert not missing, f"{missing} not in: {message}"


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[Any]:
  """What is inside raises `kind`, and the message holds all words.

  "one ... two" are two words.
  """
  with pytest.raises(kind) as error:
    yield error
  names(error, *" ... ".join(words).split(" ... "))

"""Cases that every run has, and others that `-m more` asks for."""

from collections.abc import Iterable
from typing import Any

import pytest


def usual(cases: Iterable[str], *names: str) -> list[Any]:
  """Returns all of `cases`, marked `more` except for `names`."""
  every = list(cases)
  assert set(names) <= set(every), set(names) - set(every)
  more = [name for name in every if name not in names]
  return [*names, *(pytest.param(x, marks=pytest.mark.more) for x in more)]

"""Sparse gradient synchronization for JAX, as an optax transformation.

`zenjax/_public.py` lists the public names. They are imported, together with
JAX, when one of them is first used, so that `zenjax --help` is fast.
"""

import importlib
import importlib.util
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from zenjax._public import *  # noqa: F403
  from zenjax._public import __all__ as __all__
  from zenjax._public import __version__ as __version__


def __getattr__(name: str) -> Any:
  missing = AttributeError(f"module 'zenjax' has no attribute {name!r}")
  if name.startswith("_") and name not in ("__all__", "__version__"):
    raise missing
  # Modules are imported one by one: importing all public names here would be
  # circular, because modules of `zenjax._src` import some of them.
  if importlib.util.find_spec(f"zenjax.{name}"):
    return importlib.import_module(f"zenjax.{name}")
  public = importlib.import_module("zenjax._public")
  if not hasattr(public, name):
    raise missing
  globals()[name] = value = getattr(public, name)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__getattr__("__all__")})

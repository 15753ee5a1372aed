"""Chooses the implementation of an operation when it is traced.

`reference.py` defines an operation and runs everywhere. A kernel is for one
platform and may refuse shapes. Its result is bit-identical.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import dataclasses
import importlib
from typing import Any

import jax

from zenjax._src.core import compat
from zenjax._src.core import wire
from zenjax._src.core.arguments import Kernels

# The module with the kernels of each platform, which is imported when needed.
_MODULES = {"tpu": "zenjax.kernels.tpu", "cuda": "zenjax.kernels.gpu"}

_interpreted: contextvars.ContextVar[tuple[str, Any] | None] = (
  contextvars.ContextVar("interpreted", default=None)
)


@contextlib.contextmanager
def interpreted(platform: str, how: Any = True) -> Iterator[None]:
  """Makes `kernels="pallas"` interpret kernels inside this context.

  Tests and benchmarks use it on machines without the accelerator.

  Args:
    platform: The platform of the kernels, "tpu" or "cuda".
    how: The argument `interpret` of `pallas_call`.
  """
  token = _interpreted.set((platform, how))
  try:
    yield
  finally:
    _interpreted.reset(token)


def loadable(x: jax.Array, interpret: Any) -> jax.Array:
  """Returns `x` for a kernel to load; its bits if the kernel is interpreted.

  XLA:CPU treats bfloat16 subnormals as zeros when it loads them. On an
  accelerator, a conversion could copy `x`.
  """
  return wire.integers(x) if interpret else x


def _platform() -> str:
  """Returns the platform of a traced program.

  In JAX 0.10.0, an abstract mesh has only the kind of its devices, so the
  platform is derived from the kind.
  """
  kind = compat.device_kind()
  if kind == "cpu":
    return "cpu"
  if kind.startswith("TPU"):
    return "tpu"
  return "rocm" if kind.startswith(("AMD", "gfx")) else "cuda"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
  """An operation with its implementations; call it like the reference.

  Attributes:
    name: The name of the kernel in the module of each platform.
    reference: The definition in plain JAX.
  """

  name: str
  reference: Callable[..., Any]

  def __call__(self, *args: Any, kernels: Kernels = "xla") -> Any:
    """Runs the operation.

    Args:
      *args: The arguments of the reference.
      kernels: `"xla"` runs the reference, and `"pallas"` the kernel.

    Raises:
      NotImplementedError: `kernels` is `"pallas"`, and no kernel supports these
        arguments on the platform of the program.
    """
    if kernels == "xla":
      return self.reference(*args)
    platform, interpret = _interpreted.get() or (_platform(), False)
    try:
      return self.kernel(platform)(*args, interpret=interpret)
    except NotImplementedError as error:
      raise NotImplementedError(
        f"`kernels='pallas'` has no kernel of `{self.name}` for these"
        f" arguments on {platform}: it needs {error}. Use `kernels='xla'`,"
        " which runs everywhere."
      ) from error

  def kernel(self, platform: str) -> Callable[..., Any]:
    """Returns the kernel for `platform`, which has the reference's arguments.

    Raises:
      NotImplementedError: The platform has no kernel, or this program cannot
        contain kernels.
    """
    if platform not in _MODULES:
      raise NotImplementedError(f"a device of {' or '.join(_MODULES)}")
    if automatic := compat.automatic_axes():
      raise NotImplementedError(
        "shard_map over all axes of the mesh, got a mesh whose axes"
        f" {sorted(automatic)} are left to XLA, which cannot partition a kernel"
      )
    try:
      module = importlib.import_module(_MODULES[platform])
    except ImportError as error:
      raise NotImplementedError(
        f"a JAX that compiles such kernels, got {error}"
      ) from error
    return getattr(module, self.name)

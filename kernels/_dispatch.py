"""Which implementation of an operation runs, decided when it is traced.

`reference.py` defines an operation and runs everywhere. A kernel serves one
platform and may refuse shapes; it never changes a bit of the result.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import dataclasses
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core import compat
from zenjax._src.core.arguments import Kernels

# Where the kernels for a platform are; imported when they are asked for.
_MODULES = {"tpu": "zenjax.kernels.tpu", "cuda": "zenjax.kernels.gpu"}
# Devices on which kernels are no slower than the reference, and the committed
# result that shows it. Fewer bytes make a kernel promising; only a clock on
# that hardware makes it the better one.
MEASURED = {"NVIDIA H200": "gpu-h200.json"}

_interpreted: contextvars.ContextVar[tuple[str, Any] | None] = (
  contextvars.ContextVar("interpreted", default=None)
)


@contextlib.contextmanager
def interpreted(platform: str, how: Any = True) -> Iterator[None]:
  """Interprets the kernels that `kernels="pallas"` asks for in here.

  For tests and benchmarks on machines without the accelerator.

  Args:
    platform: "tpu" or "cuda", whose kernels to take.
    how: The argument `interpret` of `pallas_call`.
  """
  token = _interpreted.set((platform, how))
  try:
    yield
  finally:
    _interpreted.reset(token)


def _target() -> tuple[str, str]:
  """The platform and kind of the devices that a program is traced for.

  JAX 0.10.0 names only the kind of a mesh's devices, so the kind tells.
  """
  kind = compat.device_kind()
  if kind == "cpu":
    return "cpu", kind
  if kind.startswith("TPU"):
    return "tpu", kind
  return "rocm" if kind.startswith(("AMD", "gfx")) else "cuda", kind


def _as_measured(args: tuple[Any, ...]) -> bool:
  """Returns True for arrays like those that were measured: float32 rows.

  Kernels are not taken unasked where JAX warns of each of them: users may turn
  warnings into errors.
  """
  if compat.TRITON_GOES:
    return False
  arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
  values = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
  return all([x.dtype == jnp.float32 and x.shape[-1] > 1 for x in values])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
  """An operation with its implementations; called as the reference is.

  Attributes:
    name: The name of the kernel in the module of each platform.
    reference: The definition, in plain JAX.
  """

  name: str
  reference: Callable[..., Any]

  def __call__(
    self, *args: Any, kernels: Kernels = "auto", **kwargs: Any
  ) -> Any:
    """Runs the operation.

    Args:
      *args, **kwargs: The arguments of the reference.
      kernels: `"xla"` runs the reference and `"pallas"` the kernel. `"auto"`
        runs the kernel on devices where it was measured to be no slower, and
        the reference elsewhere.

    Raises:
      ValueError: `kernels` is none of these.
      NotImplementedError: `kernels` is `"pallas"`, and no kernel serves these
        arguments on the platform that the program is traced for.
    """
    arguments.check_kernels(kernels)
    args = inspect.signature(self.reference).bind(*args, **kwargs).args
    if kernels == "xla":
      return self.reference(*args)
    platform, kind = _target()
    if kernels == "auto":
      if kind not in MEASURED or not _as_measured(args):
        return self.reference(*args)
      try:
        return self.kernel(platform)(*args)
      except NotImplementedError:
        return self.reference(*args)
    platform, interpret = _interpreted.get() or (platform, False)
    try:
      return self.kernel(platform)(*args, interpret=interpret)
    except NotImplementedError as error:
      raise NotImplementedError(
        f"`kernels='pallas'` found no kernel of `{self.name}` for these"
        f" arguments on {platform}: it needs {error}. Give `kernels='auto'`,"
        " which runs everywhere."
      ) from error

  def kernel(self, platform: str) -> Callable[..., Any]:
    """Returns the kernel for `platform`, which has the reference's arguments.

    Raises:
      NotImplementedError: There is no kernel, or this program cannot have it.
    """
    if platform not in _MODULES:
      raise NotImplementedError(f"a device of {' or '.join(_MODULES)}")
    if automatic := compat.automatic_axes():
      raise NotImplementedError(
        "shard_map over all axes of a mesh, got a mesh of which"
        f" {sorted(automatic)} are left to XLA, which cannot split a kernel"
      )
    try:
      module = importlib.import_module(_MODULES[platform])
    except ImportError as error:
      raise NotImplementedError(
        f"a JAX that compiles such kernels, got {error}"
      ) from error
    return getattr(module, self.name)

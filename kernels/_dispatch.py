"""Which implementation of an operation runs, decided when it is lowered.

`reference.py` of an operation defines it and runs everywhere. A kernel serves
one platform, and may refuse shapes; it never changes a bit of the result.
"""

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import inspect
from types import ModuleType
from typing import Any, Literal

import jax
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import batching
from jax.interpreters import mlir

Implementation = Literal["xla", "pallas"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
  """An operation with its implementations; called as the reference is.

  Attributes:
    name: Of its folder.
    reference: What it is, in plain JAX.
    kernels: Platform to the module of its kernel, imported when asked for. The
      module's function `name` takes what the reference takes and an
      `interpret=`, and its `check` raises NotImplementedError where the kernel
      cannot serve.
    measured: Platform to the committed result that shows its kernel no slower
      than the reference there. `implementation=None` takes kernels on these
      platforms only: fewer bytes in a compiled program make a kernel promising,
      and only a clock on that hardware makes it the better one.
  """

  name: str
  reference: Callable[..., Any]
  kernels: Mapping[str, str]
  measured: Mapping[str, str]

  def __call__(
    self,
    *args: Any,
    implementation: Implementation | None = None,
    **kwargs: Any,
  ) -> Any:
    """The operation on `args`, by the implementation asked for.

    Args:
      *args, **kwargs: What the reference takes.
      implementation: None for the best that the platform has. An explicit one
        is never replaced by another.

    Raises:
      ValueError: There is no such implementation.
      NotImplementedError: The kernel was asked for and cannot serve these
        arguments, or not on the platform that the program is lowered for.
    """
    if implementation not in (None, "xla", "pallas"):
      raise ValueError(
        "`implementation` must be None, 'xla' or 'pallas', got"
        f" {implementation!r}; None takes the best that the platform has."
      )
    args = inspect.signature(self.reference).bind(*args, **kwargs).args
    asked = implementation == "pallas"
    platforms = self.kernels if asked else self.measured
    if implementation == "xla" or not (asked or platforms):
      return self.reference(*args)
    refusals = {name: self.refusal(name, *args) for name in platforms}
    if asked and all(refusals.values()):
      raise NotImplementedError(self._message(refusals))
    branches = {
      name: lambda name=name: self.kernel(name)(*args)
      for name, refusal in refusals.items()
      if not refusal
    }
    otherwise = lambda: self.reference(*args)
    if asked:
      message = self._message(refusals)
      otherwise = lambda: _refuse(self.reference(*args), message)
    return lax.platform_dependent(default=otherwise, **branches)

  def kernel(self, platform: str) -> Callable[..., Any]:
    """The kernel for `platform`."""
    return getattr(self._module(platform), self.name)

  def refusal(self, platform: str, *args: Any) -> str:
    """Why the kernel for `platform` cannot serve `args`; empty if it can."""
    try:
      self._module(platform).check(*args)
    except NotImplementedError as error:
      return str(error)
    return ""

  def _module(self, platform: str) -> ModuleType:
    return importlib.import_module(self.kernels[platform])

  def _message(self, refusals):
    served = [f"on {name}: {why or 'yes'}" for name, why in refusals.items()]
    return (
      f"`implementation='pallas'`: `{self.name}` cannot run so here; it can be"
      f" served {'; '.join(served) or 'nowhere yet'}. implementation='xla' runs"
      " everywhere."
    )


# Traced for every platform and lowered for the one that is there, so a refusal
# is an operation of its own, which fails when it is lowered.
_refused_p = jex_core.Primitive("zenjax_refused")
_refused_p.multiple_results = True


def _refuse(like: Any, message: str) -> Any:
  """Has the type of `like`, and cannot be lowered."""
  leaves, tree = jax.tree.flatten(like)
  return tree.unflatten(_refused_p.bind(*leaves, message=message))


def _cannot_run(*args, message):
  raise NotImplementedError(message)


_refused_p.def_impl(_cannot_run)
_refused_p.def_abstract_eval(lambda *avals, message: list(avals))
mlir.register_lowering(_refused_p, _cannot_run)
batching.primitive_batchers[_refused_p] = lambda args, dims, *, message: (
  _refused_p.bind(*args, message=message),
  dims,
)

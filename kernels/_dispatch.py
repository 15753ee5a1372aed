"""Which implementation of an operation runs, decided when it is lowered.

`reference.py` defines an operation and runs everywhere. A kernel serves
one platform, and may refuse shapes; it never changes a bit of the result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import importlib
import inspect
from types import ModuleType
from typing import Any, get_args, NamedTuple, NoReturn

import jax
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from zenjax._src.core import arguments
from zenjax._src.core import compat
from zenjax._src.core.arguments import Kernels


class Call(NamedTuple):
  """An operation that was traced, and where its kernel runs.

  Elsewhere the reference does; `EVERYWHERE` stands for all platforms.
  """

  name: str
  kernels: frozenset[str]


EVERYWHERE = "*"


class _Forced(NamedTuple):
  platform: str | None
  interpret: Any


class _Asked(NamedTuple):
  """By what a kernel was asked for, and what to give in its place."""

  option: str
  instead: str


_ASKED = _Asked("kernels='pallas'", "kernels='auto'")


_forced: contextvars.ContextVar[_Forced | None] = contextvars.ContextVar(
  "forced", default=None
)
_recorded: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar(
  "recorded", default=None
)


@contextlib.contextmanager
def forced(platform: str | None, *, interpret: Any = False) -> Iterator[None]:
  """What is traced in here takes the kernels for `platform`, measured or not.

  For tests and benchmarks. Where a kernel cannot serve the reference runs, as
  it does where `kernels="auto"` decides. `"xla"` and `"pallas"` are obeyed in
  here as well, and `"pallas"` takes the kernel for `platform`, interpreted.

  Args:
    platform: Of `Operation.kernels`; None for the reference everywhere.
    interpret: As kernels take it; False where the program runs on `platform`.
  """
  token = _forced.set(_Forced(platform, interpret))
  try:
    yield
  finally:
    _forced.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
  """Lists the operations that are traced in here, in order.

  What is recorded inside of another recording is in both.
  """
  calls: list[Call] = []
  around = _recorded.get()
  token = _recorded.set(calls)
  try:
    yield calls
  finally:
    _recorded.reset(token)
    if around is not None:
      around += calls


def asked_for(kernels: Kernels) -> bool:
  """Returns True if kernels were asked for, and not where they are better."""
  forced = kernels == "auto" and _forced.get() is not None
  return forced or kernels == "pallas"


def _as_measured(platform: str, args: tuple[Any, ...]) -> bool:
  """Returns True for arrays such as were measured: float32 rows.

  Not where JAX warns of every kernel: users may have made warnings errors.
  """
  if platform == "cuda" and compat.TRITON_GOES:
    return False
  arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
  values = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
  return all([x.dtype == jnp.float32 and x.shape[-1] > 1 for x in values])


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
    measured: By platform, a kind of device to the committed result that shows
      the kernel no slower than the reference there. `kernels="auto"` takes
      kernels on these devices only: fewer bytes in a compiled program make a
      kernel promising, and only a clock on that hardware makes it the better
      one. What is traced for other devices is the reference alone.
  """

  name: str
  reference: Callable[..., Any]
  kernels: Mapping[str, str]
  measured: Mapping[str, Mapping[str, str]]

  def __call__(
    self,
    *args: Any,
    kernels: Kernels = "auto",
    **kwargs: Any,
  ) -> Any:
    """The operation on `args`, by what `kernels` says.

    Args:
      *args, **kwargs: What the reference takes.
      kernels: `"xla"` for the reference; `"pallas"` for the kernel of the
        platform, which nothing replaces; `"auto"` for the kernel on devices on
        which it was measured, and the reference elsewhere.

    Raises:
      ValueError: `kernels` is none of these.
      NotImplementedError: The kernel was asked for and cannot serve these
        arguments, or not on the platform that the program is lowered for.
    """
    if kernels not in get_args(Kernels):
      arguments.check_kernels(kernels)  # Raises.
    args = inspect.signature(self.reference).bind(*args, **kwargs).args
    if kernels == "pallas":
      return self._run_kernel(args, _ASKED)
    how = _forced.get()
    if kernels == "auto" and how is not None:
      return self._run_forced(how, args)
    kind = compat.device_kind()
    better = [
      name
      for name, kinds in self.measured.items()
      if kind in kinds and _as_measured(name, args)
    ]
    if kernels == "xla" or not better:
      self._record()
      return self.reference(*args)
    return self._run_by_platform(
      args,
      {name: self.refusal(name, *args) for name in better},
      lambda: self.reference(*args),
    )

  def required(self, option: str, instead: str, *args: Any) -> Any:
    """The operation on `args` by its kernel, which another option stands for.

    As `kernels="pallas"`, but for the words of an error.

    Args:
      option: With its value, for the message of an error.
      instead: What runs everywhere, for the same.
      *args: What the reference takes.

    Raises:
      NotImplementedError: The kernel cannot serve these arguments, or not on
        the platform that the program is lowered for.
    """
    return self._run_kernel(args, _Asked(option, instead))

  def _run_kernel(self, args: tuple[Any, ...], asked: "_Asked") -> Any:
    how = _forced.get()
    platform = how.platform if how else None
    if how is not None and platform is not None and platform in self.kernels:
      refusal = self._refusal_forced(platform, how.interpret, args)
      if refusal:
        raise NotImplementedError(self._message({platform: refusal}, asked))
      self._record(EVERYWHERE)
      return self.kernel(platform)(*args, interpret=how.interpret)
    refusals = {name: self.refusal(name, *args) for name in self.kernels}
    message = self._message(refusals, asked)
    if all(refusals.values()):
      raise NotImplementedError(message)
    return self._run_by_platform(
      args, refusals, lambda: _refuse(self.reference(*args), message)
    )

  def _run_by_platform(self, args, refusals, otherwise):
    branches = {
      name: lambda name=name: self.kernel(name)(*args)
      for name, refusal in refusals.items()
      if not refusal
    }
    self._record(*branches)
    return lax.platform_dependent(default=otherwise, **branches)

  def _run_forced(self, how: _Forced, args: tuple[Any, ...]) -> Any:
    platform = how.platform
    if (
      platform is None
      or platform not in self.kernels
      or self._refusal_forced(platform, how.interpret, args)
    ):
      self._record()
      return self.reference(*args)
    self._record(EVERYWHERE)
    return self.kernel(platform)(*args, interpret=how.interpret)

  def _refusal_forced(
    self, platform: str, interpret: Any, args: tuple[Any, ...]
  ) -> str:
    arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    if interpret is True and any(map(compat.varying_axes, arrays)):
      return (
        "inside shard_map(.., check_vma=False), got types that vary over a"
        " mesh, which `interpret=True` does not know"
      )
    return self.refusal(platform, *args)

  def _record(self, *kernels: str) -> None:
    calls = _recorded.get()
    if calls is not None:
      calls.append(Call(self.name, frozenset(kernels)))

  def kernel(self, platform: str) -> Callable[..., Any]:
    """The kernel for `platform`."""
    return getattr(self._module(platform), self.name)

  def refusal(self, platform: str, *args: Any) -> str:
    """Why the kernel for `platform` cannot serve `args`; empty if it can."""
    automatic = compat.automatic_axes()
    if automatic:
      return (
        "inside shard_map over all axes of a mesh, got a mesh of which"
        f" {sorted(automatic)} are left to XLA, which cannot split a kernel"
      )
    try:
      self._module(platform).check(*args)
    except NotImplementedError as error:
      return str(error)
    except ImportError as error:
      return f"with a JAX that compiles such kernels, got {error}"
    return ""

  def _module(self, platform: str) -> ModuleType:
    return importlib.import_module(self.kernels[platform])

  def _message(self, refusals, asked):
    served = [f"on {name}: {why or 'yes'}" for name, why in refusals.items()]
    return (
      f"`{asked.option}` must find a kernel for `{self.name}`, which nothing"
      f" replaces, got {_HERE}; it can be served"
      f" {'; '.join(served) or 'nowhere yet'}. Give {asked.instead}, which runs"
      " everywhere."
    )


# Traced for every platform and lowered for the one that is there, so a refusal
# is an operation of its own, which fails when it is lowered.
_refused_p = jex_core.Primitive("zenjax_refused")
_refused_p.multiple_results = True
# In a message, until the platform is known.
_HERE = "these arguments"


def _refuse(like: Any, message: str) -> Any:
  """Has the type of `like`, and cannot be lowered."""
  leaves, tree = jax.tree.flatten(like)
  return tree.unflatten(_refused_p.bind(*leaves, message=message))


def _cannot_run(platforms: Sequence[str], message: str) -> NoReturn:
  raise NotImplementedError(
    message.replace(_HERE, f"a program for {' and '.join(platforms)}")
  )


def _cannot_lower(ctx: Any, *args: Any, message: str) -> NoReturn:
  del args
  _cannot_run(ctx.module_context.platforms, message)


_refused_p.def_impl(
  lambda *args, message: _cannot_run([jax.default_backend()], message)
)
_refused_p.def_abstract_eval(lambda *avals, message: list(avals))
mlir.register_lowering(_refused_p, _cannot_lower)
batching.primitive_batchers[_refused_p] = lambda args, dims, *, message: (
  _refused_p.bind(*args, message=message),
  dims,
)

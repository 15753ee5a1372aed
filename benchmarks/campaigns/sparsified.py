"""`sparsified`: steps of a dense model between hosts, whole and compressed.

Some layers of `width x width`; what a host does not send waits there. Every
host runs `python -m benchmarks.campaigns.sparsified`.

Letters: `n` hosts, `N` parameters, `k` selected elements of all hosts.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
import dataclasses
import math
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import campaign
from benchmarks import harness
from benchmarks import table
from benchmarks.campaigns.planned import programs
from benchmarks.cases import sync
from benchmarks.harness import Case
from benchmarks.testbed import netns
from benchmarks.testbed import served
import zenjax
from zenjax import compress
from zenjax import planner

_BATCHES = 4
# Until counts are known, and until a controlled threshold has settled.
_WARM_UP, _SETTLED = 8, 100
# Of these, the last so many tell what a step sends.
_TOLD = 20
_COUNTED = "wire_bytes", "density", "rounds"
# float32 sums, and a learning rate that was multiplied with and divided by.
_RELATIVE = 1e-4
# Large enough that parameters, in float32, tell what an update was.
_RATE = 8.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
  """The sizes that the variants share."""

  width: int  # Of the square layers.
  layers: int
  batch: int  # Examples of a host.
  density: float  # That all hosts send together, `exdyna` and `micro`.
  top: float  # That each host sends, `top_k`.


@dataclasses.dataclass(frozen=True, slots=True)
class _Variant:
  """A way from gradients to updates."""

  make: Callable[[Setting], Any]
  compressor: Callable[[Setting], compress.Compressor] | None = None
  warm_up: int = _WARM_UP  # Steps before those that are timed.


def _bfloat16(_: Setting) -> Any:
  """Casts gradients before they are averaged, which needs no library."""
  cast = lambda dtype: optax.stateless(
    lambda updates, _: jax.tree.map(lambda x: x.astype(dtype), updates)
  )
  mean = optax.stateless(
    lambda updates, _: jax.tree.map(
      lambda x: jax.lax.pmean(x, sync.AXIS), updates
    )
  )
  return optax.chain(cast(jnp.bfloat16), mean, cast(jnp.float32))


def _compressed(
  make: Callable[[Setting], compress.Compressor], warm_up: int = _WARM_UP
) -> _Variant:
  return _Variant(
    lambda setting: compress.all_reduce(make(setting), sync.AXIS, leaves=True),
    compressor=make,
    warm_up=warm_up,
  )


NONE, DENSE, BFLOAT16, PLAN = "none", "pmean", "bfloat16 pmean", "plan"
VARIANTS = {
  NONE: _Variant(lambda _: optax.identity()),
  DENSE: _Variant(lambda _: sync.PMEAN),
  BFLOAT16: _Variant(_bfloat16),
  "int8": _compressed(lambda _: compress.LowBit(8)),
  "int4": _compressed(lambda _: compress.LowBit(4)),
  "sign": _compressed(lambda _: compress.Sign()),
  "PowerSGD": _compressed(lambda _: compress.PowerSGD(4)),
  "exdyna": _compressed(lambda s: compress.ExDyna(s.density), _SETTLED),
  "micro": _compressed(lambda s: compress.MiCRO(s.density), _SETTLED),
  "top_k": _compressed(lambda s: compress.TopK(s.top)),
  PLAN: _Variant(lambda _: None, warm_up=_SETTLED),  # Of all compressors.
}


def model(setting: Setting, hosts: int) -> programs.Model:
  """Layers of `width x width`, random vectors in and out."""
  rng = np.random.default_rng(0)
  width, batch = setting.width, setting.batch * hosts
  draw = lambda rows: rng.standard_normal((rows, width), np.float32)
  params = {f"w{i}": draw(width) * width**-0.5 for i in range(setting.layers)}

  def loss(params, x, y):
    for name in sorted(params):
      x = jnp.tanh(x @ params[name])
    return jnp.mean((x - y) ** 2)

  batches = [(draw(batch), draw(batch)) for _ in range(_BATCHES)]
  return programs.Model(params, loss, batches)


class _Worker(served.Worker):
  """This host's share of the steps."""

  _place: programs.Place | None = None
  _mean: np.ndarray  # `[N]`, the first gradient.
  _size: int  # Bytes of all gradients.

  def build(
    self, variant: str, setting: dict[str, Any], rate: str
  ) -> dict[str, Any]:
    """Compiles a variant, checks its first step, and warms it up.

    Its time to compress is measured, too, and the planner predicts the rest.
    """
    known, made = VARIANTS[variant], Setting(**setting)
    self._size = 4 * made.layers * made.width**2
    if self._place is None:
      self._place = programs.Place(model(made, self.mesh.size), self)
      self._mean = self._sent_and_kept(self._program(sync.PMEAN))
    planned_s, tx = 0.0, known.make(made)
    if variant == PLAN:
      planned_s, tx = self._plan(made, rate)
    program = self._program(tx)
    self.cases.append(program)
    wrong = 0
    if variant != NONE:
      got = self._sent_and_kept(program)
      relative = 2**-7 if variant == BFLOAT16 else _RELATIVE
      wrong = programs.count_far(got, self._mean, relative)
    facts = []
    for left in reversed(range(known.warm_up)):
      program()
      if left < _TOLD:
        facts.append(self._facts(program, variant))
    means = {k: float(np.mean([f[k] for f in facts])) for k in facts[0]}
    if variant == PLAN:
      means["planned_s"] = planned_s
    elif variant != NONE and netns.RATES[rate]:
      means["planned_s"] = self._planned(made, known.compressor, rate)
    return {"wrong": wrong, "compile_s": program.compile_s, "facts": means}

  def _plan(
    self, setting: Setting, rate: str
  ) -> tuple[float, optax.GradientTransformation]:
    """Measures the plan for each compressor; returns the fastest one.

    Each is measured in its parts and in one exchange. The first result is what
    the plan predicts for the exchange.
    """
    assert self._place is not None
    # All hosts must plan with the same numbers.
    agreed = multihost_utils.broadcast_one_to_all
    times, none = [], self._program(optax.identity())
    for _ in range(2 * _WARM_UP):
      begun = time.perf_counter()
      none()
      times.append(time.perf_counter() - begun)
    compute_s = float(agreed(np.median(times[_WARM_UP:])))
    made = [x.compressor for x in VARIANTS.values()]
    compressors = [make(setting) for make in made if make]
    grads = jax.value_and_grad(self._place.model.loss)
    args = self._place.model.params, *self._place.own_part()
    local_seconds = agreed(
      planner.measure_compressors(
        grads, *args, compressors=compressors, mesh=self.mesh
      )
    )
    plans = [
      planner.plan(
        grads,
        *args,
        topology=planner.Topology.network(rate, self.mesh.size),
        axis_name=sync.AXIS,
        allow=[compressor],
        local_seconds={str(compressor): float(local_seconds[str(compressor)])},
        compute_seconds=given_s,
      )
      for compressor in compressors
      for given_s in (compute_s, 0.0)  # In parts, and in one exchange.
    ]
    step_of = lambda plan: (
      self._program(compress.all_reduce(plan, sync.AXIS)).__call__
    )
    seconds = planner.measure_plans(step_of, plans, repeats=_SETTLED // 4)
    best = plans[int(np.argmin(seconds))]
    return best.seconds - best.compute_seconds, compress.all_reduce(
      best, sync.AXIS
    )

  def _planned(
    self,
    setting: Setting,
    make: Callable[[Setting], compress.Compressor] | None,
    rate: str,
  ) -> float:
    """Returns the predicted time of an exchange."""
    shape = jax.ShapeDtypeStruct((setting.width, setting.width), jnp.float32)
    grads = lambda params: (jnp.float32(0), params)
    layers = [shape] * setting.layers
    compressors, local_seconds = [], {}
    if make:
      compressors = [make(setting)]
      local_seconds = planner.measure_compressors(
        grads, layers, compressors=compressors, mesh=self.mesh
      )
    plan = planner.plan(
      grads,
      layers,
      topology=planner.Topology.network(rate, self.mesh.size),
      allow=compressors,
      local_seconds=local_seconds,
    )
    ways = [
      {way.choice: way.seconds for way in (leaf, *leaf.others)}
      for leaf in plan.leaves
    ]
    wanted = str(compressors[0]) if compressors else DENSE
    return sum(way[wanted] for way in ways)

  def _program(self, tx: optax.GradientTransformation) -> programs.Program:
    assert self._place is not None
    return programs.Program(self._place, optax.chain(tx, optax.sgd(_RATE)))

  def _sent_and_kept(self, program: programs.Program) -> np.ndarray:
    """`[N]`, the mean gradient where nothing is lost."""
    found = programs.sent_and_kept(program, _RATE)
    return np.concatenate([x.ravel() for x in found.values()])

  def _facts(self, program: programs.Program, variant: str) -> dict[str, float]:
    n, size = self.mesh.size, float(self._size)
    part = (n - 1) / n
    dense = 2 * part * size
    if variant == BFLOAT16 and jax.default_backend() != "cpu":
      dense /= 2  # XLA on CPU sums 16-bit floats in 32 bits, and sends them so.
    if variant in (NONE, DENSE, BFLOAT16):
      return {"wire_bytes": dense} if variant != NONE else {}
    every = zenjax.stats(program.state_here())
    if variant == PLAN:  # Its parts.
      parts = [x for name, x in every.items() if name.startswith("compressed")]
      return {"wire_bytes": sum(x["wire_bytes"] for x in parts)}
    told = every["compressed"]
    facts = {name: told[name] for name in _COUNTED if name in told}
    if "build_up" in told:  # Values of all hosts are summed, at `k` places.
      facts["bound_bytes"] = dense * told["density"]
    return facts


def _bytes(result, key="wire_bytes"):
  return result.facts.get(key, math.nan) if result else math.nan


def _fewer_bytes(result, peers):
  """Than `pmean`."""
  return _bytes(peers.get(DENSE)) / _bytes(result)


def _amdahl(result, peers):
  """Returns how much faster it could be: computation is not saved."""
  nothing, dense = (table.median_s(peers, x) for x in (NONE, DENSE))
  return dense / (nothing + (dense - nothing) / _fewer_bytes(result, peers))


def _planned_ms(result, peers):
  nothing = table.median_s(peers, NONE)
  return 1e3 * (nothing + _bytes(result, "planned_s"))


_over_bound = lambda r, _: _bytes(r) / _bytes(r, "bound_bytes")
COLUMNS = (
  table.fact("density\n%", "density", ".3f", unit=0.01),
  table.fact("wire\nMB", "wire_bytes", ".2f", unit=1e6),
  table.Column("wire/\nbound", _over_bound, ".2f"),
  table.Column("fewer\nbytes", _fewer_bytes, ".1f"),
  *table.MEASURED,
  table.Column("planned\nms", _planned_ms, ".0f"),
  table.faster_than(DENSE, "times\nas fast"),
  table.Column("Amdahl's\nbound", _amdahl, ".2f"),
)


def cases(options: argparse.Namespace) -> AbstractContextManager[list[Case]]:
  """Returns a context that yields every variant on hosts."""
  rate = "unlimited" if options.loopback else options.rate
  limited = netns.RATES[rate] is not None  # Otherwise there is nothing to plan.
  known = {k: x for k, x in VARIANTS.items() if k != PLAN or limited}
  names = harness.named("--variants", options.variants, known)
  names_of = [field.name for field in dataclasses.fields(Setting)]
  setting = {name: getattr(options, name) for name in names_of}
  return campaign.cases(
    "campaigns.sparsified",
    options,
    rate,
    f"{options.layers * options.width**2:,} parameters",
    {
      name: {"variant": name, "setting": setting, "rate": rate}
      for name in names
    },
  )


if __name__ == "__main__":
  served.main(_Worker)

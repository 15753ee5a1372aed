"""The Utility paper's models of when compressed gradients pay.

"On the Utility of Gradient Compression in Distributed Training Systems"
(Agarwal et al., MLSys'22, arXiv 2103.00543) models an iteration of plain
synchronous SGD, whose buckets are summed while backward still runs, beside
methods that encode all gradients after it. Of more than 200 set-ups it found 6
in which those paid. Its formulas, and here zen's beside them:

    syncSGD   max(c T, (k - 1) ring(b)) + ring(last bucket)
    PowerSGD  T + encode + ring(P) + ring(Q)
    top-k     T + encode + gather(values) + gather(indices)
    signSGD   T + encode + gather(g / 32)
    zen       max(c T, k ring(b)) + table's exchange + encode

`T` is backward, `c` what it is slowed down by while buckets travel, `k` the
buckets of `b` bytes. A table's gradient is complete at the end of backward, so
that its exchange is exposed whichever way it goes: it is the last bucket.
Times to encode are the paper's of ResNet-50 on a V100, recalled from it, and
taken to grow with the size; nothing here was measured by zenjax.
"""

import dataclasses
import math

import zenjax

# What DDP takes by default, and the paper with it.
BUCKET_BYTES = 25 * 2**20
# The paper found 1.04 to 1.1.
CONTENTION = 1.07


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
  """One model on one machine."""

  model: str  # Its name.
  gradient_bytes: float  # All of it, tables included.
  backward_s: float  # Of a device and step.
  devices: int  # That train together.
  link: zenjax.planner.Link  # Between them.
  table_bytes: float = 0.0  # Of gradients of embedding tables.
  zen_s: float = math.inf  # Of zen for these, with finding and packing.


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
  """A lossy method that encodes the whole gradient."""

  name: str  # Of it.
  encode_s: float  # To encode and decode ResNet-50's gradient on a V100.
  sums: bool  # Messages are all-reduced, and gathered otherwise.
  parts: tuple[float, ...]  # Of the gradient's bytes, one for each message.


# 25.6 million parameters in float32.
RESNET50_BYTES = 25.6e6 * 4


def _power_sgd(rank: int, encode_s: float) -> Method:
  # A quarter of 1 / 72 a rank, half of it P, half Q: ResNet-18's ratio in the
  # PowerSGD paper. At any rank it is a small part of the time.
  parts = (rank / 4 / 72 / 2,) * 2
  return Method(f"PowerSGD, rank {rank}", encode_s, sums=True, parts=parts)


def _top_k(percent: int, encode_s: float) -> Method:
  parts = (percent / 100,) * 2
  return Method(f"top-{percent} %", encode_s, sums=False, parts=parts)


METHODS = (
  _power_sgd(4, 0.045),
  _power_sgd(8, 0.064),
  _power_sgd(16, 0.130),
  _top_k(20, 0.295),
  _top_k(10, 0.289),
  _top_k(1, 0.240),
  Method("signSGD", 0.016, sums=False, parts=(1 / 32,)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
  """The time of a set-up with one way to synchronize."""

  method: str  # Its name.
  seconds: float  # Of backward and what is exposed.
  gain: float  # Iterations in the time of one of syncSGD, less one.


def outcomes(setup: Setup) -> list[Outcome]:
  """Every way, the fastest first; zen only where there are tables.

  Example:
    >>> import zenjax
    >>> fast = zenjax.planner.Link(bandwidth=12.5e9, latency_s=1e-5)
    >>> resnet = Setup(model="ResNet-50", gradient_bytes=RESNET50_BYTES,
    ...   backward_s=0.122, devices=64, link=fast)
    >>> outcomes(resnet)[0].method
    'syncSGD'
  """
  plain = sync_s(setup)
  times = {"syncSGD": plain}
  times |= {method.name: compressed_s(setup, method) for method in METHODS}
  if setup.table_bytes:
    times["zen"] = zen_s(setup)
  found = [Outcome(name, s, plain / s - 1) for name, s in times.items()]
  return sorted(found, key=lambda outcome: outcome.seconds)


def sync_s(setup: Setup) -> float:
  """An iteration of syncSGD."""
  if setup.table_bytes:
    return _rest_s(setup) + _ring_s(setup, setup.table_bytes)
  count = math.ceil(setup.gradient_bytes / BUCKET_BYTES)
  last = setup.gradient_bytes - (count - 1) * BUCKET_BYTES
  before = (count - 1) * _ring_s(setup, BUCKET_BYTES)
  return max(CONTENTION * setup.backward_s, before) + _ring_s(setup, last)


def zen_s(setup: Setup) -> float:
  """An iteration with zen on its tables, and syncSGD on the rest."""
  return _rest_s(setup) + setup.zen_s


def compressed_s(setup: Setup, method: Method) -> float:
  """An iteration of a method that encodes after backward."""
  encode = method.encode_s * setup.gradient_bytes / RESNET50_BYTES
  of = _ring_s if method.sums else _gather_s
  sent = sum(of(setup, part * setup.gradient_bytes) for part in method.parts)
  return setup.backward_s + encode + sent


def _rest_s(setup: Setup) -> float:
  """Backward, and what of the buckets without tables it does not hide."""
  rest = setup.gradient_bytes - setup.table_bytes
  count = math.ceil(rest / BUCKET_BYTES)
  wire = count * _ring_s(setup, rest / count) if count else 0.0
  return max(CONTENTION * setup.backward_s, wire)


def _ring_s(setup: Setup, size: float) -> float:
  n = setup.devices
  return setup.link.seconds("all_reduce", n, 2 * size * (n - 1) / n)


def _gather_s(setup: Setup, size: float) -> float:
  n = setup.devices
  return setup.link.seconds("all_gather", n, size * (n - 1))

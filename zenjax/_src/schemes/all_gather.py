"""Implements AGsparse: all devices send their rows to all, and each sums them.

Horovod, PyTorch and DeepSpeed do this for sparse gradients. It needs one
collective per round and no partition of rows. But a device receives `n - 1`
times the rows of the fullest device, so overlap between devices saves nothing.
It is the best choice for few devices with little overlap (ZEN, OSDI 2025,
sections 2.2 and 2.3).

Unlike these systems, it merges with static shapes, sends overflowing rows in
further rounds, and sums in rank order, so that replicas are bit-identical.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp

from zenjax._src.core import collectives
from zenjax._src.core import wire
from zenjax._src.schemes import zen
from zenjax._src.schemes.base import Arrived
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import counts_of
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Number
from zenjax._src.schemes.base import Outgoing
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.base import Sums
from zenjax._src.schemes.base import Tally
from zenjax._src.schemes.buffer_sizes import ExchangePlan


@dataclasses.dataclass(frozen=True, slots=True)
class AllGather(Scheme):
  """Gathers ids and rows over all axes by one collective."""

  name: str = "all_gather"
  union_margin: float = math.inf

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del sizes, column_groups
    return 1, 1

  def held_rows(self, plan: ExchangePlan, context: Context) -> int:
    return min(plan.most_pull, plan.push * context.devices)

  def push(self, outgoing: Sequence[Outgoing], context: Context) -> list[Sums]:
    with jax.named_scope("all_gather/send"):
      sections = [zen.push_sections(out) for out in outgoing]
      came = wire.send(sections, collectives.all_gather, context.axes)
    with jax.named_scope("all_gather/merge"):
      return [
        zen.owner_sums(
          zen.Sections(*table), out.plan, self.held_rows(out.plan, context)
        )
        for table, out in zip(came, outgoing)
      ]

  def pull(
    self, plans: Sequence[ExchangePlan], sums: Sequence[Sums], context: Context
  ) -> list[Arrived]:
    """Returns the union, which all devices hold already."""
    return [
      Arrived(
        row=plan.layout.row(jnp.zeros((), jnp.int32), own.union.slots),
        values=context.scaled(own.union.rows).astype(plan.table.dtype),
        tally=Tally(*counts_of(own)[:, None]),
      )
      for own, plan in zip(sums, plans)
    ]

  def messages(
    self, plans: Sequence[ExchangePlan], context: Context
  ) -> list[Message]:
    words = sum(map(zen.push_words, plans))
    return [Message("all_gather", context.axes, words)]

  def expected_messages(
    self, plan: ExchangePlan, context: Context, push: Number, pull: Number
  ) -> list[Message]:
    del pull
    row = plan.row_wire.nbytes + 4.0
    return [Message("all_gather", context.axes, push * row / 4)]

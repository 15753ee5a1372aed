"""Single collectives between hosts: what links are calibrated by."""

from collections.abc import Callable

from jax.sharding import Mesh

from zenjax._src.machine import measure

AXIS = "data"


def build(op: str, words: int, mesh: Mesh) -> Callable[[], None]:
  """Compiles one collective whose operand has `words` of 32 bits a device."""
  words = -(-words // mesh.size) * mesh.size
  return measure.build(op, words, mesh, AXIS)

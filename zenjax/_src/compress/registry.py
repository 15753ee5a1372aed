"""Reads compressors from the names that plans give them."""

import ast

from zenjax._src.compress.cast import Cast
from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.exdyna import ExDyna
from zenjax._src.compress.exdyna import MiCRO
from zenjax._src.compress.low_bit import LowBit
from zenjax._src.compress.power_sgd import PowerSGD
from zenjax._src.compress.sign import OneBit
from zenjax._src.compress.sign import Sign
from zenjax._src.compress.sign import SignVote
from zenjax._src.compress.top_k import RandomK
from zenjax._src.compress.top_k import Threshold
from zenjax._src.compress.top_k import TopK

KINDS: dict[str, type[Compressor]] = {
  kind.__name__: kind
  for kind in (
    Cast,
    ExDyna,
    LowBit,
    MiCRO,
    OneBit,
    PowerSGD,
    RandomK,
    Sign,
    SignVote,
    Threshold,
    TopK,
  )
}


def _value(node: ast.expr) -> object:
  if isinstance(node, ast.Name):
    raise ValueError(f"write {node.id!r} in quotes")
  return ast.literal_eval(node)


def named(name: str, given: str = "`compressor` of a plan") -> Compressor:
  """Returns the compressor of a name such as `LowBit(4)`.

  Args:
    name: The name.
    given: Where it was given, in words.

  Raises:
    ValueError: It is not the name of a compressor of `zenjax.compress`.
  """
  try:
    call = ast.parse(name, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    kind = KINDS[call.func.id]
    args = [_value(x) for x in call.args]
    options = {str(x.arg): _value(x.value) for x in call.keywords}
    return kind(*args, **options)
  except (AssertionError, KeyError, SyntaxError, TypeError, ValueError) as e:
    raise ValueError(
      f"{given} must be the name of a compressor, such as 'LowBit(4)', got"
      f" {name!r} ({e}). Known are {sorted(KINDS)}."
    ) from e

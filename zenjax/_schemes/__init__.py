"""Ways of synchronizing sparse leaves, by name.

`None` marks the dense exchange: every leaf takes `psum`, nothing is packed.
"""

from zenjax._schemes.all_gather import AllGather
from zenjax._schemes.base import Scheme
from zenjax._schemes.zen import Zen

SCHEMES: dict[str, Scheme | None] = {
  "all_gather": AllGather(),
  "dense": None,
  "zen": Zen(),
}

"""Lists the operations of an exchange, each with its reference and kernels."""

from zenjax.kernels import reference
from zenjax.kernels._dispatch import Operation

mask_pack = Operation(name="mask_pack", reference=reference.mask_pack)
compact = Operation(name="compact", reference=reference.compact)
merge = Operation(name="merge", reference=reference.merge)
expand = Operation(name="expand", reference=reference.expand)

OPERATIONS = {x.name: x for x in (mask_pack, compact, merge, expand)}

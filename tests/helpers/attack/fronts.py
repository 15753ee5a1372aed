"""All fronts."""

from . import meshes
from . import training

FRONTS = (*meshes.FRONTS, *training.FRONTS)

"""A training step over a mesh: placement, states, checks."""

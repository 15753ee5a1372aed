"""A compressed network's gradients in one exchange, in few or in many."""

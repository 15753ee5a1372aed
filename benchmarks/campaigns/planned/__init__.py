"""Plans beside the times of whole training steps between hosts."""

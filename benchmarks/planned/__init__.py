"""Plans beside what whole training steps take between hosts."""

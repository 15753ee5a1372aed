"""What links and devices cost."""

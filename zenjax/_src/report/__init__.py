"""What a run has shown."""

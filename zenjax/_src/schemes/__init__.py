"""Ways of moving rows between devices."""

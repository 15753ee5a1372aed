"""Algorithms that move rows between devices."""

"""How many exchanges a compressed CNN's gradients are best sent in."""

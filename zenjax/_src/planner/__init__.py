"""Which way each gradient travels, and whether any of them pays."""

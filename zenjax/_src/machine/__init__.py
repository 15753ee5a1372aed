"""Machines: links, devices, and the time that exchanges take on them."""

"""Commands that time the devices of this process, or count rows."""

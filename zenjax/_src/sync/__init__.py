"""`zen_sync` and `owner_update`: a tree of gradients, exchanged."""

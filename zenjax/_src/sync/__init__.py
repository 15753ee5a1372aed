"""`zen_sync` and `sharded_optimizer`: a tree of gradients, exchanged."""

"""Plans of others beside the planner's: oracles and models of papers."""

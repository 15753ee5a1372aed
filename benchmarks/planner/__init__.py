"""What others plan, beside the planner: oracles and models of papers."""

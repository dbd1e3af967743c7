"""What a step costs, what it must cost, and what a fit needs to get somewhere: one JSON row a case."""

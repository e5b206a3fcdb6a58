"""Usage and its cost: prices, the usage journal, the usage table, and the money spent so far."""

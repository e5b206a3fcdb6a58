"""What everyone used and what it cost: prices, the usage journal, the usage table, and what was spent so far."""

"""Batches: many requests handed in at once, run in the batch tier, and kept through restarts."""

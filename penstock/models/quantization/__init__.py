"""Makes quantized checkpoints from plain ones, and measures what that costs. Serving needs none of it."""

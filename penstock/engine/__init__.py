"""The real driver of the scheduler: it builds batches, runs the model, samples, and keeps the KV tensors.

`loop`, `echo` and `record` know no torch; the gateway's benchmarks run an engine without it.
"""

"""The engine drives the scheduler: it builds batches, runs the model, samples, and holds the KV tensors.

`loop`, `echo` and `record` know no torch; the gateway's benchmarks run an engine without it.
"""

"""Defines language models: their shapes, weights and forward passes, built on `kernels.interface.Ops`.

Knows nothing of requests, scheduling or HTTP. Importing this package imports no torch.
"""

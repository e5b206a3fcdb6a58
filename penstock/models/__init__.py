"""Language models: their shapes, their weights and their forward passes, built on `kernels.interface.Ops`.

Knows nothing of requests, scheduling or HTTP. Importing this package imports no torch.
"""

"""Device kernels behind one small interface (`interface.Ops`). Knows torch and triton, and nothing of ours.

`reference.TorchOps` defines what every operation means, on any device; the other backends must agree with it.
"""

"""Limits on what a caller may use, in one process or shared by several gateways through Redis."""

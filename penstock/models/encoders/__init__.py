"""Encoders, one file for each family, with a visible forward pass. Knows no scheduler."""

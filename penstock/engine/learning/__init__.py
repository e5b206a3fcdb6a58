"""Trains heads from a model's own answers, and measures drafters. Nothing here runs while a model is served."""

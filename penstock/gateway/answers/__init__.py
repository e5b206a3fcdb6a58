"""Answers on their way back: streams, stop strings, and the wrappers that guards and recorders share."""

"""The settings file: what may change while a server runs."""

"""Launches replicas, connects to them and watches them. Only `worker` imports the engine."""

"""Replicas: launching them, reaching them, knowing how they are. Only `worker` imports the engine."""

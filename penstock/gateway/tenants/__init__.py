"""The callers of the gateway: organisations, their workspaces, and the keys and tokens that speak for a workspace."""

"""Endpoints for operators: tenants, fleet, adapters, usage, health and metrics."""

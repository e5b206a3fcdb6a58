"""Durable state of the gateway: one database, its tables and how they grow from release to release."""

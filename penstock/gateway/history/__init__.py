"""The recent past of a server without a time-series database: samples of its counters, and its last requests."""

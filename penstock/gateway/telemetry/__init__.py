"""What operators see of single requests: access lines and traces. Knows no HTTP; counters are in `metrics`."""

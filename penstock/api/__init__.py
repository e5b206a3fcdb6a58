"""The APIs on the wire, one folder per dialect. Only this room knows the HTTP framework."""

"""One module per change of the schema, in a single line: each names the one before it."""

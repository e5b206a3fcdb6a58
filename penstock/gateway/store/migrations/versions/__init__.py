"""One module per change of the schema since revision 0006, in a single line: each names the one before it."""

"""Parts of the HTTP server that every dialect shares: protocol, authentication, errors, event streams."""

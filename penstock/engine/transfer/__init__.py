"""KV transfers between engines. The loop's thread uses `transfers`, and `thread` talks to other engines."""

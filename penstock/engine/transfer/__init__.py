"""KV blocks on their way between engines: who asks, who lends, what is read when. The rest of the engine room knows
only `desk`, which the loop calls, and `thread`, which talks to other engines."""

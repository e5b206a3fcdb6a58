-- Writes to KEYS[1], as the other scripts write: fails on a Redis that takes no writes, or has no memory for any.

redis.call('HSET', KEYS[1], 'at', server_time())
redis.call('EXPIRE', KEYS[1], KEEP_S)

return 1

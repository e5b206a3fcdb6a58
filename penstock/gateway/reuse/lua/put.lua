-- ARGV: prefix, name, value, milliseconds to live, most bytes of all entries, bytes that an entry costs besides its value
local name, value, life_ms, most = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local size, now = #value + tonumber(ARGV[6]), now_ms()

for _, ended in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 64)) do forget(ended) end
forget(name)
if size > most then return 0 end
redis.call('SET', prefix .. name, now .. ':' .. value, 'PX', life_ms)
redis.call('HSET', KEYS[1], name, size)
redis.call('ZADD', KEYS[2], now, name)
redis.call('ZADD', KEYS[3], now + life_ms, name)
local total = redis.call('INCRBY', KEYS[4], size)
while total > most do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then
    redis.call('SET', KEYS[4], 0)
    break
  end
  forget(oldest)
  total = tonumber(redis.call('GET', KEYS[4]))
end
return 1

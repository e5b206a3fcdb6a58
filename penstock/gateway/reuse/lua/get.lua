-- ARGV: prefix, names. Returns the time, and for each name its entry or false.
local now, found = now_ms(), {}
found[1] = now
for index = 2, #ARGV do
  local value = redis.call('GET', prefix .. ARGV[index])
  if value then
    redis.call('ZADD', KEYS[2], 'XX', now, ARGV[index])
  else
    forget(ARGV[index])
  end
  found[index] = value
end
return found

-- KEYS: 1 sizes of entries (hash), 2 their last uses, 3 their ends (sorted sets), 4 all bytes together (number)
-- An entry is the key PREFIX .. name. Times are milliseconds of this server.
local prefix = ARGV[1]

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function forget(name)
  local size = redis.call('HGET', KEYS[1], name)
  if not size then return end
  redis.call('DEL', prefix .. name)
  redis.call('HDEL', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
  redis.call('ZREM', KEYS[3], name)
  if redis.call('DECRBY', KEYS[4], size) < 0 then redis.call('SET', KEYS[4], 0) end
end

-- Shared by all scripts: the arithmetic of buckets.py on what Redis keeps about a subject.
--
-- A subject has a hash (levels of its buckets, the limit each level was kept under, the time of the last refill,
-- money reserved by running requests, money spent in the newest day and month) and a sorted set of leases, one for
-- each running request, scored by when it expires unless its gateway renews it.

local SECONDS_PER_LIMIT = 60
local TOLERANCE = 1e-6
-- An expired lease no longer counts as running, but is kept so long: a gateway that comes back settles it properly.
local LEASE_GRACE_S = 600
local KEEP_S = 900

local function server_time()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function read_subject(key)
  local flat = redis.call('HGETALL', key)
  local subject = {}
  for index = 1, #flat, 2 do
    subject[flat[index]] = tonumber(flat[index + 1])
  end
  return subject
end

-- Numbers as text with all their digits: Lua would otherwise round them to 14.
local function write_subject(key, subject, keep_s)
  local flat = {}
  for name, value in pairs(subject) do
    flat[#flat + 1] = name
    flat[#flat + 1] = string.format('%.17g', value)
  end
  if #flat > 0 then
    redis.call('HSET', key, unpack(flat))
    redis.call('EXPIRE', key, math.ceil(math.max(KEEP_S, keep_s)))
  end
end

-- Brings the level of the bucket `name` up to `now`. Under another limit than before, half full stays half full.
local function refill(subject, name, limit, now)
  local level = subject[name]
  local kept_under = subject[name .. ':limit']
  if level == nil then
    level = limit
  else
    local elapsed_s = math.max(0, now - subject[name .. ':at'])
    level = math.min(kept_under, level + elapsed_s * kept_under / SECONDS_PER_LIMIT)
    if kept_under ~= limit then
      level = level * limit / kept_under
    end
  end
  subject[name] = level
  subject[name .. ':limit'] = limit
  -- A clock that was set back refills nothing for once, and from then on as always.
  subject[name .. ':at'] = now
  return level
end

local function seconds_until_full(subject, name)
  local limit = subject[name .. ':limit']
  return (limit - subject[name]) * SECONDS_PER_LIMIT / limit
end

-- Cuts leases that seem to last longer than a new one: they were made before the clock was set back.
local function shorten(leases_key, longest)
  longest = string.format('%.17g', longest)
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', leases_key, '(' .. longest, '+inf', 'LIMIT', 0, 100)) do
    redis.call('ZADD', leases_key, longest, lease)
  end
end

-- The money a lease reserves stands at the end of its name, after a colon.
local function reserved_by(lease)
  return tonumber(string.match(lease, ':([^:]*)$'))
end

-- Removes leases whose gateways have been gone for long, and what they reserved.
local function forget_the_dead(leases_key, subject, now)
  local dead = redis.call('ZRANGEBYSCORE', leases_key, '-inf', now - LEASE_GRACE_S, 'LIMIT', 0, 100)
  for _, lease in ipairs(dead) do
    redis.call('ZREM', leases_key, lease)
    subject.reserved = (subject.reserved or 0) - reserved_by(lease)
  end
  -- Rounding must not leave a trace of money that nobody reserves.
  if redis.call('ZCARD', leases_key) == 0 then
    subject.reserved = 0
  end
end

-- What was spent in `period` ('day' or 'month'). The ledger's figure counts where ours is behind it.
local function spent_in(subject, period, number, in_ledger)
  local current = subject[period]
  if current == nil or current < number then
    subject[period] = number
    subject[period .. ':spent'] = in_ledger
  elseif current == number then
    subject[period .. ':spent'] = math.max(subject[period .. ':spent'], in_ledger)
  end
  return subject[period .. ':spent']
end

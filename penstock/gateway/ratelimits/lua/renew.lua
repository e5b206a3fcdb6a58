-- Says that the gateway of these leases lives. KEYS as in reserve. ARGV: seconds to live, and JSON with the limits of each
-- subject and its leases: name, input tokens and output tokens. A lease that Redis has lost, with its data or because its
-- gateway was away for too long, is made again with all that it reserves. Answers how many were made again.

local lease_ttl_s, asks = tonumber(ARGV[1]), cjson.decode(ARGV[2])
local now = server_time()
local expiry = string.format('%.17g', now + lease_ttl_s)
local num_made = 0

local function take(subject, limits, name, amount)
  local limit = limits[name .. '_per_minute']
  if limit then
    subject[name] = refill(subject, name, limit, now) - amount
    return seconds_until_full(subject, name)
  end
  return 0
end

for index, ask in ipairs(asks) do
  local key, leases_key = KEYS[2 * index - 1], KEYS[2 * index]
  for _, lease in ipairs(ask.leases) do
    local name, input_tokens, output_tokens = unpack(lease)
    if redis.call('ZADD', leases_key, expiry, name) == 1 then
      num_made = num_made + 1
      local subject = read_subject(key)
      subject.reserved = (subject.reserved or 0) + reserved_by(name)
      local keep_s = math.max(
        take(subject, ask.limits, 'input_tokens', input_tokens),
        take(subject, ask.limits, 'output_tokens', output_tokens)
      )
      write_subject(key, subject, keep_s)
    end
  end
  redis.call('EXPIRE', leases_key, math.ceil(lease_ttl_s + LEASE_GRACE_S))
  if redis.call('TTL', key) < KEEP_S then
    redis.call('EXPIRE', key, KEEP_S)
  end
end

return num_made

-- Says that the gateway of these leases lives. KEYS as in reserve. ARGV: seconds to live, and JSON with the leases of
-- each subject. A lease that is gone stays gone. Answers how many were renewed.

local lease_ttl_s, leases_by_subject = tonumber(ARGV[1]), cjson.decode(ARGV[2])
local expiry = string.format('%.17g', server_time() + lease_ttl_s)
local num_renewed = 0

for index, leases in ipairs(leases_by_subject) do
  local leases_key = KEYS[2 * index]
  for _, lease in ipairs(leases) do
    num_renewed = num_renewed + redis.call('ZADD', leases_key, 'XX', 'CH', expiry, lease)
  end
  redis.call('EXPIRE', leases_key, math.ceil(lease_ttl_s + LEASE_GRACE_S))
  if redis.call('TTL', KEYS[2 * index - 1]) < KEEP_S then
    redis.call('EXPIRE', KEYS[2 * index - 1], KEEP_S)
  end
end

return num_renewed

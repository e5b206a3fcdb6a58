-- Takes one half of a reservation from all the limits of a request, or from none: first one request and a place among
-- the running ones (ask.requests is 1), later tokens and money (ask.requests is 0).
--
-- KEYS: the hash and the leases of each subject, in turn. ARGV: the lease's name, its seconds to live, JSON with the
-- demand and each subject's limits (absent: no limit), and for the second half the lease's name before. Answers JSON:
-- the levels of each subject, and refusals as {subject, figure, seconds to wait or number running}; without any,
-- everything is reserved.

local lease, lease_ttl_s, ask = ARGV[1], tonumber(ARGV[2]), cjson.decode(ARGV[3])
local name_before = ARGV[4]
local now = server_time()
local demands = { requests = ask.requests, input_tokens = ask.input_tokens, output_tokens = ask.output_tokens }
local subjects, refusals = {}, {}

local function refuse(index, figure, detail)
  refusals[#refusals + 1] = { index - 1, figure, detail }
end

local function check_buckets(index, subject, limits)
  for name, amount in pairs(demands) do
    local limit = limits[name .. '_per_minute']
    if limit then
      local missing = amount - refill(subject, name, limit, now)
      if missing > TOLERANCE then
        refuse(index, name .. '_per_minute', missing * SECONDS_PER_LIMIT / limit)
      end
    end
  end
end

local function check_budgets(index, subject, limits)
  for _, period in ipairs({ 'day', 'month' }) do
    local budget = limits['dollars_per_' .. period]
    if budget then
      local spent = spent_in(subject, period, ask[period], limits.spent[period])
      if spent + (subject.reserved or 0) + ask.microdollars > budget * 1e6 then
        refuse(index, 'dollars_per_' .. period, 0)
      end
    end
  end
end

for index, limits in ipairs(ask.subjects) do
  local leases_key = KEYS[2 * index]
  local subject = read_subject(KEYS[2 * index - 1])
  forget_the_dead(leases_key, subject, now)
  check_buckets(index, subject, limits)
  check_budgets(index, subject, limits)
  if limits.concurrent_requests and ask.requests > 0 then
    local num_running = redis.call('ZCOUNT', leases_key, '(' .. string.format('%.17g', now), '+inf')
    if num_running >= limits.concurrent_requests then
      shorten(leases_key, now + lease_ttl_s)
      refuse(index, 'concurrent_requests', num_running)
    end
  end
  subjects[index] = subject
end

local levels = {}
for index, limits in ipairs(ask.subjects) do
  local subject = subjects[index]
  local keep_s = 0
  levels[index] = {}
  for name, amount in pairs(demands) do
    if limits[name .. '_per_minute'] then
      if #refusals == 0 then
        subject[name] = subject[name] - amount
      end
      levels[index][name] = subject[name]
      keep_s = math.max(keep_s, seconds_until_full(subject, name))
    end
  end
  if #refusals == 0 then
    local leases_key = KEYS[2 * index]
    subject.reserved = (subject.reserved or 0) + ask.microdollars
    if name_before ~= '' then
      redis.call('ZREM', leases_key, name_before)
    end
    redis.call('ZADD', leases_key, string.format('%.17g', now + lease_ttl_s), lease)
    redis.call('EXPIRE', leases_key, math.ceil(lease_ttl_s + LEASE_GRACE_S))
  end
  write_subject(KEYS[2 * index - 1], subject, keep_s)
end

-- An empty list would be written as an empty object.
return cjson.encode({ levels = levels, refusals = #refusals > 0 and refusals or nil })

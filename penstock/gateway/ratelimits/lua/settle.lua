-- Ends a request: gives back what it reserved and did not use, or charges what it used beyond that.
--
-- KEYS as in reserve. ARGV: the lease's name, and JSON with the corrections. Sending it again does no harm: whoever
-- removes the lease from a subject settles it there, and nobody else. Answers how many subjects were settled.

local lease, ask = ARGV[1], cjson.decode(ARGV[2])
local now = server_time()
local corrections = {
  requests = ask.requests, input_tokens = ask.input_tokens, output_tokens = ask.output_tokens
}
local num_settled = 0

for index = 1, #KEYS, 2 do
  if redis.call('ZREM', KEYS[index + 1], lease) == 1 then
    num_settled = num_settled + 1
    local subject = read_subject(KEYS[index])
    local keep_s = 0
    for name, amount in pairs(corrections) do
      local limit = subject[name .. ':limit']
      if limit then
        subject[name] = math.min(limit, refill(subject, name, limit, now) - amount)
        keep_s = math.max(keep_s, seconds_until_full(subject, name))
      end
    end
    subject.reserved = (subject.reserved or 0) - reserved_by(lease)
    for _, period in ipairs({ 'day', 'month' }) do
      if subject[period] then
        local spent = spent_in(subject, period, ask[period], 0)
        if subject[period] == ask[period] then
          subject[period .. ':spent'] = spent + ask.microdollars
        end
      end
    end
    forget_the_dead(KEYS[index + 1], subject, now)
    write_subject(KEYS[index], subject, keep_s)
  end
end

return num_settled

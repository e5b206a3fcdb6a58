-- Gives back input tokens of a running request, which came from the cache. KEYS as in reserve. ARGV: the lease's name
-- and the number of tokens. Answers how many subjects got them.

local lease, num_tokens = ARGV[1], tonumber(ARGV[2])
local now = server_time()
local num_changed = 0

for index = 1, #KEYS, 2 do
  local subject = read_subject(KEYS[index])
  local limit = subject['input_tokens:limit']
  if limit and redis.call('ZSCORE', KEYS[index + 1], lease) then
    num_changed = num_changed + 1
    subject.input_tokens = math.min(limit, refill(subject, 'input_tokens', limit, now) + num_tokens)
    write_subject(KEYS[index], subject, seconds_until_full(subject, 'input_tokens'))
  end
end

return num_changed

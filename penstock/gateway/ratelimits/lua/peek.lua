-- Tells what is left of all limits, and changes nothing.
--
-- KEYS as in reserve. ARGV: JSON with each subject's limits. Answers JSON: the levels of each subject.

local asks = cjson.decode(ARGV[1])
local now = server_time()
local levels = {}

for index, limits in ipairs(asks) do
  local subject = read_subject(KEYS[2 * index - 1])
  levels[index] = {}
  for _, name in ipairs({ 'requests', 'input_tokens', 'output_tokens' }) do
    local limit = limits[name .. '_per_minute']
    if limit then
      levels[index][name] = refill(subject, name, limit, now)
    end
  end
end

return cjson.encode({ levels = levels })

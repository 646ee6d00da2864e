-- Reads a record, and the time at which it was read.
--
-- KEYS[1]  the record
-- ARGV[1]  'w': the answer waits for replicas
-- ARGV[2]  microseconds by which tests move the clock
--
-- Answers nothing, or {now, record}, which may have expired.
local old = redis.pcall('GET', KEYS[1])
if not old then return false end
if type(old) == 'table' then return old end
local time = redis.call('TIME')
if ARGV[1] and ARGV[1] ~= '' then
  local left = redis.call('PTTL', KEYS[1])
  if left > 0 then redis.call('PEXPIRE', KEYS[1], left) end
end
return {time[1] * 1000000 + time[2] + (ARGV[2] or 0), old}

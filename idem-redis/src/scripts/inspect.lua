-- Shows a record to an operator, and changes nothing:
--
--   redis-cli --eval inspect.lua idem:8:tenant-7:order-42
--
-- Answers lines of text. The token and the fingerprint are shown by their beginnings, and the body not at all.
local old = redis.call('GET', KEYS[1])
if not old then return {'absent'} end
if #old < 71 or string.byte(old) ~= 209 then return {'no record of a version known here, ' .. #old .. ' bytes'} end
local created, updated, lease, expires, retention, started, attempt, token, flags, at =
  struct.unpack('>ddddddI4c16B', old, 2)
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function ago(micros) return string.format('%.3f s ago', (now - created - micros) / 1e6) end
local function hex(bytes) return (string.gsub(bytes, '.', function(c) return string.format('%02x', string.byte(c)) end)) end
local lines = {}
local function say(...) lines[#lines + 1] = string.format(...) end
local print
if flags % 2 == 1 then
  print = string.sub(old, at, at + 31)
  at = at + 32
end
local origin = ({[0] = 'fresh', 'retry', 'take-over'})[math.floor(flags / 2)] or 'unknown'
if flags >= 4 then at = at + 28 end
local state = string.sub(old, at, at)
if state == 'P' then
  say('in progress')
  local left = (created + lease - now) / 1e6
  if left > 0 then say('lease ends in %.3f s', left) else say('lease ended %.3f s ago', -left) end
elseif state == 'F' then
  say('failed: %s', string.sub(old, at + 1))
elseif state == 'C' then
  local code, headers = struct.unpack('>I2I2', old, at + 1)
  say('completed, code %d, %d header lines, %d bytes in all', code, headers, #old - at - 5)
else
  say('unknown state')
end
say('attempt %d, %s, token %s...', attempt, origin, hex(string.sub(token, 1, 2)))
if print then say('fingerprint %s...', hex(string.sub(print, 1, 4))) end
say('created %s, started %s, updated %s', ago(0), ago(started), ago(updated))
local left = (created + expires - now) / 1e6
if left > 0 then say('expires in %.3f s', left) else say('expired %.3f s ago', -left) end
say('retention %.3f s, the server keeps it for %.3f s', retention / 1e6, redis.call('PTTL', KEYS[1]) / 1e3)
return lines

-- Reserves a key, as the table of idem_core::decision says.
--
-- KEYS[1]  the record
-- ARGV[1]  what follows the time of creation in a fresh record (see src/layout.rs for the layout)
-- ARGV[2]  how long the server keeps it, in milliseconds: the retention, and some to spare
-- ARGV[3]  'r': refuse to take an abandoned attempt over; 'w': the answer waits for replicas
-- ARGV[4]  microseconds by which tests move the clock
--
-- Answers 1 (acquired as fresh), 6 (mismatch), 7 (lease lost), 8 (unreadable), or {verdict, now, record} with verdict
-- 2 (acquired), 3 (in progress), 4 (abandoned), 5 (completed).
local key, fresh = KEYS[1], ARGV[1]
local old = redis.pcall('GET', key)
if type(old) == 'table' then return old end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2] + (ARGV[4] or 0)

if not old then
  -- An error is told with its code in front: version 6 puts the place in the script before it.
  local set = redis.pcall('SET', key, '\209' .. struct.pack('>d', now) .. fresh, 'PX', ARGV[2])
  if set.err then return {err = string.match(set.err, '^@user_script: %d+: %-(.*)') or set.err} end
  return 1
end

if #old < 71 or string.byte(old) ~= 209 then return 8 end
local created, _, lease, expires, _, started, attempt, token, flags, at =
  struct.unpack('>ddddddI4c16B', old, 2)
if flags > 5 then return 8 end
local print = ''
if flags % 2 == 1 then
  print = string.sub(old, 71, 102)
  at = 103
end
if flags >= 4 then at = at + 28 end
local state = string.byte(old, at)
-- What is no number is no time: every comparison with it is false.
if not (created >= 0 and created <= 2^53 and expires >= -2^53 and expires <= 2^53) then return 8 end
if state == 80 then
  if at ~= #old or not (lease <= expires) then return 8 end
elseif state ~= 67 and state ~= 70 then
  return 8
end

-- An answer that waits for replicas has to be under way to them, also where it was written by an earlier call.
local function told(verdict)
  if ARGV[3] and string.find(ARGV[3], 'w', 1, true) then
    local left = redis.call('PTTL', key)
    if left > 0 then redis.call('PEXPIRE', key, left) end
  end
  return {verdict, now, old}
end

local off = now - created
local before, origin = '', 0
if off < expires then
  if print ~= '' and string.byte(fresh, 61) % 2 == 1 and print ~= string.sub(fresh, 62, 93) then return 6 end
  if state == 67 then return told(5) end
  local mine = token == string.sub(fresh, 45, 60)
  if state == 70 then
    if mine then return 7 end
    origin = 2
  else
    if mine then return told(2) end
    if off < lease then return told(3) end
    if ARGV[3] and string.find(ARGV[3], 'r', 1, true) then return told(4) end
    origin = 4
    before = token .. struct.pack('>I4d', attempt, started)
  end
end

local new
if origin == 0 then
  new = '\209' .. struct.pack('>d', now) .. fresh
else
  local _, leased, kept, retention = struct.unpack('>dddd', fresh)
  new = '\209' .. struct.pack('>ddddddI4', created, off, off + leased, off + kept, retention, off,
    math.min(attempt + 1, 4294967295))
    .. string.sub(fresh, 45, 60) .. string.char(origin + flags % 2) .. print .. before .. 'P'
end
local set = redis.pcall('SET', key, new, 'PX', ARGV[2])
if set.err then return {err = string.match(set.err, '^@user_script: %d+: %-(.*)') or set.err} end
if origin == 0 then return 1 end
return {2, now, new}

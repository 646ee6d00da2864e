-- Completes or fails the attempt that holds a key, or renews its lease.
--
-- KEYS[1]  the record (see src/layout.rs for its bytes)
-- ARGV[1]  the attempt's token
-- ARGV[2]  the retention from now on or, for a renewal, the lease from now on, in microseconds
-- ARGV[3]  the same in milliseconds, and some to spare: how long the server keeps the record
-- ARGV[4]  the state from now on and what belongs to it; 'P' for a renewal
-- ARGV[5]  'w': the answer waits for replicas
-- ARGV[6]  microseconds by which tests move the clock
--
-- Answers 1 (done), 7 (lease lost), 8 (unreadable), 9 (completed already, with another outcome).
local key = KEYS[1]
local old = redis.pcall('GET', key)
if not old then return 7 end
if type(old) == 'table' then return old end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2] + (ARGV[6] or 0)

if #old < 71 or string.byte(old) ~= 209 then return 8 end
local created, _, lease, expires = struct.unpack('>dddd', old, 2)
local flags, at = string.byte(old, 70), 71
if flags > 5 then return 8 end
if flags % 2 == 1 then at = 103 end
if flags >= 4 then at = at + 28 end
local state = string.byte(old, at)
-- What is no number is no time: every comparison with it is false.
if not (created >= 0 and created <= 2^53 and expires >= -2^53 and expires <= 2^53) then return 8 end
if state == 80 then
  if at ~= #old or not (lease <= expires) then return 8 end
elseif state ~= 67 and state ~= 70 then
  return 8
end

local off = now - created
if off >= expires or string.sub(old, 54, 69) ~= ARGV[1] then return 7 end
local new, keep
if state == 80 then
  local till = off + ARGV[2]
  if ARGV[4] ~= 'P' then
    new = string.sub(old, 1, 9) .. struct.pack('>dddd', off, lease, till, ARGV[2])
      .. string.sub(old, 42, at - 1) .. ARGV[4]
  elseif till > lease then
    keep = till <= expires
    new = string.sub(old, 1, 9) .. struct.pack('>ddd', off, till, math.max(till, expires)) .. string.sub(old, 34)
  end
elseif string.sub(old, at) ~= ARGV[4] then
  if state == 67 then return 9 end
  return 7
end

for try = 1, 2 do
  if new then
    local set = keep and redis.pcall('SET', key, new, 'KEEPTTL') or redis.pcall('SET', key, new, 'PX', ARGV[3])
    if not set.err then return 1 end
    if try == 2 or not string.find(set.err, 'OOM', 1, true) then
      -- With its code in front: version 6 puts the place in the script before it.
      return {err = string.match(set.err, '^@user_script: %d+: %-(.*)') or set.err}
    end
  elseif try == 2 or not ARGV[5] or ARGV[5] == '' then
    return 1
  end
  -- A write that takes no memory. A full server lets a script that has begun to write go on: it takes no new record,
  -- but the result of an attempt that runs. And what an earlier call has written is under way to the replicas then.
  local left = redis.call('PTTL', key)
  if left > 0 then redis.call('PEXPIRE', key, left) end
end

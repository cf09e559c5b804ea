"""Lua that Redis runs: what must happen as one step. Each script's keys share one slot.

A full Redis refuses rows, but not who lives: what says that may go beyond its `maxmemory`.
"""

from __future__ import annotations

LOST = -2
"""The fence is gone: Redis was emptied, or another one answers."""

FENCED = -1
"""Another writer has the number."""

# KEYS: fence, then a block and a slice for each row.
# ARGV: fence, number, one byte a row (tier bit; + 8 to store), the rows' members.
WRITE = """
local fence = redis.call('GET', KEYS[1])
if not fence then return -2 end
if fence ~= ARGV[1] then return -1 end
local byte, sub, floor = string.byte, string.sub, math.floor
local low, ops, changed = tonumber(ARGV[2]) * 8, ARGV[3], 0
for i = 1, #ops do
  local op, key = byte(ops, i), KEYS[2 * i]
  local stores, tier = op >= 8, op % 8
  local value = redis.call('GET', key) or ''
  if #value % 2 == 1 then value = '' end
  local at, top, held = 0, #value / 2, 0
  while at < top do
    local mid = floor((at + top) / 2)
    local high, rest = byte(value, 2 * mid + 1, 2 * mid + 2)
    if high * 256 + rest < low then at = mid + 1 else top = mid end
  end
  if 2 * at < #value then
    local high, rest = byte(value, 2 * at + 1, 2 * at + 2)
    local word = high * 256 + rest
    if word < low + 8 then held = word - low end
  end
  if (floor(held / tier) % 2 == 1) ~= stores then
    local now, word = held + (stores and tier or -tier), ''
    if now > 0 then word = string.char(floor((low + now) / 256), (low + now) % 256) end
    value = sub(value, 1, 2 * at) .. word .. sub(value, 2 * at + (held > 0 and 3 or 1))
    if value == '' then redis.call('DEL', key) else redis.call('SET', key, value) end
    changed = changed + 1
  end
  -- Also where the value was right already: a slice that Redis lost alone is filled again.
  redis.call(stores and 'SADD' or 'SREM', KEYS[2 * i + 1], ARGV[3 + i])
end
return changed
"""

# KEYS: slices.
COUNT = """
local count = 0
for i = 1, #KEYS do count = count + redis.call('SCARD', KEYS[i]) end
return count
"""

# KEYS: fence. ARGV: token, slice bits of a number that has none. Answers its slice bits.
# A writer that comes late does not take a newer one's number.
FENCE = """
local fence, bits = redis.call('GET', KEYS[1]), ARGV[2]
if fence then
  local at = string.find(fence, ':', 1, true)
  if tonumber(string.sub(fence, 1, at - 1)) > tonumber(ARGV[1]) then return -1 end
  bits = string.sub(fence, at + 1)
end
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. bits)
return tonumber(bits)
"""

# KEYS: fence, one new slice. ARGV: fence, members. What an earlier attempt left goes first.
FILL_SLICE = """
local fence = redis.call('GET', KEYS[1])
if not fence then return -2 end
if fence ~= ARGV[1] then return -1 end
redis.call('DEL', KEYS[2])
for i = 2, #ARGV do redis.call('SADD', KEYS[2], ARGV[i]) end
return 0
"""

# KEYS: fence, old slices. ARGV: old fence, new fence. From now on the new slices count.
RESLICE = """
local fence = redis.call('GET', KEYS[1])
if not fence then return -2 end
if fence ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[1], ARGV[2])
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 0
"""

# KEYS: fence. ARGV: fence.
UNFENCE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""

# KEYS: writers, tokens, then leases held and leases wanted.
# ARGV: writer, lease milliseconds, number of leases held, their tokens.
# Answers how many writers there are; of each held lease 1 or 0; of each wanted one a token or ''.
BEAT = """#!lua flags=allow-oom
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local me, span, held = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZADD', KEYS[1], now + span, me)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local writers, mine, total = redis.call('ZCARD', KEYS[1]), 0, #KEYS - 2
local share, answer = math.ceil(total / writers), {writers}
for i = 1, held do
  local key = KEYS[2 + i]
  if redis.call('GET', key) == ARGV[3 + i] then
    redis.call('PEXPIRE', key, span)
    mine, answer[1 + i] = mine + 1, 1
  else
    answer[1 + i] = 0
  end
end
for i = held + 1, total do
  local key = KEYS[2 + i]
  answer[1 + i] = ''
  if mine < share and redis.call('EXISTS', key) == 0 then
    local last = tonumber(redis.call('GET', KEYS[2]) or '0')
    local token = math.max(time[1] * 1000000 + time[2], last + 1)
    local text = string.format('%.0f', token)
    redis.call('SET', KEYS[2], text)
    redis.call('SET', key, text, 'PX', span)
    mine, answer[1 + i] = mine + 1, text
  end
end
return answer
"""

# KEYS: voucher. ARGV: numbers, milliseconds.
VOUCH = """#!lua flags=allow-oom
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
"""

# KEYS: writers, then leases. ARGV: writer or '' to stay one, then the leases' tokens.
LEAVE = """
if ARGV[1] ~= '' then redis.call('ZREM', KEYS[1], ARGV[1]) end
for i = 2, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[i] then redis.call('DEL', KEYS[i]) end
end
return 0
"""

# KEYS: lease, numbers, owners, resting, last number. ARGV: token, node, most numbers, rest ms.
# A node keeps its number; a new one gets one that has rested, else the next. -3: none is left.
REGISTER = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
local owner = redis.call('HGET', KEYS[3], ARGV[2])
if owner and tonumber(owner) > tonumber(ARGV[1]) then return -1 end
local number = redis.call('HGET', KEYS[2], ARGV[2])
if not number then
  local time = redis.call('TIME')
  local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(ARGV[4])
  local rested = redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', until_ms, 'LIMIT', 0, 1)
  if rested[1] then
    number = rested[1]
    redis.call('ZREM', KEYS[4], number)
  else
    number = redis.call('GET', KEYS[5]) or '0'
    if tonumber(number) >= tonumber(ARGV[3]) then return -3 end
    redis.call('SET', KEYS[5], string.format('%.0f', number + 1))
  end
  redis.call('HSET', KEYS[2], ARGV[2], number)
end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[1])
return tonumber(number)
"""

# KEYS: owners, records, version. ARGV: token, node, record, 1 when readers must look again.
PUBLISH = """
local owner = redis.call('HGET', KEYS[1], ARGV[2])
if not owner then return -2 end
if owner ~= ARGV[1] then return -1 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if ARGV[4] == '1' or redis.call('EXISTS', KEYS[3]) == 0 then
  local time = redis.call('TIME')
  redis.call('SET', KEYS[3], string.format('%.0f', time[1] * 1000000 + time[2]))
end
return 0
"""

# KEYS: owners, records, version, numbers, resting. ARGV: token, node. Its rows are gone already.
FORGET = """
if redis.call('HGET', KEYS[1], ARGV[2]) ~= ARGV[1] then return -1 end
local time = redis.call('TIME')
redis.call('SET', KEYS[3], string.format('%.0f', time[1] * 1000000 + time[2]))
local number = redis.call('HGET', KEYS[4], ARGV[2])
for i = 1, 2 do redis.call('HDEL', KEYS[i], ARGV[2]) end
redis.call('HDEL', KEYS[4], ARGV[2])
if number then redis.call('ZADD', KEYS[5], time[1] * 1000 + math.floor(time[2] / 1000), number) end
return 0
"""

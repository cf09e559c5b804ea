"""Lua that Redis runs: what must happen as one step. Each script's keys share one slot."""

from __future__ import annotations

LOST = -2
"""The fence is gone: Redis was emptied, or another one answers."""

FENCED = -1
"""Another writer has the number."""

# KEYS: fence, then a block and a slice for each row.
# ARGV: token, number, one byte a row (tier bit; + 8 to store), the rows' members.
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
    redis.call(stores and 'SADD' or 'SREM', KEYS[2 * i + 1], ARGV[3 + i])
    changed = changed + 1
  end
end
return changed
"""

# KEYS: fence. ARGV: token. A writer that comes late does not take a newer one's number.
FENCE = """
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(fence) > tonumber(ARGV[1]) then return -1 end
redis.call('SET', KEYS[1], ARGV[1])
return 0
"""

# KEYS: fence. ARGV: token.
UNFENCE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""

-- What a holder was seen to take at most, kept under a name that its asker chose, for claims to come.
--
-- ARGV[1]  profile: the name; id: of the lease; bytes: {device kind: bytes}
-- Reply    ok: record = {profile, loads (how many leases were told of), peaks = the latest of them, oldest first: list of
--            {device kind: bytes}, at_ms (server's clock)}
-- Telling of the same lease again keeps the larger figures, as long as it is among the latest. Of too many profiles the one
-- that was told of longest ago is forgotten.
local turned_away = enter()
if turned_away then return turned_away end

local MOST_PROFILES = 512
local MOST_PEAKS = 5

local function forget_oldest()
  local flat = redis.call('HGETALL', LEARNED)
  local oldest, at
  for i = 1, #flat, 2 do
    local since = cjson.decode(flat[i + 1]).at_ms
    if not at or since < at then oldest, at = flat[i], since end
  end
  redis.call('HDEL', LEARNED, oldest)
end

local record = decoded(redis.call('HGET', LEARNED, args.profile))
record = {profile = args.profile, loads = record.loads or 0, peaks = record.peaks or {}, at_ms = meta.server}
local peak
for _, each in ipairs(record.peaks) do
  if each.id == args.id then peak = each end
end
if not peak then
  peak = {id = args.id, bytes = {}}
  record.loads = record.loads + 1
  table.insert(record.peaks, peak)
  if #record.peaks > MOST_PEAKS then table.remove(record.peaks, 1) end
end
for kind, bytes in pairs(args.bytes) do peak.bytes[kind] = math.max(bytes, peak.bytes[kind] or 0) end
redis.call('HSET', LEARNED, args.profile, cjson.encode(record))
if redis.call('HLEN', LEARNED) > MOST_PROFILES then forget_oldest() end
return reply('ok', {record = record})

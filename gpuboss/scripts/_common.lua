-- The first part of every script: arguments, clock, leases, books, queue.
--
-- KEYS     1 meta, 2 nodes, 3 queue, 4 held, 5 deadlines, 6 events (gpuboss/keys.py)
-- ARGV[1]  JSON object. Always: lease_prefix, run_id (of the connection that sends the script), ttl_ms.
--          Optional: now (ms; a test's clock instead of the server's).
-- Reply    JSON object. Always: status; epoch where there is one. Statuses:
--            ok        done, or was done before
--            noepoch   the store lives under another run id than it was synced with; nothing changed
--            unsynced  a node that the request names has not synced in this epoch; nothing changed
--            schema    the store holds another schema; nothing changed
--            refused, stale: see the script
--
-- Numbers stay below 2^53; what may reach 10^14 is never put through cjson as a number, which would round it.

local META, NODES, QUEUE, HELD, DEADLINES, EVENTS = unpack(KEYS)
local SCHEMA = '1'
local TOMBSTONE_MS = 600000
local MAX_CLOCK_STEP_MS = 2000
local EVENTS_KEPT = 10000
local OVER = {freed = true, refused = true, cancelled = true}

local args = cjson.decode(ARGV[1])
local meta = {}

local function whole(number)
  return string.format('%.0f', number)
end

local function reply(status, fields)
  fields = fields or {}
  fields.status = status
  fields.epoch = meta.epoch
  return cjson.encode(fields)
end

-- The clock ---------------------------------------------------------------------------------------------------------

-- Time passes by what the server's clock did since the last script, but by 0 to 2 s at most: a jump, a suspended machine
-- or an hour without a keeper neither expires nor revives anything.
local function read_clock()
  local server = args.now
  if not server then
    local time = redis.call('TIME')
    server = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  local found = redis.call('HMGET', META, 'schema', 'run_id', 'epoch', 'clock', 'seen')
  meta.schema, meta.run_id, meta.epoch = found[1], found[2], tonumber(found[3])
  meta.server = server
  if found[4] then
    local step = math.min(math.max(server - tonumber(found[5]), 0), MAX_CLOCK_STEP_MS)
    meta.now = tonumber(found[4]) + step
  else
    meta.now = server
  end
end

local function write_clock()
  redis.call('HSET', META, 'clock', whole(meta.now), 'seen', whole(meta.server))
end

-- Refuses, by a reply to return, a store that this connection's node did not sync with.
local function enter()
  read_clock()
  if meta.schema and meta.schema ~= SCHEMA then
    return reply('schema', {found = meta.schema, wanted = SCHEMA})
  end
  if not meta.epoch or meta.run_id ~= args.run_id then
    meta.epoch = nil
    return reply('noepoch')
  end
  write_clock()
end

-- Leases ------------------------------------------------------------------------------------------------------------

local function lease_key(id)
  return args.lease_prefix .. id
end

local function load_lease(id)
  local flat = redis.call('HGETALL', lease_key(id))
  if #flat == 0 then return nil end
  local lease = {}
  for i = 1, #flat, 2 do lease[flat[i]] = flat[i + 1] end
  return lease
end

-- Waiters stand in the queue by priority, then by their order; ZSETs sort equal scores by name.
local function queue_member(id, lease)
  return string.format('%015.0f:%s', tonumber(lease.order), id)
end

local function waiter_of(member)
  return string.sub(member, 17)
end

local function view_of(id, lease)
  local rank = lease.state == 'queued' and redis.call('ZRANK', QUEUE, queue_member(id, lease))
  return {
    id = id, holder = lease.holder, kind = lease.kind, state = lease.state, priority = tonumber(lease.priority),
    node = lease.node, owner = lease.owner, shares = lease.shares, order = tonumber(lease.order),
    epoch = tonumber(lease.epoch), seq = tonumber(lease.seq), since_ms = tonumber(lease.since),
    position = rank and rank + 1 or nil, why = lease.why,
  }
end

local function announce(what, id, lease)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', EVENTS_KEPT, '*', 'what', what, 'lease', id,
    'epoch', lease.epoch or '', 'seq', lease.seq or '')
end

local function set_deadline(id)
  redis.call('ZADD', DEADLINES, whole(meta.now + args.ttl_ms), id)
end

local function set_state(id, lease, state)
  lease.state = state
  lease.since = whole(meta.server)
  redis.call('HSET', lease_key(id), 'state', state, 'since', lease.since)
end

-- What a dead holder was last seen to use is not taken for free before its node has read the device again.
local function keep_until_read(lease)
  local observed = cjson.decode(lease.observed or '{}')
  local raw = next(observed) and redis.call('HGET', NODES, lease.node)
  if not raw then return end
  local record = cjson.decode(raw)
  for device, bytes in pairs(observed) do
    local entry = record.devices[device]
    if entry and entry.settles then entry.residual = entry.residual + bytes end
  end
  redis.call('HSET', NODES, lease.node, cjson.encode(record))
end

-- Ends a lease for good. It is remembered for ten minutes, so that a late or repeated command cannot bring it back.
local function finish(id, lease, state)
  if state == 'freed' then keep_until_read(lease) end
  if lease.order then redis.call('ZREM', QUEUE, queue_member(id, lease)) end
  redis.call('SREM', HELD, id)
  redis.call('ZREM', DEADLINES, id)
  set_state(id, lease, state)
  redis.call('PEXPIRE', lease_key(id), TOMBSTONE_MS)
  announce(state, id, lease)
end

-- Books -------------------------------------------------------------------------------------------------------------

local function node_of(device)
  return string.match(device, '^(.-)/')
end

-- Every device that may be granted from: those of nodes that synced in this epoch. Summed up anew each time, so that no
-- counter can drift from the leases it counts.
local function open_books()
  local books = {devices = {}, synced = {}, count = 0}
  local flat = redis.call('HGETALL', NODES)
  for i = 1, #flat, 2 do
    local record = cjson.decode(flat[i + 1])
    if record.epoch == meta.epoch then
      books.synced[flat[i]] = true
      for name, entry in pairs(record.devices) do
        local cap = entry.total - entry.reserve
        books.devices[name] = {
          cap = cap, total = entry.total, foreign = entry.foreign, residual = entry.residual, claimed = 0, observed = 0,
          free = cap - entry.foreign - entry.residual,
        }
        books.count = books.count + 1
      end
    end
  end
  for _, id in ipairs(redis.call('SMEMBERS', HELD)) do
    local found = redis.call('HMGET', lease_key(id), 'shares', 'observed')
    local observed = cjson.decode(found[2] or '{}')
    for name, bytes in pairs(cjson.decode(found[1])) do
      local device = books.devices[name]
      if device then
        device.claimed = device.claimed + bytes
        device.observed = device.observed + (observed[name] or 0)
        device.free = device.free - math.max(bytes, observed[name] or 0)
      end
    end
  end
  return books
end

local function fits(option, books, earmarked)
  for name, bytes in pairs(option) do
    local device = books.devices[name]
    if not device or earmarked[name] or device.free < bytes then return false end
  end
  return true
end

local function could_ever_fit(option, books)
  for name, bytes in pairs(option) do
    local device = books.devices[name]
    if not device or device.cap < bytes then return false end
  end
  return true
end

local function first_that_could_fit(options, books)
  for _, option in ipairs(options) do
    if could_ever_fit(option, books) then return option end
  end
end

-- The node, if any, that these options name and that has not synced in this epoch.
local function unsynced_node(options, books)
  for _, option in ipairs(options) do
    for name in pairs(option) do
      local node = node_of(name)
      if not node or not books.synced[node] then return node or name end
    end
  end
end

-- Why no option can ever be granted: per option and device what is wanted and what could be had (nil: no such device).
local function shortage(options, books)
  local found = {}
  for index, option in ipairs(options) do
    found[index] = {}
    for name, bytes in pairs(option) do
      local device = books.devices[name]
      found[index][name] = {wanted = bytes, cap = device and device.cap, total = device and device.total}
    end
  end
  return found
end

-- The queue ---------------------------------------------------------------------------------------------------------

local function grant(id, lease, option, books)
  local seq = redis.call('HINCRBY', META, 'seq', 1)
  for name, bytes in pairs(option) do
    books.devices[name].free = books.devices[name].free - bytes
  end
  redis.call('HSET', lease_key(id), 'shares', cjson.encode(option), 'epoch', whole(meta.epoch), 'seq', seq)
  lease.epoch, lease.seq = whole(meta.epoch), seq
  redis.call('ZREM', QUEUE, queue_member(id, lease))
  redis.call('SADD', HELD, id)
  set_state(id, lease, 'granted')
  set_deadline(id)
  announce('granted', id, lease)
end

local function earmark(option, earmarked)
  local added = 0
  for name in pairs(option) do
    if not earmarked[name] then
      earmarked[name] = true
      added = added + 1
    end
  end
  return added
end

-- Grants what can be granted, in queue order. A waiter that must wait earmarks the devices of its best option: later ones
-- may pass it on other devices only. Once every device is earmarked nobody behind can be granted.
local function pump(books)
  local earmarked, open = {}, books.count
  for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
    if open <= 0 then return end
    local id = waiter_of(member)
    local found = redis.call('HMGET', lease_key(id), 'options', 'order')
    local lease = {order = found[2]}
    local options = cjson.decode(found[1])
    local chosen
    for _, option in ipairs(options) do
      if fits(option, books, earmarked) then
        chosen = option
        break
      end
    end
    if chosen then
      grant(id, lease, chosen, books)
    else
      local best = first_that_could_fit(options, books)
      if best then
        open = open - earmark(best, earmarked)
      elseif not unsynced_node(options, books) then
        redis.call('HSET', lease_key(id), 'why', cjson.encode(shortage(options, books)))
        finish(id, lease, 'refused')
      end
    end
  end
end

-- Waiters that nobody asks for any more leave. Holders that nobody renews are ending: they still count, since only
-- evidence of death frees memory, and a renewal revives them.
local function expire()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', whole(meta.now), 'LIMIT', 0, 1000)) do
    local lease = load_lease(id)
    redis.call('ZREM', DEADLINES, id)
    if lease and lease.state == 'queued' then
      finish(id, lease, 'cancelled')
    elseif lease and not OVER[lease.state] then
      redis.call('HSET', lease_key(id), 'was', lease.state)
      set_state(id, lease, 'ending')
      announce('ending', id, lease)
    end
  end
end

-- Its asker still wants it. From its activation on, its node renews it instead.
local function touch(id, lease)
  if lease.state == 'queued' or lease.state == 'granted' then
    set_deadline(id)
  elseif lease.state == 'ending' and lease.was == 'granted' then
    set_state(id, lease, 'granted')
    set_deadline(id)
  end
end

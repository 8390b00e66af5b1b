-- The first part of every script: arguments, clock, leases. `_books.lua` follows it, then, as `queue()`, what has to do with
-- those who wait: `_notices.lua` and `_queue.lua` (see gpuboss/scripts.py).
--
-- KEYS     1 meta, 2 nodes, 3 queue, 4 held, 5 deadlines, 6 events, 7 details, 8 wants, 9 learned (gpuboss/keys.py)
-- ARGV[1]  JSON object. Always: lease_prefix, run_id (of the connection that sends the script), ttl_ms.
--          Optional: now (ms; a test's clock instead of the server's).
-- Reply    JSON object. Always: status; epoch where there is one. Statuses:
--            ok        done, or was done before
--            noepoch   the store lives under another run id than it was synced with; nothing changed
--            unsynced  a node that the request names has not synced in this epoch; nothing changed
--            schema    the store holds another schema; nothing changed
--            refused, stale, over: see the script
--          A lease is shown as a view:
--            id, state, since_ms (server's clock); what was asked: holder, kind, priority, node, owner (JSON text),
--            preemptible, grace_ms, lease_ttl_ms (0: its node's keeper renews it), order
--            epoch, seq, shares (JSON text {device: bytes}), revision (how often it was resized): once granted
--            position (1-based) and wants (JSON text of its first option), while queued
--            grounds (JSON text of what its admission rested on), once its node has told
--            why (JSON text of the shortage, when refused), reason (expired, preempted; when over by time)
--            notice, while its holder shall yield: {by (id of a waiter; '': a person), holder, priority, since_ms, left_ms,
--              acked, outranks (else a slot need not yield before it is idle)}
--          Of a lease that the store knows only to be over, a view has nothing but id, state and since_ms.
--
-- Numbers stay below 2^53; what may reach 10^14 is never put through cjson as a number, which would round it.

local META, NODES, QUEUE, HELD, DEADLINES, EVENTS, DETAILS, WANTS, LEARNED = unpack(KEYS)
local SCHEMA = '2'
local TOMBSTONE_MS = 600000
local MAX_CLOCK_STEP_MS = 2000
local EVENTS_KEPT = 10000
-- How long memory that was given up for a waiter is kept for it alone: a driver takes its time to show it free.
local KEPT_MS = 20000
local GRACE_MS = 30000
-- How long a broker's slot waits for room among the broker's own slots before the ledger tells others to yield to it.
local OWN_FIRST_MS = 10000
local HOLDS = {granted = true, active = true, ending = true}
local OVER = {freed = true, refused = true, cancelled = true}

local args = cjson.decode(ARGV[1])
local meta = {}

local function yes(flag)
  return flag and '1' or '0'
end

local function whole(number)
  return string.format('%.0f', number)
end

-- What the store remembers of itself is written before anything that rests on it, and at the end.
local function write_meta(...)
  redis.call('HSET', META, 'clock', whole(meta.now), 'seen', whole(meta.server), ...)
  meta.is_written = true
end

local function reply(status, fields)
  if meta.is_entered and not meta.is_written then write_meta() end
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
  local found = redis.call('HMGET', META, 'schema', 'run_id', 'epoch', 'clock', 'seen', 'seq', 'order')
  meta.schema, meta.run_id, meta.epoch = found[1], found[2], tonumber(found[3])
  meta.server, meta.seq, meta.order = server, tonumber(found[6] or 0), tonumber(found[7] or 0)
  if found[4] then
    local step = math.min(math.max(server - tonumber(found[5]), 0), MAX_CLOCK_STEP_MS)
    meta.now = tonumber(found[4]) + step
  else
    meta.now = server
  end
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
  meta.is_entered = true
end

-- Leases ------------------------------------------------------------------------------------------------------------

local function lease_key(id)
  return args.lease_prefix .. id
end

local function put_lease(id, lease)
  local flat, count = {}, 0
  for name, value in pairs(lease) do
    flat[count + 1], flat[count + 2] = name, value
    count = count + 2
  end
  redis.call('HSET', lease_key(id), unpack(flat))
end

-- What is to be known of a lease that is about to end.
local function load_for_end(id)
  local found = redis.call('HMGET', lease_key(id), 'state', 'epoch', 'seq', 'order', 'holder', 'node', 'preemptible',
    'observed', 'notice_by', 'notice_at', 'settles', 'shares')
  return {
    state = found[1] or nil, epoch = found[2] or nil, seq = found[3] or nil, order = found[4] or nil,
    holder = found[5] or nil, node = found[6] or nil, preemptible = found[7] or nil, observed = found[8] or nil,
    notice_by = found[9] or nil, notice_at = found[10] or nil, settles = found[11] or nil, shares = found[12] or nil,
  }
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

-- Beside its place in the queue stands how much it needs at least, and whether it yields to those before it: what is enough
-- to leave most waiters of a long queue alone.
local function wants_member(id, preemptible)
  return (preemptible and 'y:' or 'n:') .. id
end

local function leave_queue(id, lease)
  redis.call('ZREM', QUEUE, queue_member(id, lease))
  redis.call('ZREM', WANTS, wants_member(id, lease.preemptible == '1'))
end

local function grace_of(lease)
  return tonumber(lease.notice_grace or lease.grace_ms or GRACE_MS)
end

-- The ledger's own clock may lie behind the server's; what people are shown is the server's.
local function notice_of(lease)
  if not lease.notice_at or not HOLDS[lease.state] then return nil end
  local age = meta.now - tonumber(lease.notice_at)
  return {
    by = lease.notice_by, holder = lease.notice_holder, priority = tonumber(lease.notice_priority),
    since_ms = meta.server - age, left_ms = grace_of(lease) - age, acked = lease.acked == '1',
    outranks = lease.notice_outranks == '1',
  }
end

local function view_of(id, lease)
  local view = {id = id, state = lease.state, since_ms = tonumber(lease.since)}
  if not lease.holder then return view end
  local rank = lease.state == 'queued' and redis.call('ZRANK', QUEUE, queue_member(id, lease))
  view.position = rank and rank + 1 or nil
  view.wants = rank and lease.first or nil
  view.holder, view.kind, view.priority = lease.holder, lease.kind, tonumber(lease.priority)
  view.node, view.owner, view.order = lease.node, lease.owner, tonumber(lease.order)
  view.preemptible = lease.preemptible == '1'
  view.grace_ms, view.lease_ttl_ms = tonumber(lease.grace_ms or GRACE_MS), tonumber(lease.lease_ttl_ms or 0)
  view.epoch, view.seq, view.shares = tonumber(lease.epoch), tonumber(lease.seq), lease.shares
  view.revision, view.why, view.reason = tonumber(lease.revision or 0), lease.why, lease.reason
  view.grounds, view.notice = lease.grounds, notice_of(lease)
  return view
end

local function announce(what, id, lease)
  redis.call('XADD', EVENTS, '*', 'what', what, 'lease', id, 'epoch', lease.epoch or '', 'seq', lease.seq or '',
    'holder', lease.holder or '', 'node', lease.node or '')
  if redis.call('XLEN', EVENTS) > EVENTS_KEPT + 1000 then redis.call('XTRIM', EVENTS, 'MAXLEN', '~', EVENTS_KEPT) end
end

-- When a lease must have been renewed. One that only its holder's word renews gets the time it asked for, but none beyond
-- the grace of a notice: it has no process to end, so it is not renewed any more.
local function set_deadline(id, lease)
  local life = HOLDS[lease.state] and tonumber(lease.lease_ttl_ms or 0) or 0
  local deadline = meta.now + (life > 0 and life or args.ttl_ms)
  if life > 0 and lease.notice_at and lease.notice_outranks == '1' then
    deadline = math.min(deadline, tonumber(lease.notice_at) + grace_of(lease))
  end
  redis.call('ZADD', DEADLINES, whole(deadline), id)
end

local function set_state(id, lease, state)
  lease.state = state
  lease.since = whole(meta.server)
  redis.call('HSET', lease_key(id), 'state', state, 'since', lease.since)
end

-- What a dead holder claimed, or was seen to use, is not taken for free before its node has read the device again, where a
-- driver takes its time to give it back.
local function keep_until_read(lease)
  local raw = lease.settles and redis.call('HGET', NODES, lease.node)
  if not raw then return end
  local record, observed = cjson.decode(raw), cjson.decode(lease.observed or '{}')
  for device, bytes in pairs(cjson.decode(lease.shares)) do
    local entry = record.devices[device]
    if entry and entry.settles then entry.residual = entry.residual + math.max(bytes, observed[device] or 0) end
  end
  redis.call('HSET', NODES, lease.node, cjson.encode(record))
end

-- Ends a lease for good. It is remembered for ten minutes, so that a late or repeated command cannot bring it back.
local function finish(id, lease, state, reason)
  -- The clock first: a server that is out of memory refuses this, and then time has not passed for anybody.
  if meta.is_entered and not meta.is_written then write_meta() end
  if state == 'freed' then keep_until_read(lease) end
  if lease.notice_at and lease.notice_by ~= '' then
    local waiter = redis.call('HMGET', lease_key(lease.notice_by), 'state', 'preemptible')
    if waiter[1] == 'queued' then
      redis.call('HSET', lease_key(lease.notice_by), 'kept', whole(meta.now + KEPT_MS))
      redis.call('ZADD', WANTS, '0', wants_member(lease.notice_by, waiter[2] == '1'))
    end
  end
  if lease.state == 'queued' then leave_queue(id, lease) end
  redis.call('SREM', HELD, id)
  redis.call('ZREM', DEADLINES, id)
  if reason then redis.call('HSET', lease_key(id), 'reason', reason) end
  set_state(id, lease, state)
  redis.call('PEXPIRE', lease_key(id), TOMBSTONE_MS)
  announce(state, id, lease)
end

local function has_fence(lease, fence)
  return tonumber(lease.epoch) == fence.epoch and tonumber(lease.seq) == fence.seq
end

-- Its holder lives: what had run out of time is what it was before.
local function revive(id, lease)
  if lease.state == 'ending' then
    set_state(id, lease, lease.was or 'active')
    if lease.state == 'active' then announce('active', id, lease) end
  end
  set_deadline(id, lease)
end

local function put_notice(id, lease, notice)
  redis.call('HSET', lease_key(id), 'notice_by', notice.by, 'notice_holder', notice.holder, 'notice_priority',
    whole(notice.priority), 'notice_outranks', notice.outranks and '1' or '0')
  lease.notice_by, lease.notice_holder, lease.notice_priority = notice.by, notice.holder, notice.priority
  -- A slot that must yield only when idle learns at its own time that it must in any case.
  if not lease.notice_at or (notice.outranks and lease.notice_outranks ~= '1') then
    lease.notice_at, lease.acked = whole(meta.now), '0'
    redis.call('HSET', lease_key(id), 'notice_at', lease.notice_at, 'acked', '0')
    announce('notice', id, lease)
  end
  lease.notice_outranks = notice.outranks and '1' or '0'
  if tonumber(lease.lease_ttl_ms or 0) > 0 then
    redis.call('ZADD', DEADLINES, 'LT', whole(tonumber(lease.notice_at) + grace_of(lease)), id)
  end
end

-- Waiters that nobody asks for any more leave. Holders that nobody renews are ending: they still count, since only
-- evidence of death frees memory, and a renewal revives them. Those that had to renew by their own word are freed.
local function expire()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', whole(meta.now), 'LIMIT', 0, 1000)) do
    local lease = load_lease(id)
    redis.call('ZREM', DEADLINES, id)
    if lease and lease.state == 'queued' then
      finish(id, lease, 'cancelled', 'expired')
    elseif lease and HOLDS[lease.state] and tonumber(lease.lease_ttl_ms or 0) > 0 then
      local over = lease.notice_at and tonumber(lease.notice_at) + grace_of(lease) <= meta.now
      finish(id, lease, 'freed', over and 'preempted' or 'expired')
    elseif lease and not OVER[lease.state] then
      redis.call('HSET', lease_key(id), 'was', lease.state)
      set_state(id, lease, 'ending')
      announce('ending', id, lease)
    end
  end
end

-- Its asker still wants it. From its activation on its node renews it instead; one that its holder must renew by its word,
-- from its grant on nobody else can.
local function touch(id, lease)
  if lease.state == 'queued' then
    set_deadline(id, lease)
  elseif tonumber(lease.lease_ttl_ms or 0) > 0 then
    return
  elseif lease.state == 'granted' then
    set_deadline(id, lease)
  elseif lease.state == 'ending' and lease.was == 'granted' then
    revive(id, lease)
  end
end

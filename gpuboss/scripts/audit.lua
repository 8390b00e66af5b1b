-- Adds everything up anew from the leases and says where the store contradicts itself. Changes nothing.
--
-- Reply    ok: faults = list of texts; empty unless something has gone wrong that never should
--          devices = {device: {cap, total, foreign, residual, claimed, observed, adopted, free}}
--          overfull = list of devices with more claimed than they have: after one has shrunk, or after a store that had
--            forgotten holders granted their memory to others; nothing is granted there before it has come back
local turned_away = enter()
if turned_away then return turned_away end

local faults = {}
local function fault(...)
  table.insert(faults, string.format(...))
end

local fences = {}
local function check_fence(id, lease)
  local epoch, seq = tonumber(lease.epoch), tonumber(lease.seq)
  if not epoch or not seq then return fault('lease %s is %s without a fence', id, lease.state) end
  local name = whole(epoch) .. '.' .. whole(seq)
  if fences[name] then fault('leases %s and %s have the same fence %s', fences[name], id, name) end
  fences[name] = id
  if epoch > meta.epoch or (epoch == meta.epoch and seq > meta.seq) then
    fault('lease %s has the fence %s, which was never given', id, name)
  end
end

local function check_notice(id, lease)
  if not lease.notice_at then return end
  local by = lease.notice_by
  if not by then return fault('lease %s has a notice of nobody', id) end
  if by ~= '' and lease.acked ~= '1' and redis.call('HGET', lease_key(by), 'state') ~= 'queued' then
    fault('lease %s shall yield to %s, which does not wait', id, by)
  end
end

local function check_deadline(id, lease)
  local deadline = redis.call('ZSCORE', DEADLINES, id)
  if not deadline then
    if lease.state ~= 'ending' then fault('lease %s is %s and never expires', id, lease.state) end
  elseif tonumber(deadline) > meta.now + math.max(args.ttl_ms, tonumber(lease.lease_ttl_ms or 0)) then
    fault('lease %s expires later than it may', id)
  end
end

local seen = {}
local held = {}
for _, id in ipairs(redis.call('SMEMBERS', HELD)) do
  local lease = load_lease(id)
  seen[id] = true
  if not lease then
    fault('lease %s holds memory and has no record', id)
  elseif not HOLDS[lease.state] then
    fault('lease %s holds memory and is %s', id, lease.state)
  else
    if decoded(lease.shares) == NOTHING then fault('lease %s is %s and has no shares', id, lease.state) end
    check_fence(id, lease)
    check_notice(id, lease)
    check_deadline(id, lease)
    held[id] = lease
  end
end

local line = redis.call('ZRANGE', QUEUE, 0, -1, 'WITHSCORES')
for i = 1, #line, 2 do
  local id = waiter_of(line[i])
  local lease = load_lease(id)
  if seen[id] then fault('lease %s stands in the queue twice, or holds memory too', id) end
  seen[id] = true
  if not lease then
    fault('lease %s waits and has no record', id)
  elseif lease.state ~= 'queued' then
    fault('lease %s waits and is %s', id, lease.state)
  else
    if line[i] ~= queue_member(id, lease) or tonumber(line[i + 1]) ~= tonumber(lease.priority) then
      fault('lease %s does not wait in its place', id)
    end
    if not redis.call('ZSCORE', WANTS, wants_member(id, lease.preemptible == '1')) then
      fault('lease %s does not say what it wants', id)
    end
    check_deadline(id, lease)
  end
end

for _, member in ipairs(redis.call('ZRANGE', WANTS, 0, -1)) do
  local id = string.sub(member, 3)
  if redis.call('HGET', lease_key(id), 'state') ~= 'queued' then fault('lease %s wants something and does not wait', id) end
end

for _, id in ipairs(redis.call('ZRANGE', DEADLINES, 0, -1)) do
  if not seen[id] then
    local state = redis.call('HGET', lease_key(id), 'state')
    fault('lease %s is %s, expires, and neither waits nor holds memory', id, state or 'gone')
  end
end

-- The same sums as the books, by another way: lease by lease instead of device by device.
local books = open_books()
local overfull = {}
for name, device in pairs(books.devices) do
  local claimed, counted = 0, 0
  for _, lease in pairs(held) do
    local bytes = decoded(lease.shares)[name]
    if bytes then
      claimed = claimed + bytes
      counted = counted + math.max(bytes, decoded(lease.observed)[name] or 0)
    end
  end
  local free = device.cap - device.foreign - device.residual - counted + device.adopted
  if claimed ~= device.claimed or free ~= device.free then
    fault('%s: %s claimed and %s free by its leases, %s and %s by the books', name, whole(claimed), whole(free),
      whole(device.claimed), whole(device.free))
  end
  if claimed > device.cap then
    table.insert(overfull, string.format('%s: %s of %s bytes claimed', name, whole(claimed), whole(device.cap)))
  end
end
return reply('ok', {faults = faults, overfull = overfull, devices = books.devices})

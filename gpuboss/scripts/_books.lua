
-- Books: who has how much of which device ---------------------------------------------------------------------------

local NOTHING = {}

local function node_of(device)
  return string.match(device, '^(.-)/')
end

local function decoded(text)
  if not text or text == '{}' then return NOTHING end
  return cjson.decode(text)
end

-- What of a device is foreign only until the lease (or waiter) that adopts it is active.
local function adoptable(device, adopts, bytes)
  return adopts and math.max(0, math.min(adopts, bytes, device.foreign - device.adopted)) or 0
end

-- Every device that may be granted from: those of nodes that synced in this epoch. Summed up anew each time, so that no
-- counter can drift from the leases it counts.
--
-- devices   {name: {cap, total, foreign, residual, claimed, observed, adopted, free, settles}}
-- held      who could yield, or was told to: list of {id, uses = {device: bytes that come back when it ends}, preemptible,
--           kind, priority, order, owner, by (a waiter's id; '': a person; false: nobody), acked, outranks}
local function open_books()
  local books = {devices = {}, synced = {}, count = 0, held = {}, noticed = 0}
  local flat = redis.call('HGETALL', NODES)
  for i = 1, #flat, 2 do
    local record = cjson.decode(flat[i + 1])
    if record.epoch == meta.epoch then
      books.synced[flat[i]] = true
      for name, entry in pairs(record.devices) do
        local cap = entry.total - entry.reserve
        books.devices[name] = {
          cap = cap, total = entry.total, foreign = entry.foreign, residual = entry.residual, claimed = 0, observed = 0,
          adopted = 0, free = cap - entry.foreign - entry.residual, settles = entry.settles or nil,
        }
        books.count = books.count + 1
      end
    end
  end
  for _, id in ipairs(redis.call('SMEMBERS', HELD)) do
    local found = redis.call('HMGET', lease_key(id), 'shares', 'observed', 'adopts', 'preemptible', 'kind', 'priority',
      'order', 'owner', 'notice_by', 'acked', 'notice_outranks')
    local uses = {}
    local observed, adopts = decoded(found[2]), decoded(found[3])
    for name, bytes in pairs(decoded(found[1])) do
      local device = books.devices[name]
      if device then
        local counted = math.max(bytes, observed[name] or 0)
        local adopted = adoptable(device, adopts[name], bytes)
        device.claimed = device.claimed + bytes
        device.observed = device.observed + (observed[name] or 0)
        device.adopted = device.adopted + adopted
        device.free = device.free - counted + adopted
        uses[name] = counted
      end
    end
    if found[9] then books.noticed = books.noticed + 1 end
    if found[4] == '1' or found[9] then
      table.insert(books.held, {
        id = id, uses = uses, preemptible = found[4] == '1', kind = found[5], priority = tonumber(found[6]),
        order = tonumber(found[7]), owner = found[8], by = found[9], acked = found[10] == '1', outranks = found[11] == '1',
      })
    end
  end
  return books
end

local function fits(option, adopts, books)
  for name, bytes in pairs(option) do
    local device = books.devices[name]
    if not device then return false end
    local wanted = bytes - adoptable(device, adopts[name], bytes)
    if device.free < wanted then return false end
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

local function first_that_fits(options, adopts, books)
  for index, option in ipairs(options) do
    if fits(option, adopts, books) then return option, index end
  end
end

local function first_that_could_fit(options, books)
  for index, option in ipairs(options) do
    if could_ever_fit(option, books) then return option, index end
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

-- Grants the lease this option. `changes`: of its record; for one that is not written yet all of it.
local function hand_over(id, lease, option, books, changes)
  local adopts = decoded(lease.adopts)
  for name, bytes in pairs(option) do
    local device = books.devices[name]
    local adopted = adoptable(device, adopts[name], bytes)
    device.free = device.free - bytes + adopted
    device.adopted = device.adopted + adopted
    if device.settles then changes.settles = '1' end
  end
  meta.seq = meta.seq + 1
  write_meta('seq', whole(meta.seq), 'order', whole(meta.order))
  changes.state, changes.since, changes.shares = 'granted', whole(meta.server), cjson.encode(option)
  changes.epoch, changes.seq = whole(meta.epoch), whole(meta.seq)
  put_lease(id, changes)
  for name, value in pairs(changes) do lease[name] = value end
  redis.call('SADD', HELD, id)
  set_deadline(id, lease)
  announce('granted', id, lease)
end

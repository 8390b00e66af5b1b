-- One node's devices and leases, at one moment. Changes nothing.
--
-- ARGV[1]  node
-- Reply    ok: devices = {device: {cap, total, foreign, residual, claimed, observed, adopted, free; quarantined,
--            foreign_pids and unread_s as node_sync was told}}; leases = holders, then waiters
local turned_away = enter()
if turned_away then return turned_away end

local books = open_books()
if not books.synced[args.node] then return reply('unsynced', {node = args.node}) end
local details = decoded(redis.call('HGET', DETAILS, args.node))
local devices, leases = {}, {}
for name, device in pairs(books.devices) do
  if node_of(name) == args.node then
    devices[name] = device
    for field, value in pairs(details[name] or NOTHING) do device[field] = value end
  end
end
local function add(id)
  local lease = load_lease(id)
  if lease.node == args.node then table.insert(leases, view_of(id, lease)) end
end
for _, id in ipairs(redis.call('SMEMBERS', HELD)) do add(id) end
for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do add(waiter_of(member)) end
return reply('ok', {devices = devices, leases = leases})

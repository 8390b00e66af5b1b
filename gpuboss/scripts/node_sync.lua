-- A keeper says what its node has and what runs there; the store takes that for the truth, renews what runs, and says which
-- leases it knows for the node. The only script that a store without an epoch accepts: it begins one.
--
-- ARGV[1]  node; seen_epoch: the highest epoch this node knows of
--          devices: {device: {total, reserve, foreign, residual, settles}}; settles: memory of the dead must be read back
--          rows: list of {id, holder, kind, priority, owner (JSON text), epoch, seq, shares, observed, insist}
--            shares and observed: {device: bytes} as JSON text; observed: what its processes use, where that is measured
--            insist: the row stood in the ledger still after the store had said that the lease is over
-- Reply    ok: leases = list of {id, state, epoch, seq, owner, kind, priority}, every lease of this node that is not over
--          over: ids = rows whose lease is over. Nothing was changed: the rows may be older than that; read them again
read_clock()
if meta.schema and meta.schema ~= SCHEMA then
  return reply('schema', {found = meta.schema, wanted = SCHEMA})
end

-- A new life of the store: after a restart (the run id tells), a wipe, or a roll-back behind an epoch this node has seen.
-- No node is synced in it yet, so nothing is granted anywhere until each has said what runs there.
if not meta.epoch or meta.run_id ~= args.run_id or meta.epoch < args.seen_epoch then
  meta.epoch = math.max(meta.server, 1 + math.max(meta.epoch or 0, args.seen_epoch))
  redis.call('HSET', META, 'schema', SCHEMA, 'run_id', args.run_id, 'epoch', whole(meta.epoch), 'seq', '0')
  announce('epoch', '', {epoch = whole(meta.epoch)})
end
write_clock()

local known, over = {}, {}
for _, row in ipairs(args.rows) do
  known[row.id] = load_lease(row.id) or false
  if known[row.id] and OVER[known[row.id].state] and not row.insist then table.insert(over, row.id) end
end
if #over > 0 then return reply('over', {ids = over}) end

redis.call('HSET', NODES, args.node, cjson.encode({epoch = meta.epoch, devices = args.devices}))

-- What runs is active, with the fence and the shares it runs with, whatever the store believed before.
for _, row in ipairs(args.rows) do
  local lease = known[row.id]
  local key = lease_key(row.id)
  if not lease then
    lease = {}
    redis.call('HSET', key, 'holder', row.holder, 'kind', row.kind, 'priority', whole(row.priority), 'node', args.node,
      'owner', row.owner, 'order', '0')
  elseif lease.state == 'queued' then
    redis.call('ZREM', QUEUE, queue_member(row.id, lease))
  elseif OVER[lease.state] then
    redis.call('PERSIST', key)
  end
  lease.epoch, lease.seq = whole(row.epoch), whole(row.seq)
  redis.call('HSET', key, 'epoch', lease.epoch, 'seq', lease.seq, 'shares', row.shares, 'observed', row.observed)
  redis.call('SADD', HELD, row.id)
  set_deadline(row.id)
  if lease.state ~= 'active' then
    set_state(row.id, lease, 'active')
    announce('active', row.id, lease)
  end
end

expire()
pump(open_books())

local leases = {}
local function add(id)
  local found = redis.call('HMGET', lease_key(id), 'node', 'state', 'epoch', 'seq', 'owner', 'kind', 'priority')
  if found[1] == args.node then
    table.insert(leases, {id = id, state = found[2], epoch = tonumber(found[3]), seq = tonumber(found[4]),
      owner = found[5], kind = found[6], priority = tonumber(found[7])})
  end
end
for _, id in ipairs(redis.call('SMEMBERS', HELD)) do add(id) end
for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do add(waiter_of(member)) end
return reply('ok', {leases = leases})

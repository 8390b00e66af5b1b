-- A keeper says what its node has and what runs there; the store takes that for the truth, renews what runs, and says which
-- leases it knows for the node. The only script that a store without an epoch accepts: it begins one.
--
-- ARGV[1]  node; seen_epoch: the highest epoch this node knows of
--          ledger: {id, place; leaves} of the node ledger that these rows are from; leaves: its keeper is about to end, and
--            another may speak for the node at once; optional
--          devices: {device: {total, reserve, foreign, residual, settles; quarantined, foreign_pids, unread_s}}
--            settles: memory of the dead must be read back. quarantined (part of residual), foreign_pids (list of {pid,
--            name, bytes}) and unread_s (since the driver answered, if it does not) are only shown; optional
--          rows: list of {id, holder, epoch, seq, shares, observed, insist, terms}
--            shares and observed: {device: bytes} as JSON text; observed: what its processes use, where that is measured
--            insist: the row stood in the ledger still after the store had said that the lease is over
--            terms (JSON text): {kind, priority, preemptible, grace_ms, lease_ttl_ms, order, owner (JSON text)}, for a store
--              that forgot the lease. Each may stand in the row itself instead, which then counts
--            grounds (JSON text): what its admission rested on, to be shown; optional
--            is_owner: whether the row says so itself that this is its owner; optional. It is in the books before it is in
--              the store, so that a store that forgot a take-over (not the lease) learns of it here
-- Reply    ok: leases = list of {id, holder, state, epoch, seq, owner, kind, priority, preemptible, grace_ms, lease_ttl_ms,
--              order, shares, notice}, every lease of this node that is not over; of a waiter only {id, state, owner}
--            over = ids of rows that were told with insist although their lease is over for good: nobody but their holder
--              could renew them (lease_ttl_ms), and it did not. Their rows must go
--          conflict: place, where the ledger is that spoke for this node within ttl_ms and is another. Nothing was changed: its
--            leases would be taken for dead
--          over: ids = rows whose lease is over. Nothing was changed: the rows may be older than that; read them again, and
--            take out those whose lease_ttl_ms is not 0
-- A row with lease_ttl_ms is taken in where the store forgot it, with all its time before it; it is not renewed by this.
read_clock()
if meta.schema and meta.schema ~= SCHEMA then
  return reply('schema', {found = meta.schema, wanted = SCHEMA})
end

-- Two lives of a store whose server's clock went back can begin the same epoch, if the node that syncs first had not seen
-- the other. A node that had is found out: it has seen the epoch, and never synced in it here.
local before_sync = redis.call('HGET', NODES, args.node)
before_sync = before_sync and cjson.decode(before_sync)
local ledger, spoke = args.ledger or {}, before_sync and before_sync.ledger
if spoke and ledger.id ~= spoke.id and meta.now - spoke.at < args.ttl_ms then
  write_meta()  -- time passes for those who wait that it is forgotten, though nobody else may call
  return reply('conflict', {place = spoke.place})
end
ledger.at = meta.now

local function has_seen_another()
  return meta.epoch == args.seen_epoch and (not before_sync or before_sync.epoch ~= meta.epoch)
end

-- A new life of the store: after a restart (the run id tells), a wipe, or a roll-back behind an epoch this node has seen.
-- No node is synced in it yet, so nothing is granted anywhere until each has said what runs there. Grants are numbered from
-- somewhere else in each life, for the same reason.
if not meta.epoch or meta.run_id ~= args.run_id or meta.epoch < args.seen_epoch or has_seen_another() then
  meta.epoch = math.max(meta.server, 1 + math.max(meta.epoch or 0, args.seen_epoch))
  meta.seq = tonumber(string.sub(redis.sha1hex(args.run_id), 1, 7), 16)
  write_meta('schema', SCHEMA, 'run_id', args.run_id, 'epoch', whole(meta.epoch), 'seq', whole(meta.seq))
  announce('epoch', '', {epoch = whole(meta.epoch)})
end
meta.is_entered = true

local known, over, gone = {}, {}, {}
for _, row in ipairs(args.rows) do
  for name, value in pairs(decoded(row.terms ~= '' and row.terms)) do
    if row[name] == nil then row[name] = value end
  end
  local lease = load_lease(row.id)
  known[row.id] = lease
  if lease and OVER[lease.state] then
    if not row.insist then
      table.insert(over, row.id)
    elseif (row.lease_ttl_ms or 0) > 0 then
      table.insert(gone, row.id)
      row.is_over = true
    end
  end
end
if #over > 0 then return reply('over', {ids = over}) end

local is_new = not before_sync or before_sync.epoch ~= meta.epoch
local is_smaller = is_new
local entries, details = {}, {}
for name, told in pairs(args.devices) do
  entries[name] = {
    total = told.total, reserve = told.reserve, foreign = told.foreign, residual = told.residual, settles = told.settles,
  }
  details[name] = {quarantined = told.quarantined, foreign_pids = told.foreign_pids, unread_s = told.unread_s}
end
for name, entry in pairs(is_new and NOTHING or before_sync.devices) do
  local now = entries[name]
  is_smaller = is_smaller or not now or now.total - now.reserve < entry.total - entry.reserve
end
redis.call('HSET', NODES, args.node, cjson.encode({epoch = meta.epoch, devices = entries, ledger = not ledger.leaves and args.ledger or nil}))
redis.call('HSET', DETAILS, args.node, cjson.encode(details))

-- A row may have been read before the last resize, which the store heard of in between; but none is that old for long. In
-- another epoch the store may have forgotten a later one.
local function is_resized_since(lease)
  return lease.resized_in == whole(meta.epoch) and meta.now - tonumber(lease.resized) < args.ttl_ms
end

-- The same for who answers for it.
local function is_taken_over_since(lease)
  return lease.owned_in == whole(meta.epoch) and meta.now - tonumber(lease.owned) < args.ttl_ms
end

-- What runs is active, with the fence and the shares it runs with, whatever the store believed before.
local function take_in(row, lease)
  local key = lease_key(row.id)
  local is_same = lease and HOLDS[lease.state] and has_fence(lease, row)
  local shares = is_same and is_resized_since(lease) and lease.shares or row.shares
  if lease and OVER[lease.state] then redis.call('PERSIST', key) end
  if lease and lease.state == 'queued' then leave_queue(row.id, lease) end
  if not lease or not lease.holder then
    lease = {holder = row.holder, node = args.node, lease_ttl_ms = whole(row.lease_ttl_ms or 0)}
    redis.call('HSET', key, 'holder', row.holder, 'kind', row.kind or 'job', 'priority', whole(row.priority or 10),
      'node', args.node, 'owner', row.owner, 'preemptible', yes(row.preemptible or row.kind == 'slot'),
      'grace_ms', whole(row.grace_ms or GRACE_MS), 'lease_ttl_ms', lease.lease_ttl_ms, 'order', whole(row.order or 0))
  end
  if not is_same then
    for name in pairs(decoded(row.shares)) do
      if entries[name] and entries[name].settles then redis.call('HSET', key, 'settles', '1') end
    end
  end
  lease.epoch, lease.seq = whole(row.epoch), whole(row.seq)
  redis.call('HSET', key, 'epoch', lease.epoch, 'seq', lease.seq, 'shares', shares, 'observed', row.observed)
  if row.is_owner and lease.owner ~= row.owner and not is_taken_over_since(lease) then
    redis.call('HSET', key, 'owner', row.owner)
  end
  if row.grounds then redis.call('HSET', key, 'grounds', row.grounds) end
  redis.call('HDEL', key, 'adopts', 'reason', 'why')
  redis.call('SADD', HELD, row.id)
  if lease.state ~= 'active' then
    set_state(row.id, lease, 'active')
    announce('active', row.id, lease)
  end
  local is_by_word = tonumber(lease.lease_ttl_ms or 0) > 0
  if not is_by_word or is_new or not is_same or not redis.call('ZSCORE', DEADLINES, row.id) then
    set_deadline(row.id, lease)
  end
end

local last_order = meta.order
for _, row in ipairs(args.rows) do
  if not row.is_over then take_in(row, known[row.id]) end
  -- Whoever asks from now on comes after those who run.
  meta.order = math.max(meta.order, row.order or 0)
end
if meta.order > last_order then write_meta('order', whole(meta.order)) end

expire()
local books = open_books()
if is_smaller then queue().refuse_the_impossible(books) end
queue().pump(books)

local leases = {}
local function add_holder(id)
  local found = redis.call('HMGET', lease_key(id), 'node', 'state', 'epoch', 'seq', 'owner', 'kind', 'priority', 'holder',
    'preemptible', 'grace_ms', 'lease_ttl_ms', 'order', 'shares', 'notice_at')
  if found[1] == args.node then
    table.insert(leases, {
      id = id, state = found[2], epoch = tonumber(found[3] or nil), seq = tonumber(found[4] or nil), owner = found[5],
      kind = found[6], priority = tonumber(found[7]), holder = found[8], preemptible = found[9] == '1',
      grace_ms = tonumber(found[10] or GRACE_MS), lease_ttl_ms = tonumber(found[11] or 0), order = tonumber(found[12] or nil),
      shares = found[13] or nil, notice = found[14] and notice_of(load_lease(id)) or nil,
    })
  end
end
local function add_waiter(id)
  local found = redis.call('HMGET', lease_key(id), 'node', 'owner')
  if found[1] == args.node then table.insert(leases, {id = id, state = 'queued', owner = found[2]}) end
end
for _, id in ipairs(redis.call('SMEMBERS', HELD)) do add_holder(id) end
for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do add_waiter(waiter_of(member)) end
return reply('ok', {leases = leases, over = gone})

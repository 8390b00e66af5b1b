-- Asks for a lease; asking again with the same id gives the same lease.
--
-- ARGV[1]  id, holder, kind (slot, job, service), priority, node, owner (JSON text)
--          options (JSON text): list of {device: bytes}, best first
--          preemptible: whether it yields to more important waiters; a slot always does. Default false
--          grace_ms: from the notice to yield until its holder is ended. Default 30000
--          lease_ttl_ms: how often its holder must renew it by its own word, or it is freed. Default 0: its node does that
--          adopts (JSON text): {device: bytes} that its holder uses already, which count as foreign until it is active
--          order: the place it had in a store that forgot it, optional
-- Reply    ok: lease (granted, queued, or whatever became of it)
--          refused: shortage = [{device: {wanted, cap, total}}], no option fits even the empty devices
local turned_away = enter()
if turned_away then return turned_away end

local known = load_lease(args.id)
if known then
  touch(args.id, known)
  return reply('ok', {lease = view_of(args.id, known)})
end

local books = open_books()
local options = cjson.decode(args.options)
local silent = unsynced_node(options, books)
if silent then return reply('unsynced', {node = silent}) end
if not first_that_could_fit(options, books) then
  return reply('refused', {shortage = shortage(options, books)})
end

-- Orders are unique and rise; they begin at the clock, so that a place kept from an earlier store compares with new ones.
-- Where that store's clock was ahead of this one's, new ones come after it all the same.
local order = args.order or math.max(meta.order + 1, meta.now)
meta.order = math.max(meta.order, order)
local preemptible = args.preemptible or args.kind == 'slot'
local lease = {
  holder = args.holder, kind = args.kind, state = 'queued', priority = whole(args.priority), node = args.node,
  owner = args.owner, order = whole(order), since = whole(meta.server), preemptible = preemptible and '1' or nil,
  grace_ms = args.grace_ms and whole(args.grace_ms), adopts = args.adopts ~= '{}' and args.adopts or nil,
  lease_ttl_ms = (args.lease_ttl_ms or 0) > 0 and whole(args.lease_ttl_ms) or nil,
}

-- Where nobody waits, what fits is granted without standing in the queue first.
if redis.call('ZCARD', QUEUE) == 0 then
  local option = first_that_fits(options, decoded(lease.adopts), books)
  if option then
    hand_over(args.id, lease, option, books, lease)
    return reply('ok', {lease = view_of(args.id, lease)})
  end
end

write_meta('order', whole(meta.order))
put_lease(args.id, lease)
lease.options = args.options
queue().put_options(args.id, lease, options)
redis.call('ZADD', QUEUE, lease.priority, queue_member(args.id, lease))
set_deadline(args.id, lease)
queue().pump(books, args.id)
lease = load_lease(args.id)
if lease.state == 'queued' then announce('queued', args.id, lease) end
return reply('ok', {lease = view_of(args.id, lease)})

-- Asks for a lease; asking again with the same id gives the same lease.
--
-- ARGV[1]  id, holder, kind, priority, node, owner (JSON text), options (JSON text: list of {device: bytes});
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
local order = args.order
if not order then
  local last = tonumber(redis.call('HGET', META, 'order') or '0')
  order = math.max(last + 1, meta.now)
  redis.call('HSET', META, 'order', whole(order))
end
redis.call('HSET', lease_key(args.id), 'holder', args.holder, 'kind', args.kind, 'state', 'queued',
  'priority', whole(args.priority), 'node', args.node, 'owner', args.owner, 'options', args.options,
  'order', whole(order), 'since', whole(meta.server))
redis.call('ZADD', QUEUE, whole(args.priority), queue_member(args.id, {order = order}))
set_deadline(args.id)
pump(books)
return reply('ok', {lease = view_of(args.id, load_lease(args.id))})

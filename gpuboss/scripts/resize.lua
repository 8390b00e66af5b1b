-- Changes what a lease asks for or holds, or its priority. A waiter keeps its order. A holder may shrink, or grow where the
-- memory is free now and nobody of its priority or a more important one waits for it.
--
-- ARGV[1]  id; options (JSON text): list of {device: bytes}, for a holder one, with exactly its devices; optional
--          priority; optional
--          epoch, seq: the fence, needed for a holder
--          revision: of the view that the caller knows, optional. A holder's shares are changed only if that is its revision
--            still, so that a command that comes a second time, late, does nothing
-- Reply    ok: lease
--          refused: shortage, nothing was changed. For a waiter as in acquire; for a holder one option of
--            {device: {wanted, held, free}}, of all its devices and those it asked for (without held: not its device)
--          stale: lease; it is over, or has another fence or revision. Without lease: the store does not know it
-- A holder grows here first and then in its node's books; it shrinks there first.
local turned_away = enter()
if turned_away then return turned_away end

local lease = load_lease(args.id)
if not lease then return reply('stale') end
if OVER[lease.state] then return reply('stale', {lease = view_of(args.id, lease)}) end

local key = lease_key(args.id)
local options = args.options and cjson.decode(args.options)
local priority = args.priority and whole(args.priority)

if lease.state == 'queued' then
  local books = open_books()
  if options then
    local silent = unsynced_node(options, books)
    if silent then return reply('unsynced', {node = silent}) end
    if not first_that_could_fit(options, books) then
      return reply('refused', {shortage = shortage(options, books)})
    end
    if lease.options ~= args.options then
      lease.options = args.options
      queue().put_options(args.id, lease, options)
      redis.call('HSET', key, 'resized_to', args.options)
      redis.call('HDEL', key, 'target', 'kept')
    end
  end
  if priority then
    redis.call('HSET', key, 'priority', priority)
    redis.call('ZADD', QUEUE, priority, queue_member(args.id, lease))
  end
  touch(args.id, lease)
  queue().pump(books)
  return reply('ok', {lease = view_of(args.id, load_lease(args.id))})
end

-- The command of a waiter that its first arrival had granted.
local is_repeated = not args.epoch and options and lease.resized_to == args.options
if is_repeated and (not priority or priority == lease.priority) then
  return reply('ok', {lease = view_of(args.id, lease)})
end
if not args.epoch or not has_fence(lease, args) then return reply('stale', {lease = view_of(args.id, lease)}) end

local held = cjson.decode(lease.shares)
local changes, grows = false, false
if options then
  for name, bytes in pairs(options[1]) do
    changes = changes or bytes ~= held[name]
    grows = grows or bytes > (held[name] or 0)
  end
  for name in pairs(held) do changes = changes or not options[1][name] end
end
if changes and args.revision and args.revision ~= tonumber(lease.revision or 0) then
  return reply('stale', {lease = view_of(args.id, lease)})
end

if changes then
  local books = open_books()
  local observed = decoded(lease.observed)
  -- Who waits for memory has it first: the marks of the queue tell where this holder would pass somebody.
  local desk = grows and queue().pump(books, nil, true)
  local as_waiter = {
    kind = lease.kind, owner = lease.owner, preemptible = lease.preemptible == '1',
    priority = tonumber(priority or lease.priority),
  }
  local room = #options == 1
  local short = {}
  for name in pairs(held) do
    if not options[1][name] then room, short[name] = false, {wanted = 0, held = held[name], free = 0} end
  end
  for name, bytes in pairs(options[1]) do
    local device = books.devices[name]
    local free = device and device.free or 0
    local more = math.max(bytes, observed[name] or 0) - math.max(held[name] or 0, observed[name] or 0)
    local found = desk and desk.marks[name]
    local is_kept = found and found.by.priority <= as_waiter.priority and not queue().may_enter(desk, as_waiter, name)
    short[name] = {wanted = bytes, held = held[name], free = is_kept and 0 or math.max(0, free)}
    -- Not even what it uses already may be claimed afterwards where a device is overfull by it.
    if not held[name] or (bytes > held[name] and (not device or is_kept or math.max(0, more) > free)) then
      room = false
    end
  end
  if not room then return reply('refused', {shortage = {short}}) end
  redis.call('HSET', key, 'shares', cjson.encode(options[1]), 'revision', tonumber(lease.revision or 0) + 1,
    'resized', whole(meta.now), 'resized_in', whole(meta.epoch))
end
if priority then redis.call('HSET', key, 'priority', priority) end
if changes or priority then queue().pump(open_books()) end
return reply('ok', {lease = view_of(args.id, load_lease(args.id))})

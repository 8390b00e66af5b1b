-- Gives back a lease. Its holder says that its processes are dead and its row in the node ledger is gone.
--
-- ARGV[1]  id, epoch, seq (the fence)
-- Reply    ok: state = freed, or what it was before if it was over already
--            (cancelled: a store that had forgotten it and was asked again had it waiting)
--          stale: lease; it was granted under another fence, and nothing was changed
local turned_away = enter()
if turned_away then return turned_away end

local lease = load_for_end(args.id)
if not lease.state then
  -- A store that forgot it: remembered as freed, so that a late command cannot bring it back.
  finish(args.id, {}, 'freed')
  return reply('ok', {state = 'freed'})
end
if OVER[lease.state] then return reply('ok', {state = lease.state}) end
if lease.state == 'queued' then
  finish(args.id, lease, 'cancelled')
  queue().pump(open_books())
  return reply('ok', {state = 'cancelled'})
end
if not has_fence(lease, args) then
  return reply('stale', {lease = view_of(args.id, load_lease(args.id))})
end
finish(args.id, lease, 'freed')
if redis.call('ZCARD', QUEUE) > 0 then queue().pump(open_books()) end
return reply('ok', {state = 'freed'})

-- Its node's books show its holder: from now on it is in use, and no more its asker's to keep alive.
--
-- ARGV[1]  id, epoch, seq (the fence)
-- Reply    ok: state, lease; active, or what it is when it is over already (nothing changed)
--          stale: lease; it waits, or was granted under another fence. Without lease: the store does not know it (what
--            stands in its node's books it learns from them)
local turned_away = enter()
if turned_away then return turned_away end

local lease = load_lease(args.id)
if not lease then return reply('stale') end
if OVER[lease.state] then return reply('ok', {state = lease.state, lease = view_of(args.id, lease)}) end
if lease.state == 'queued' or not has_fence(lease, args) then
  return reply('stale', {lease = view_of(args.id, lease)})
end
if lease.state ~= 'active' then
  set_state(args.id, lease, 'active')
  announce('active', args.id, lease)
  set_deadline(args.id, lease)
end
return reply('ok', {state = lease.state, lease = view_of(args.id, lease)})

-- Another process answers for a held lease from now on: who asked for it is dead, and what uses the memory lives on.
--
-- ARGV[1]  id, epoch, seq (the fence); owner (JSON text)
-- Reply    ok: lease; it keeps its fence, its priority and its notice
--          stale: lease; it waits, is over, or has another fence. Without lease: the store does not know it (what stands in
--            its node's books it learns from them)
local turned_away = enter()
if turned_away then return turned_away end

local lease = load_lease(args.id)
if not lease then return reply('stale') end
if not HOLDS[lease.state] or not has_fence(lease, args) then return reply('stale', {lease = view_of(args.id, lease)}) end
lease.owner = args.owner
redis.call('HSET', lease_key(args.id), 'owner', args.owner, 'owned', whole(meta.now), 'owned_in', whole(meta.epoch))
return reply('ok', {lease = view_of(args.id, lease)})

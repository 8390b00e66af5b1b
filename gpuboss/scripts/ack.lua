-- A holder has heard its notice and is yielding: from now on the notice is not taken back.
--
-- ARGV[1]  id, epoch, seq (the fence)
-- Reply    ok: lease; without notice: it was taken back meanwhile, and the holder may stay
--          stale: lease; it waits, is over, or has another fence. Without lease: the store does not know it
local turned_away = enter()
if turned_away then return turned_away end

local lease = load_lease(args.id)
if not lease then return reply('stale') end
if not HOLDS[lease.state] or not has_fence(lease, args) then return reply('stale', {lease = view_of(args.id, lease)}) end
if lease.notice_at then
  lease.acked = '1'
  redis.call('HSET', lease_key(args.id), 'acked', '1')
end
return reply('ok', {lease = view_of(args.id, lease)})

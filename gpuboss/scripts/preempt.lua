-- A person asks a holder to yield, whether or not it is pre-emptible. Takes the place of a notice for a waiter; the grace
-- that has begun goes on.
--
-- ARGV[1]  id, by (who asks, for people), grace_ms (from now, instead of the lease's own; it can only cut short a grace that
--          has begun; optional)
-- Reply    ok: lease, with its notice
--          over: state, lease; it holds no memory: it waits or is over
--          stale: the store does not know it
local turned_away = enter()
if turned_away then return turned_away end

local lease = load_lease(args.id)
if not lease then return reply('stale') end
if not HOLDS[lease.state] then return reply('over', {state = lease.state, lease = view_of(args.id, lease)}) end
if args.grace_ms then
  local grace = args.grace_ms
  if lease.notice_at and lease.notice_outranks == '1' then
    grace = math.min(grace_of(lease), grace + meta.now - tonumber(lease.notice_at))
  end
  lease.notice_grace = whole(grace)
  redis.call('HSET', lease_key(args.id), 'notice_grace', lease.notice_grace)
end
put_notice(args.id, lease, {by = '', holder = args.by, priority = 0, outranks = true})
return reply('ok', {lease = view_of(args.id, lease)})

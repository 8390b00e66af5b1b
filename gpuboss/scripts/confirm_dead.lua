-- A keeper saw that these leases have no living holder and no row in its node ledger: holders are freed, waiters leave.
--
-- ARGV[1]  leases: list of {id, epoch, seq, state}, without a fence for waiters
--            state: what it was when the keeper looked, optional: one that has been activated since is in use
-- Reply    ok: freed = list of the ids that changed; one granted or re-asserted since the keeper looked is left alone
local turned_away = enter()
if turned_away then return turned_away end

local function is_as_seen(lease, dead)
  return lease and not OVER[lease.state] and has_fence(lease, dead) and (not dead.state or dead.state == lease.state)
end

local freed = {}
for _, dead in ipairs(args.leases) do
  local lease = load_lease(dead.id)
  if is_as_seen(lease, dead) then
    finish(dead.id, lease, lease.state == 'queued' and 'cancelled' or 'freed')
    table.insert(freed, dead.id)
  end
end
if #freed > 0 then queue().pump(open_books()) end
return reply('ok', {freed = freed})

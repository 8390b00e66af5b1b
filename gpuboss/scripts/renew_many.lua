-- Their holders live: keeps leases from expiring, and revives those that had run out of time.
--
-- ARGV[1]  leases: list of {id, epoch, seq} (the fences)
-- Reply    ok: renewed = list of views (look at notice), stale = ids that wait, are over or have another fence,
--            unknown = ids the store does not have
local turned_away = enter()
if turned_away then return turned_away end

local renewed, stale, unknown = {}, {}, {}
for _, told in ipairs(args.leases) do
  local lease = load_lease(told.id)
  if not lease then
    table.insert(unknown, told.id)
  elseif not HOLDS[lease.state] or not has_fence(lease, told) then
    table.insert(stale, told.id)
  else
    revive(told.id, lease)
    table.insert(renewed, view_of(told.id, lease))
  end
end
return reply('ok', {renewed = renewed, stale = stale, unknown = unknown})

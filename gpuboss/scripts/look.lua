-- How leases stand that their asker still wants and that are not active yet: shows them and keeps them from expiring.
--
-- ARGV[1]  ids: list of lease ids
-- Reply    ok: leases = list of views, unknown = list of ids the store does not have
local turned_away = enter()
if turned_away then return turned_away end

local leases, unknown = {}, {}
for _, id in ipairs(args.ids) do
  local lease = load_lease(id)
  if lease then
    touch(id, lease)
    table.insert(leases, view_of(id, lease))
  else
    table.insert(unknown, id)
  end
end
return reply('ok', {leases = leases, unknown = unknown})

-- Gives up a lease that is queued, or granted and not in use. Also one the store does not know: its request may be under
-- way still, and must find itself cancelled when it comes.
--
-- ARGV[1]  id
-- Reply    ok: state = cancelled, or what it was before; active where its node's books show it in use (nothing changed)
local turned_away = enter()
if turned_away then return turned_away end

local lease = load_lease(args.id)
if not lease then
  finish(args.id, {}, 'cancelled')
  return reply('ok', {state = 'cancelled'})
end
if lease.state == 'queued' or lease.state == 'granted' or (lease.state == 'ending' and lease.was == 'granted') then
  finish(args.id, lease, 'cancelled')
  queue().pump(open_books())
end
return reply('ok', {state = lease.state})

-- Lets time pass: expires what nobody asks for, grants what can be granted. Anybody may call it at any time.
--
-- Reply    ok
local turned_away = enter()
if turned_away then return turned_away end

expire()
queue().pump(open_books())
return reply('ok')

-- Everything that `learn` was told and is still known.
--
-- Reply    ok: records = list of records as `learn` replies them
local turned_away = enter()
if turned_away then return turned_away end

local records = {}
for _, text in ipairs(redis.call('HVALS', LEARNED)) do table.insert(records, cjson.decode(text)) end
return reply('ok', {records = records})

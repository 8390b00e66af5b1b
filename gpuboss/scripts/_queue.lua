
-- The queue ---------------------------------------------------------------------------------------------------------

-- What a waiter asks for, besides what cannot be changed. `least`: so much of some one device it needs at the least;
-- `first` is the option it would like best. Both spare long queues a closer look.
local function put_options(id, lease, options)
  local adopts, least = decoded(lease.adopts), FOR_EVER
  for _, option in ipairs(options) do
    local most = 0
    for name, bytes in pairs(option) do most = math.max(most, bytes - (adopts[name] or 0)) end
    least = math.min(least, most)
  end
  redis.call('HSET', lease_key(id), 'options', lease.options, 'least', whole(least), 'first', cjson.encode(options[1]))
  redis.call('ZADD', WANTS, whole(least), wants_member(id, lease.preemptible == '1'))
end

local function grant(desk, waiter, option)
  local lease = load_lease(waiter.id)
  leave_queue(waiter.id, lease)
  redis.call('HDEL', lease_key(waiter.id), 'options', 'least', 'first', 'target', 'kept')
  hand_over(waiter.id, lease, option, desk.books, {})
  for name in pairs(option) do note_change(desk, name) end
end

local function first_open_to(desk, waiter, options)
  for _, option in ipairs(options) do
    local is_open = fits(option, waiter.adopts, desk.books)
    for name in pairs(option) do is_open = is_open and may_enter(desk, waiter, name) end
    if is_open then return option end
  end
end

local function read_place(line, i)
  return {id = waiter_of(line[i]), priority = tonumber(line[i + 1]), order = tonumber(string.sub(line[i], 1, 15))}
end

-- Grants it the first of its options that fits, or does what can be done for one that must wait.
local function serve(desk, waiter)
  local found = redis.call('HMGET', lease_key(waiter.id), 'options', 'adopts', 'target', 'kept', 'least', 'preemptible',
    'kind', 'owner')
  local options = cjson.decode(found[1])
  waiter.adopts, waiter.target, waiter.kept = decoded(found[2]), tonumber(found[3] or nil), tonumber(found[4] or 0)
  waiter.preemptible, waiter.kind, waiter.owner = found[6] == '1', found[7], found[8]
  desk.visited[waiter.id] = true
  if found[4] and waiter.kept <= meta.now then
    redis.call('HDEL', lease_key(waiter.id), 'kept')
    redis.call('ZADD', WANTS, found[5], wants_member(waiter.id, waiter.preemptible))
  end
  local option = first_open_to(desk, waiter, options)
  if option then return grant(desk, waiter, option) end
  make_room(desk, waiter, options)
end

-- The same, for one that can gain nothing.
local function mark_only(desk, waiter)
  local found = redis.call('HMGET', lease_key(waiter.id), 'first', 'kind', 'owner')
  waiter.kind, waiter.owner = found[2], found[3]
  local first = cjson.decode(found[1])
  if not could_ever_fit(first, desk.books) then
    first = first_that_could_fit(cjson.decode(redis.call('HGET', lease_key(waiter.id), 'options')), desk.books)
  end
  for name in pairs(first or NOTHING) do mark(desk, waiter, name, 'loose') end
end

-- The waiters that may gain something: {id: {least, preemptible}}, how many there are, how many of them yield and how many
-- are looked at in any case, since holders yield or have yielded for them (their least is 0), and the least of the others.
local function find_hopeful(desk, all)
  local _, most = reach(desk)
  local hopeful, left = {}, {count = 0, yielding = 0, certain = 0, least = FOR_EVER}
  local function add(id, bytes, preemptible)
    hopeful[id] = {least = bytes, preemptible = preemptible}
    left.count = left.count + 1
    if preemptible then left.yielding = left.yielding + 1 end
    if bytes <= 0 then left.certain = left.certain + 1 else left.least = math.min(left.least, bytes) end
  end
  local found = redis.call('ZRANGE', WANTS, '-inf', all and '+inf' or whole(most), 'BYSCORE', 'WITHSCORES')
  for i = 1, #found, 2 do
    local id = string.sub(found[i], 3)
    add(id, desk.named[id] and 0 or tonumber(found[i + 1]), string.byte(found[i]) == 121)
  end
  for id in pairs(desk.named) do
    if not hopeful[id] and redis.call('HGET', lease_key(id), 'state') == 'queued' then add(id, 0, false) end
  end
  return hopeful, left
end

local function nobody_can_gain(desk, left)
  if left.count == 0 then return true end
  if left.certain > 0 then return false end
  local of_all, of_yielding = reach(desk)
  return left.least > (left.yielding > 0 and of_yielding or of_all)
end

-- Goes down the queue as far as anybody could gain something. True if it ended with the waiter `last`.
local function go_down(desk, last, all)
  load_holders(desk)
  lose_too_important(desk, read_place(redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES'), 1))
  local hopeful, left = find_hopeful(desk, all)
  if last and not hopeful[last] then return true end
  local line = left.count > 0 and redis.call('ZRANGE', QUEUE, 0, -1, 'WITHSCORES') or NOTHING
  for i = 1, #line, 2 do
    local id = waiter_of(line[i])
    local hope = hopeful[id]
    local waiter
    if hope and (hope.least <= 0 or not is_hopeless(desk, hope)) then
      waiter = read_place(line, i)
      lose_too_important(desk, waiter)
    end
    if waiter and (hope.least <= 0 or not is_hopeless(desk, hope)) then
      serve(desk, waiter)
    elseif desk.open > 0 then
      mark_only(desk, waiter or read_place(line, i))
    end
    if hope then
      left.count = left.count - 1
      if hope.preemptible then left.yielding = left.yielding - 1 end
      if hope.least <= 0 then left.certain = left.certain - 1 end
    end
    if id == last then return true end
    if not all and nobody_can_gain(desk, left) then return false end
  end
  return false
end

-- Goes down the queue and grants what can be granted; for the others it sees to it that what they need comes back and is
-- kept for them. `last`: nobody behind this waiter can have gained anything. `all`: for the marks of the whole queue.
-- Returns the desk.
local function pump(books, last, all)
  local desk = open_desk(books)
  if redis.call('ZCARD', QUEUE) == 0 or not go_down(desk, last, all) then withdraw(desk) end
  return desk
end

-- Devices have become fewer or smaller: who asks for more than there will ever be is told so.
local function refuse_the_impossible(books)
  for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
    local id = waiter_of(member)
    local options = cjson.decode(redis.call('HGET', lease_key(id), 'options'))
    if not first_that_could_fit(options, books) and not unsynced_node(options, books) then
      redis.call('HSET', lease_key(id), 'why', cjson.encode(shortage(options, books)))
      finish(id, load_lease(id), 'refused')
    end
  end
end

return {pump = pump, put_options = put_options, refuse_the_impossible = refuse_the_impossible, may_enter = may_enter}

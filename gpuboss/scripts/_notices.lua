
-- Pre-emption: which holders are told to yield, and for whom ---------------------------------------------------------
--
-- All of it is decided while `pump` goes down the queue, on a desk that is made anew each time:
--   marks     {device: {by = the first waiter that wants it, loose, emptying, shut}}, see `mark`
--   spoken    {device: bytes} that waiters so far will get of it once it is emptied
--   firm      {device: bytes} that come back for certain: their holders know that they must yield
--   gain      {device: bytes} of the holders that could be told to yield, to the waiter at hand or a more important one
--   holders   those holders, in the order in which they are told: least important first, slots before jobs, youngest first
--   named     {waiter: the holders that have notice for it}

local FOR_EVER = math.huge

local function before(one, other)
  if one.priority ~= other.priority then return one.priority < other.priority end
  return one.order < other.order
end

-- Slots of one owner: between them their broker decides.
local function are_siblings(one, other)
  return one.kind == 'slot' and other.kind == 'slot' and one.owner == other.owner
end

-- A slot yields to its equals too, when it is idle, which its broker knows. Anybody else yields to who is more important,
-- and to an equal that has waited since before it was let past.
local function may_have(waiter, holder)
  if holder.kind == 'slot' then
    return holder.priority >= waiter.priority and not are_siblings(waiter, holder)
  end
  return holder.preemptible and before(waiter, holder)
end

local function open_desk(books)
  return {
    books = books, open = books.count, marks = {}, spoken = {}, visited = {}, named = {}, own = {}, told = 0,
  }
end

local function is_told_first(one, other)
  if one.priority ~= other.priority then return one.priority > other.priority end
  if one.kind ~= other.kind and (one.kind == 'slot' or other.kind == 'slot') then return one.kind == 'slot' end
  if one.order ~= other.order then return one.order > other.order end
  return one.id < other.id
end

local function is_lost_first(one, other)
  if one.priority ~= other.priority then return one.priority < other.priority end
  if one.last ~= other.last then return one.last < other.last end
  return one.id < other.id
end

local function count_uses(sums, holder, sign)
  for name, bytes in pairs(holder.uses) do sums[name] = (sums[name] or 0) + sign * bytes end
end

-- Something about the device has changed: what can be had at most is looked up anew if it was to be had there.
local function note_change(desk, name)
  if name == desk.top_of_all or name == desk.top_of_yielding then desk.reach_of_all = nil end
end

-- From here on its memory is counted on.
local function make_firm(desk, holder)
  if holder.firm then return end
  holder.firm = true
  desk.told = desk.told + 1
  count_uses(desk.firm, holder, 1)
  if holder.lost then
    desk.reach_of_all = nil
  else
    count_uses(desk.gain, holder, -1)
  end
end

-- Sorts who could yield: once per desk, and only when somebody must wait.
local function load_holders(desk)
  if desk.holders then return end
  desk.holders, desk.firm, desk.gain, desk.at, desk.leaving, desk.next_lost = {}, {}, {}, {}, {}, 1
  for _, holder in ipairs(desk.books.held) do
    holder.last = holder.kind == 'slot' and FOR_EVER or holder.order
    if holder.by and holder.by ~= '' then
      desk.named[holder.by] = desk.named[holder.by] or {}
      table.insert(desk.named[holder.by], holder)
    end
    count_uses(desk.gain, holder, 1)
    if holder.by == '' or holder.acked then
      make_firm(desk, holder)
    else
      table.insert(desk.holders, holder)
      table.insert(desk.leaving, holder)
    end
  end
  table.sort(desk.holders, is_told_first)
  table.sort(desk.leaving, is_lost_first)
  for rank, holder in ipairs(desk.holders) do
    holder.rank = rank
    for name in pairs(holder.uses) do
      desk.at[name] = desk.at[name] or {}
      table.insert(desk.at[name], holder)
    end
  end
end

-- Waiters come in their order, so a holder that this one may not have, no later one may.
local function lose_too_important(desk, waiter)
  local holder = desk.leaving[desk.next_lost]
  while holder and (holder.priority < waiter.priority or
      (holder.priority == waiter.priority and holder.last <= waiter.order)) do
    holder.lost = true
    if not holder.firm then
      count_uses(desk.gain, holder, -1)
      for name in pairs(holder.uses) do note_change(desk, name) end
    end
    desk.next_lost = desk.next_lost + 1
    holder = desk.leaving[desk.next_lost]
  end
end

-- A blocked waiter marks one set of devices. Where nothing can be done for it yet (loose), later ones that would yield to it
-- are let past. Where holders yield for it (emptying) nobody is, and those behind it may have more holders told, for what
-- is left beyond what is spoken for. Where its own broker can make room (shut) nobody is let past, and nobody else is told.
local function mark(desk, waiter, name, how)
  local found = desk.marks[name]
  if not found then
    found = {by = waiter, loose = how == 'loose'}
    desk.marks[name] = found
    desk.open = desk.open - 1
  end
  if how ~= 'loose' then found[how] = true end
  note_change(desk, name)
end

local function lets_past(found, waiter)
  return waiter.preemptible and not are_siblings(found.by, waiter)
end

-- Whether this waiter may be granted memory of the device while others wait for it.
local function may_enter(desk, waiter, name)
  local found = desk.marks[name]
  return not found or (found.loose and not found.emptying and not found.shut and lets_past(found, waiter))
end

-- Whether holders may be told to yield the device's memory to this waiter.
local function may_empty(desk, waiter, name)
  local found = desk.marks[name]
  return not found or (not found.shut and (not found.loose or lets_past(found, waiter)))
end

-- How much of one device any waiter could get at most, and any that would yield. Waiters that want more of every device
-- need no closer look.
local function reach(desk)
  if not desk.reach_of_all then
    local of_all, of_yielding = 0, 0
    desk.top_of_all, desk.top_of_yielding = nil, nil
    for name, device in pairs(desk.books.devices) do
      local found = desk.marks[name]
      if not found or not found.shut then
        local bytes = device.free + (desk.firm[name] or 0) + (desk.gain[name] or 0) - (desk.spoken[name] or 0)
        if bytes > of_all and not (found and found.loose) then of_all, desk.top_of_all = bytes, name end
        if bytes > of_yielding then of_yielding, desk.top_of_yielding = bytes, name end
      end
    end
    desk.reach_of_all, desk.reach_of_yielding = of_all, of_yielding
  end
  return desk.reach_of_all, desk.reach_of_yielding
end

local function is_hopeless(desk, waiter)
  local of_all, of_yielding = reach(desk)
  return waiter.least > (waiter.preemptible and of_yielding or of_all)
end

local function wanted_of(desk, waiter, name, bytes)
  return bytes - adoptable(desk.books.devices[name], waiter.adopts[name], bytes)
end

-- What this option lacks beyond what is free and coming: {device: bytes}. nil where it cannot be emptied for this waiter.
local function missing_for(desk, waiter, option)
  local missing = {}
  for name, bytes in pairs(option) do
    local device = desk.books.devices[name]
    if not device or device.cap < bytes or not may_empty(desk, waiter, name) then return nil end
    local lack = wanted_of(desk, waiter, name, bytes) - device.free - (desk.firm[name] or 0) + (desk.spoken[name] or 0)
    if lack > (desk.gain[name] or 0) then return nil end
    if lack > 0 then missing[name] = lack end
  end
  return missing
end

-- Who could make up for it, those first that have notice already, on account of a waiter that comes later or is gone.
local function candidates_for(desk, waiter, missing)
  local found, seen = {}, {}
  for name in pairs(missing) do
    for _, holder in ipairs(desk.at[name] or NOTHING) do
      if not seen[holder] and not holder.firm and may_have(waiter, holder) then
        seen[holder] = true
        table.insert(found, holder)
      end
    end
  end
  table.sort(found, function(one, other)
    if (one.by ~= false) ~= (other.by ~= false) then return one.by ~= false end
    return one.rank < other.rank
  end)
  return found
end

local function is_enough(missing, extra)
  for name, bytes in pairs(missing) do
    if bytes + (extra and extra.uses[name] or 0) > 0 then return false end
  end
  return true
end

-- Whom to tell so that the option becomes free: the fewest, none where enough is coming; nil where all are not enough.
local function victims_for(desk, waiter, option)
  local missing = missing_for(desk, waiter, option)
  if not missing or not next(missing) then return missing end
  local chosen = {}
  for _, holder in ipairs(candidates_for(desk, waiter, missing)) do
    local helps = false
    for name in pairs(holder.uses) do helps = helps or (missing[name] or 0) > 0 end
    if helps then
      table.insert(chosen, holder)
      for name, bytes in pairs(holder.uses) do missing[name] = missing[name] and missing[name] - bytes end
    end
    if is_enough(missing) then break end
  end
  if not is_enough(missing) then return nil end
  for i = #chosen, 1, -1 do
    if is_enough(missing, chosen[i]) then
      for name, bytes in pairs(table.remove(chosen, i).uses) do missing[name] = missing[name] and missing[name] + bytes end
    end
  end
  return chosen
end

local function tell(desk, waiter, holder)
  waiter.holder = waiter.holder or redis.call('HGET', lease_key(waiter.id), 'holder')
  local notice = {by = waiter.id, holder = waiter.holder, priority = waiter.priority, outranks = before(waiter, holder)}
  put_notice(holder.id, load_lease(holder.id), notice)
  holder.by = waiter.id
  make_firm(desk, holder)
end

local function take_notice_back(id)
  redis.call('HDEL', lease_key(id), 'notice_by', 'notice_holder', 'notice_priority', 'notice_outranks', 'notice_at',
    'notice_grace', 'acked')
  announce('withdrawn', id, load_lease(id))
end

-- Nobody waits any more for what these holders were told to yield, and they have not begun.
local function withdraw(desk)
  if desk.books.noticed == 0 then return end
  load_holders(desk)
  for _, holder in ipairs(desk.holders) do
    if holder.by and not holder.firm then
      if desk.visited[holder.by] or redis.call('HGET', lease_key(holder.by), 'state') ~= 'queued' then
        take_notice_back(holder.id)
      end
    end
  end
end

-- What this waiter gets of the option's devices is spoken for.
local function empty(desk, waiter, option)
  for name, bytes in pairs(option) do
    desk.spoken[name] = (desk.spoken[name] or 0) + wanted_of(desk, waiter, name, bytes)
    mark(desk, waiter, name, 'emptying')
  end
end

-- What a slot's own broker could make room with: other slots of its own. The ledger tells those nothing.
local function own_room(desk, waiter)
  if waiter.kind ~= 'slot' then return nil end
  local known = desk.own[waiter.owner]
  if known and known.priority == waiter.priority and known.told == desk.told then return known.room end
  local own = {}
  for _, holder in ipairs(desk.holders) do
    if not holder.firm and are_siblings(waiter, holder) and holder.priority >= waiter.priority then
      count_uses(own, holder, 1)
    end
  end
  desk.own[waiter.owner] = {priority = waiter.priority, told = desk.told, room = next(own) and own}
  return next(own) and own
end

local function is_enough_of_its_own(desk, waiter, option, own)
  for name, bytes in pairs(option) do
    local device = desk.books.devices[name]
    if not device or device.cap < bytes or not may_empty(desk, waiter, name) then return false end
    local coming = device.free + (desk.firm[name] or 0) - (desk.spoken[name] or 0)
    if coming + (own[name] or 0) < wanted_of(desk, waiter, name, bytes) then return false end
  end
  return true
end

-- An option that is being emptied for it already is kept: its notices are out, or its memory has just been given up.
local function kept_option(desk, waiter, options)
  local option = waiter.target and options[waiter.target]
  if not option or not (desk.named[waiter.id] or waiter.kept > meta.now) then return nil end
  for name, bytes in pairs(option) do
    local device = desk.books.devices[name]
    if not device or device.cap < bytes or not may_empty(desk, waiter, name) then return nil end
  end
  for _, holder in ipairs(desk.named[waiter.id] or NOTHING) do
    for name in pairs(option) do
      if holder.uses[name] and holder.by == waiter.id then make_firm(desk, holder) end
    end
  end
  return option
end

local function mark_all(desk, waiter, option, how)
  for name in pairs(option) do mark(desk, waiter, name, how) end
end

-- Which option shall be emptied for a waiter, and how: the first that can be. A broker that can make room among its own
-- slots is given a while to do so before anybody else is disturbed.
local function choose_option(desk, waiter, options)
  local own = own_room(desk, waiter)
  local is_new = meta.now - waiter.order < OWN_FIRST_MS
  for index, option in ipairs(options) do
    if own and is_new and is_enough_of_its_own(desk, waiter, option, own) then return option, index, 'shut' end
    local chosen = victims_for(desk, waiter, option)
    if chosen then return option, index, 'emptying', chosen end
  end
  local best, index = first_that_could_fit(options, desk.books)
  return best, index, best and own and is_enough_of_its_own(desk, waiter, best, own) and 'shut' or 'loose'
end

-- Does what can be done for a waiter that must wait. Whatever is done, the devices of its best option are marked as long as
-- it waits: were they given to others while another option is tried, it might be passed for ever.
local function make_room(desk, waiter, options)
  load_holders(desk)
  lose_too_important(desk, waiter)
  local option, index, how, chosen = kept_option(desk, waiter, options), waiter.target, 'emptying', nil
  if option then
    chosen = victims_for(desk, waiter, option)
  else
    option, index, how, chosen = choose_option(desk, waiter, options)
  end
  for _, holder in ipairs(chosen or NOTHING) do tell(desk, waiter, holder) end
  if how == 'emptying' then
    if waiter.target ~= index then redis.call('HSET', lease_key(waiter.id), 'target', index) end
    empty(desk, waiter, option)
  else
    for name in pairs(option or NOTHING) do mark(desk, waiter, name, how) end
  end
  for name in pairs(first_that_could_fit(options, desk.books) or NOTHING) do mark(desk, waiter, name, 'loose') end
end

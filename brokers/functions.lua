#!lua name=lingbot1
--[[
Every write to the store. A function checks everything before its first write, because functions do not roll back.

Key layout (region r, partition {pNN}, so that the keys of a call share a slot):
  lb:r:{pNN}:job:<job>           hash, the record. Fields:
      id tenant kind model lane home place state gen attempt created deadline prompt_tokens metadata sealed retention
      pos      content parts (tokens of a text, vectors of inputs) durable in the stream; the truth, since the
               stream's tail may be trimmed
      ctl      control entries written at this pos
      owner    random token of the worker that may write; absent when nobody owns the job
      lease    ms; the owner is taken for lost after it
      cancel   "1" once asked for; outlives every restart
      began    "1" once this owner's engine has worked on the job: only then can it be what killed the owner
      crashes  owners that died over it; strikes, those of them since it last made progress, at pos struck. One that has
               one strike left is suspect: workers try such jobs one at a time
      settled  "1" once its usage is on its tenant's account
      was      the state in which an erased job ended
      start    ms before which it is not published; absent when that is at once
      webhook  sealed: whom to tell of its end; told: tries so far, told_error: what came of the last one
      worker started ended finish usage_prompt usage_completion digest error_code error_message
  lb:r:{pNN}:out:<tenant>:<job>  stream. Entry id <pos>-0 is content, <pos>-n (n >= 1) control; see ARCHITECTURE.md
  lb:r:{pNN}:live                zset of jobs that have not ended or are not settled, by the ms at which the
                                 reconciler looks next
  lb:r:{pNN}:webhooks            zset of jobs whose end is to be told, by the ms of the next try
  lb:r:{pNN}:webhooks:dead       zset of those given up, by the ms at which they were
  lb:r:{pNN}:jobs:<tenant>       zset of a tenant's jobs by creation, or by their start when that is later
  lb:r:{pNN}:idem:<tenant>:<h>   hash of an Idempotency-Key: body (digest), job (id), until (ms; in progress before)
  lb:r:{t<tenant>}:usage:<day>   hash of counters: jobs, prompt_tokens, completion_tokens, and jobs by state
  lb:r:{t<tenant>}:settled       zset of the jobs counted in them, by time

A record whose state is `erased` is a tombstone: it outlives every message of its job.

Replies: an integer >= 0 is success (append, renew: bit 1 = cancel was asked for); otherwise an array whose first
element is a word: FENCED (another owner, or it has ended), UNOWNED (it waits for one: the store may have forgotten a
claim, whose message must not go), GONE (no such record), POS n (the stream stands at n), ...
--]]

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local TERMINAL = { succeeded = true, failed = true, cancelled = true, expired = true, withdrawn = true, erased = true }

-- Deaths of a job's owners before the job is taken for their cause.
local STRIKES, CRASHES = 3, 20

local function get(record, ...)
  return redis.call('HMGET', record, ...)
end

-- Numbers reach a hash as integers: Lua would write 1.6e12 as 1.6e+12.
local function int(n)
  return string.format('%.0f', n)
end

local function control(record, stream, kind, data, now)
  local at = get(record, 'pos', 'ctl')
  local n = tonumber(at[2]) + 1
  redis.call('XADD', stream, at[1] .. '-' .. n, 'k', kind, 'd', data, 'ts', int(now))
  redis.call('HSET', record, 'ctl', n)
end

-- The one way a job ends: record, terminal entry, expiry of both, its webhook due.
local function finish(keys, now, outcome)
  local record, stream, live, webhooks = keys[1], keys[2], keys[3], keys[4]
  local job = get(record, 'id', 'pos', 'retention', 'digest', 'webhook', 'kind')
  local usage = { prompt_tokens = outcome.prompt_tokens, completion_tokens = job[6] == 'text' and tonumber(job[2]) or 0 }
  local data = { status = outcome.state, finish_reason = outcome.reason, usage = usage, digest = job[4] or '' }
  if outcome.error_code then
    data.error = { code = outcome.error_code, message = outcome.error_message }
    redis.call('HSET', record, 'error_code', outcome.error_code, 'error_message', outcome.error_message)
  end
  control(record, stream, 'end', cjson.encode(data), now)
  redis.call('HSET', record, 'state', outcome.state, 'finish', outcome.reason, 'ended', int(now),
    'usage_prompt', usage.prompt_tokens, 'usage_completion', usage.completion_tokens)
  redis.call('HDEL', record, 'owner', 'lease')
  redis.call('PEXPIRE', record, job[3])
  redis.call('PEXPIRE', stream, job[3])
  redis.call('ZADD', live, int(now), job[1]) -- to be settled
  if job[5] then redis.call('ZADD', webhooks, int(now), job[1]) end
end

-- Ends a job that no worker holds: what it used is its prompt if ever a worker read it, and the text that is out.
local function finish_unowned(keys, now, state, error_code, error_message)
  local job = get(keys[1], 'attempt', 'prompt_tokens')
  local prompt = tonumber(job[1]) > 0 and tonumber(job[2]) or 0
  local reason = state == 'failed' and 'error' or state
  finish(keys, now, { state = state, reason = reason, prompt_tokens = prompt,
    error_code = error_code, error_message = error_message })
end

-- One more owner died over this job. True when that is enough.
local function strike(record)
  local job = get(record, 'pos', 'struck', 'strikes', 'crashes')
  local pos, crashes = tonumber(job[1]), tonumber(job[4] or 0) + 1
  local strikes = pos > tonumber(job[2] or -1) and 1 or tonumber(job[3]) + 1
  redis.call('HSET', record, 'struck', pos, 'strikes', strikes, 'crashes', crashes)
  return strikes >= STRIKES or crashes >= CRASHES
end

local function suspect(record)
  local job = get(record, 'pos', 'struck', 'strikes')
  return job[2] == job[1] and tonumber(job[3]) == STRIKES - 1
end

local function end_poisoned(keys, now)
  finish_unowned(keys, now, 'failed', 'poison',
    'The job was given up: workers died over it again and again.')
end

local function owned(record, token)
  local job = get(record, 'state', 'owner', 'pos', 'cancel')
  if not job[1] then return nil, { 'GONE' } end
  if job[1] == 'queued' or job[1] == 'accepted' then return nil, { 'UNOWNED' } end
  if job[1] ~= 'running' or job[2] ~= token then return nil, { 'FENCED' } end
  return { pos = job[3], flags = job[4] and 1 or 0 }
end

local function lease_left(record, now)
  local lease = get(record, 'owner', 'lease')
  if not lease[1] then return 0 end
  return tonumber(lease[2]) - now
end

-- KEYS record stream live webhooks index; ARGV job retention_ms check_ms ttl_ms listed_ms field value ...
-- check_ms: when the reconciler looks, unless the broker's confirm comes first; of a job that starts later, its start.
local function create(keys, args)
  local record, stream, live, index = keys[1], keys[2], keys[3], keys[5]
  local state = redis.call('HGET', record, 'state')
  if state then return { 'EXISTS', state } end
  local now, job, retention, check, ttl, listed = now_ms(), args[1], args[2], args[3], args[4], args[5]
  redis.call('HSET', record, 'state', 'accepted', 'attempt', 0, 'pos', 0, 'ctl', 1, 'retention', retention,
    unpack(args, 6))
  redis.call('XADD', stream, '0-1', 'k', 'accepted', 'd', '{}', 'ts', int(now))
  redis.call('PEXPIRE', record, ttl)
  redis.call('PEXPIRE', stream, ttl)
  redis.call('ZADD', live, int(now + check), job)
  local starts = math.max(now, tonumber(redis.call('HGET', record, 'start') or 0))
  redis.call('ZREMRANGEBYSCORE', index, '-inf', int(now - listed))
  redis.call('ZADD', index, int(starts), job)
  redis.call('PEXPIRE', index, int(math.max(redis.call('PTTL', index), starts - now + listed)))
  return 0
end

-- KEYS record live; ARGV job check_ms. The broker has confirmed: accepted -> queued. Answers the state now.
local function queued(keys, args)
  local job = get(keys[1], 'state', 'deadline')
  if not job[1] then return { 'GONE' } end
  if job[1] ~= 'accepted' then return job[1] end
  redis.call('HSET', keys[1], 'state', 'queued')
  redis.call('ZADD', keys[2], int(math.min(now_ms() + args[2], tonumber(job[2]))), args[1])
  return 'queued'
end

-- KEYS record stream live webhooks index; ARGV job created. The client is about to be told 503: 1 if the job will never
-- run. A record that another request has made under this id since then is that one's.
local function withdraw(keys, args)
  local job = get(keys[1], 'state', 'retention', 'created', 'attempt')
  if not job[1] or job[3] ~= args[2] then return 1 end
  if job[1] ~= 'accepted' or job[4] ~= '0' then return 0 end
  redis.call('HSET', keys[1], 'state', 'withdrawn', 'ended', int(now_ms()))
  redis.call('PEXPIRE', keys[1], job[2])
  redis.call('UNLINK', keys[2])
  redis.call('ZREM', keys[3], args[1])
  redis.call('ZREM', keys[5], args[1])
  return 1
end

-- KEYS record stream live webhooks; ARGV job gen worker token lease_ms.
-- OK pos attempt sealed suspect | GONE | ENDED state | STALE | BUSY ms_left worker | POISON
local function claim(keys, args)
  local record, stream, live = keys[1], keys[2], keys[3]
  local job = get(record, 'state', 'gen', 'deadline', 'cancel', 'worker', 'pos', 'attempt', 'sealed', 'started', 'began',
    'error_code')
  if not job[1] then return { 'GONE' } end
  if job[11] == 'poison' then return { 'POISON' } end -- also when it was the reconciler that gave it up
  if TERMINAL[job[1]] then return { 'ENDED', job[1] } end
  if tonumber(args[2]) < tonumber(job[2]) then return { 'STALE' } end
  local now = now_ms()
  local left = lease_left(record, now)
  if left > 0 then return { 'BUSY', left, job[5] } end
  if job[4] then
    finish_unowned(keys, now, 'cancelled')
    return { 'ENDED', 'cancelled' }
  end
  if now >= tonumber(job[3]) then
    finish_unowned(keys, now, 'expired')
    return { 'ENDED', 'expired' }
  end
  if job[1] == 'running' and job[10] and strike(record) then
    end_poisoned(keys, now)
    return { 'POISON' }
  end
  local attempt = tonumber(job[7]) + 1
  local kind = attempt == 1 and 'started' or 'taken_over'
  control(record, stream, kind, cjson.encode({ worker = args[3], attempt = attempt }), now)
  redis.call('HSET', record, 'state', 'running', 'owner', args[4], 'lease', int(now + args[5]), 'worker', args[3],
    'attempt', attempt, 'started', job[9] or int(now))
  redis.call('HDEL', record, 'began')
  redis.call('ZADD', live, int(now + args[5]), args[1])
  return { 'OK', tonumber(job[6]), attempt, job[8], suspect(record) and 1 or 0 }
end

-- KEYS record; ARGV token. The owner's engine works on the job from here on.
local function begin(keys, args)
  local mine, refusal = owned(keys[1], args[1])
  if not mine then return refusal end
  redis.call('HSET', keys[1], 'began', 1)
  return mine.flags
end

-- KEYS record stream live webhooks; ARGV token. The owner's engine died over this job alone: 0, or POISON, and it is
-- over.
local function struck(keys, args)
  local mine, refusal = owned(keys[1], args[1])
  if not mine then return refusal end
  if not strike(keys[1]) then return 0 end
  end_poisoned(keys, now_ms())
  return { 'POISON' }
end

-- KEYS record; ARGV token lease_ms
local function renew(keys, args)
  local mine, refusal = owned(keys[1], args[1])
  if not mine then return refusal end
  redis.call('HSET', keys[1], 'lease', int(now_ms() + args[2]))
  return mine.flags
end

-- KEYS record stream; ARGV token lease_ms from to digest field value ...
local function append(keys, args)
  local mine, refusal = owned(keys[1], args[1])
  if not mine then return refusal end
  if mine.pos ~= args[3] then return { 'POS', tonumber(mine.pos) } end
  local now = now_ms()
  local id = redis.call('XADD', keys[2], 'NOMKSTREAM', args[4] .. '-0', 'p', args[3], 'h', args[5], 'ts', int(now),
    unpack(args, 6))
  if not id then return { 'GONE' } end
  redis.call('HSET', keys[1], 'pos', args[4], 'ctl', 0, 'digest', args[5], 'lease', int(now + args[2]))
  return mine.flags
end

-- KEYS record stream live webhooks; ARGV token pos state reason prompt_tokens [error_code error_message]
local function done(keys, args)
  local mine, refusal = owned(keys[1], args[1])
  if not mine then return refusal end
  if mine.pos ~= args[2] then return { 'POS', tonumber(mine.pos) } end
  finish(keys, now_ms(), { state = args[3], reason = args[4], prompt_tokens = tonumber(args[5]),
    error_code = args[6], error_message = args[7] })
  return 0
end

-- KEYS record live; ARGV job. Whoever ended the job some seconds ago looks whether the store still knows: 0, or GONE. One
-- that waits for a worker again has lost its claim too, and its message is acknowledged: it is to be published.
local function look(keys, args)
  local state = redis.call('HGET', keys[1], 'state')
  if not state then return { 'GONE' } end
  if state == 'queued' or state == 'accepted' then
    redis.call('HSET', keys[1], 'state', 'accepted')
    redis.call('ZADD', keys[2], int(now_ms()), args[1])
  end
  return 0
end

-- KEYS record live; ARGV job token check_ms. The owner hands the job back; its message returns to the queue.
local function release(keys, args)
  local mine, refusal = owned(keys[1], args[2])
  if not mine then return refusal end
  redis.call('HSET', keys[1], 'state', 'queued')
  redis.call('HDEL', keys[1], 'owner', 'lease', 'began')
  redis.call('ZADD', keys[2], int(now_ms() + args[3]), args[1])
  return 0
end

-- KEYS record stream live webhooks; ARGV hint_channel job. Durable flag first, hint second. Answers the state now.
local function cancel(keys, args)
  local state = redis.call('HGET', keys[1], 'state')
  if not state then return { 'GONE' } end
  if TERMINAL[state] then return state end
  local now = now_ms()
  redis.call('HSET', keys[1], 'cancel', 1)
  if lease_left(keys[1], now) > 0 then
    redis.call('PUBLISH', args[1], args[2])
    return state
  end
  finish_unowned(keys, now, 'cancelled')
  return 'cancelled'
end

-- KEYS record stream live webhooks; ARGV job grace_ms check_ms assume_lost can_publish.
-- What the reconciler does with one job that is due:
-- 0 nothing now | PUBLISH gen sealed | ENDED state | SETTLE tenant state prompt_tokens completion_tokens ended
-- assume_lost "1": the broker was seen to hold no message for a queued job. can_publish "0": the broker is away, and no
-- generation is raised, so that the message there may be is good when it is back. What is to be published is `accepted`
-- until the broker has confirmed it: a publish that fails is tried again.
local function reconcile(keys, args)
  local record, stream, live, id = keys[1], keys[2], keys[3], args[1]
  local job = get(record, 'state', 'gen', 'deadline', 'cancel', 'sealed', 'usage_prompt', 'usage_completion', 'ended',
    'tenant', 'settled', 'began', 'was')
  if job[1] and TERMINAL[job[1]] and job[6] and not job[10] then
    return { 'SETTLE', job[9], job[12] or job[1], job[6], job[7], job[8] }
  end
  if not job[1] or TERMINAL[job[1]] then
    redis.call('ZREM', live, id)
    return 0
  end
  local now = now_ms()
  local left = lease_left(record, now)
  if left > 0 then
    redis.call('ZADD', live, int(now + left), id)
    return 0
  end
  local over = job[4] and 'cancelled' or (now >= tonumber(job[3]) and 'expired')
  if over then
    finish_unowned(keys, now, over)
    return { 'ENDED', over }
  end
  local waits = job[1] == 'queued' and args[4] ~= '1'
  local pause = math.min(tonumber(waits and args[3] or args[2]), tonumber(job[3]) - now)
  redis.call('ZADD', live, int(now + pause), id)
  if waits or args[5] == '0' then return 0 end
  if job[1] == 'running' and job[11] and strike(record) then
    end_poisoned(keys, now)
    return { 'ENDED', 'failed' }
  end
  local gen = tonumber(job[2]) + 1
  redis.call('HSET', record, 'state', 'accepted', 'gen', gen)
  redis.call('HDEL', record, 'owner', 'lease', 'began')
  return { 'PUBLISH', gen, job[5] }
end

-- KEYS live; ARGV limit. Jobs to be looked at now, by the store's clock, which is the one that their times are of.
local function due(keys, args)
  return redis.call('ZRANGEBYSCORE', keys[1], '-inf', int(now_ms()), 'LIMIT', 0, args[1])
end

-- KEYS usage settled; ARGV job state prompt_tokens completion_tokens keep_ms. 1 if counted now, 0 if it was before.
local function account(keys, args)
  if redis.call('ZSCORE', keys[2], args[1]) then return 0 end
  local now = now_ms()
  redis.call('HINCRBY', keys[1], 'jobs', 1)
  redis.call('HINCRBY', keys[1], args[2], 1)
  redis.call('HINCRBY', keys[1], 'prompt_tokens', args[3])
  redis.call('HINCRBY', keys[1], 'completion_tokens', args[4])
  redis.call('PEXPIRE', keys[1], args[5])
  redis.call('ZREMRANGEBYSCORE', keys[2], '-inf', int(now - args[5]))
  redis.call('ZADD', keys[2], int(now), args[1])
  redis.call('PEXPIRE', keys[2], args[5])
  return 1
end

-- KEYS record live; ARGV job. Its usage is on its tenant's account.
local function settled(keys, args)
  if redis.call('EXISTS', keys[1]) == 1 then redis.call('HSET', keys[1], 'settled', 1) end
  redis.call('ZREM', keys[2], args[1])
  return 0
end

-- KEYS record stream live webhooks index; ARGV job keep_ms. Ends the job if need be, and leaves nothing of it but a
-- tombstone that outlives its messages. Its usage stays to be settled; its end is told to nobody.
local function erase(keys, args)
  local record, stream, webhooks, index = keys[1], keys[2], keys[4], keys[5]
  local job = get(record, 'state', 'deadline')
  if not job[1] then return { 'GONE' } end
  if job[1] == 'erased' then return 'erased' end
  local now = now_ms()
  if not TERMINAL[job[1]] then finish_unowned(keys, now, 'cancelled') end
  redis.call('HSET', record, 'was', redis.call('HGET', record, 'state'), 'state', 'erased')
  redis.call('HDEL', record, 'sealed', 'metadata', 'digest', 'error_code', 'error_message', 'owner', 'lease', 'webhook')
  redis.call('UNLINK', stream)
  redis.call('ZREM', webhooks, args[1])
  redis.call('ZREM', index, args[1])
  redis.call('PEXPIRE', record, int(math.max(tonumber(job[2]) - now, 0) + args[2]))
  return 'erased'
end

-- KEYS idem; ARGV body job until_ms keep_ms.
-- 0 it is ours to make | OTHER another body | WAIT ms_left in progress elsewhere | JOB id made, or perhaps made
local function idempotent(keys, args)
  local found = get(keys[1], 'body', 'job', 'until')
  local now = now_ms()
  if not found[1] then
    redis.call('HSET', keys[1], 'body', args[1], 'job', args[2], 'until', int(now + args[3]))
    redis.call('PEXPIRE', keys[1], args[4])
    return 0
  end
  if found[1] ~= args[1] then return { 'OTHER' } end
  local left = tonumber(found[3]) - now
  if left > 0 then return { 'WAIT', left } end
  return { 'JOB', found[2] }
end

-- KEYS idem; ARGV job. Its job has its confirm: whoever asks again gets it at once.
local function answered(keys, args)
  if redis.call('HGET', keys[1], 'job') == args[1] then redis.call('HSET', keys[1], 'until', 0) end
  return 0
end

-- KEYS idem; ARGV job [next_job until_ms]. That job was never made: forget the key, or, when nobody is at it, take it
-- for the next try.
local function unanswered(keys, args)
  local found, now = get(keys[1], 'job', 'until'), now_ms()
  if found[1] ~= args[1] then return 0 end
  if not args[2] then
    redis.call('DEL', keys[1])
    return 1
  end
  if tonumber(found[2]) > now then return 0 end
  redis.call('HSET', keys[1], 'job', args[2], 'until', int(now + args[3]))
  return 1
end

-- KEYS webhooks; ARGV limit lease_ms. Jobs whose end is to be told now; nobody else gets them before the lease is over.
local function told_due(keys, args)
  local now = now_ms()
  local due = redis.call('ZRANGEBYSCORE', keys[1], '-inf', int(now), 'LIMIT', 0, args[1])
  for _, job in ipairs(due) do
    redis.call('ZADD', keys[1], int(now + args[2]), job)
  end
  return due
end

-- KEYS record webhooks dead; ARGV job error retry_ms ("" told, or there is nobody to tell; -1 given up; else try again)
local function told(keys, args)
  local record, webhooks, dead, job = keys[1], keys[2], keys[3], args[1]
  if not redis.call('ZSCORE', webhooks, job) then return 0 end
  local now, keep = now_ms(), redis.call('HGET', record, 'retention')
  local there = redis.call('HEXISTS', record, 'webhook') == 1
  if there then
    redis.call('HINCRBY', record, 'told', 1)
    redis.call('HSET', record, 'told_error', args[2])
  end
  if there and args[3] ~= '' and tonumber(args[3]) >= 0 then
    redis.call('ZADD', webhooks, int(now + args[3]), job)
    return 1
  end
  redis.call('ZREM', webhooks, job)
  if there and args[3] == '-1' then
    redis.call('ZREMRANGEBYSCORE', dead, '-inf', int(now - keep)) -- their records are gone
    redis.call('ZADD', dead, int(now), job)
  end
  return 1
end

-- KEYS record webhooks dead; ARGV job. One that was given up gets all its tries again: 1, or 0 when it was not.
local function tell_again(keys, args)
  if redis.call('HEXISTS', keys[1], 'webhook') == 0 then return 0 end
  if redis.call('ZREM', keys[3], args[1]) == 0 then return 0 end
  redis.call('HDEL', keys[1], 'told')
  redis.call('ZADD', keys[2], int(now_ms()), args[1])
  return 1
end

redis.register_function('lb1_create', create)
redis.register_function('lb1_queued', queued)
redis.register_function('lb1_withdraw', withdraw)
redis.register_function('lb1_claim', claim)
redis.register_function('lb1_renew', renew)
redis.register_function('lb1_append', append)
redis.register_function('lb1_finish', done)
redis.register_function('lb1_release', release)
redis.register_function('lb1_look', look)
redis.register_function('lb1_cancel', cancel)
redis.register_function('lb1_due', due)
redis.register_function('lb1_reconcile', reconcile)
redis.register_function('lb1_begin', begin)
redis.register_function('lb1_struck', struck)
redis.register_function('lb1_account', account)
redis.register_function('lb1_settled', settled)
redis.register_function('lb1_erase', erase)
redis.register_function('lb1_idempotent', idempotent)
redis.register_function('lb1_answered', answered)
redis.register_function('lb1_unanswered', unanswered)
redis.register_function('lb1_told_due', told_due)
redis.register_function('lb1_told', told)
redis.register_function('lb1_tell_again', tell_again)

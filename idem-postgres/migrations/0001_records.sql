-- Version 1: records in day partitions, and the functions that decide on them.
--
-- Every name is qualified by the schema, which takes the place of {schema}; {lock} is the number of its advisory lock.

CREATE TYPE {schema}.state AS ENUM ('in progress', 'failed', 'completed');
CREATE TYPE {schema}.origin AS ENUM ('fresh', 'retry', 'takeover');

-- The one row that says into which day's partition records are written, the longest retention that a process was ever set
-- up for, and by how much tests have moved the clock.
CREATE TABLE {schema}.epoch (
    only_row bool PRIMARY KEY DEFAULT true CHECK (only_row),
    day date NOT NULL,
    longest interval NOT NULL DEFAULT '0',
    shift interval NOT NULL DEFAULT '0'
);

-- The partitions there are. One that is closed is written no more, and its records have all expired at the time given.
CREATE TABLE {schema}.partitions (
    day date PRIMARY KEY,
    name name NOT NULL,
    expires_at timestamptz
);

-- No CHECK constraints: the server would parse each anew for every statement, which takes longer than the insert.
CREATE TABLE {schema}.records (
    day date NOT NULL,
    scope text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    state {schema}.state NOT NULL,
    attempt int NOT NULL,
    token uuid NOT NULL,
    fingerprint bytea,
    origin {schema}.origin NOT NULL,
    previous_token uuid,
    previous_attempt int,
    previous_started_at timestamptz,
    retention interval NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    lease_until timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    failure text,
    code int,
    withheld smallint,
    headers bytea,
    body bytea,
    -- The id first: it tells more at the first look.
    PRIMARY KEY (id, scope, day)
) PARTITION BY RANGE (day);

-- Bodies are compressed already or not worth it.
ALTER TABLE {schema}.records ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE {schema}.records ALTER COLUMN headers SET STORAGE EXTERNAL;

-- For people: what is known of a key, without its result.
CREATE VIEW {schema}.overview AS
SELECT r.scope, r.id, r.state, r.attempt, r.origin, r.created_at, r.started_at, r.updated_at, r.lease_until, r.expires_at,
       r.code, length(r.body) AS body_bytes, r.withheld, r.failure, r.day
FROM {schema}.records r
WHERE r.expires_at > clock_timestamp() + (SELECT e.shift FROM {schema}.epoch e);

-- What `reserve` answers.
--
-- It is sent as it is, and has a name: for so many columns, a projection or the description of an unnamed row, which the
-- server sets up for every statement, takes as long as the insert.
CREATE TYPE {schema}.answer AS (
    acquired int[],
    -- The call's place in the batch, from 1.
    place int,
    -- 'acquired', 'in progress', 'completed', 'abandoned', 'mismatch' or 'lease lost'.
    verdict text,
    -- The time of the answer.
    now timestamptz,
    -- The record.
    state text,
    attempt int,
    token uuid,
    fingerprint bytea,
    origin text,
    previous_token uuid,
    previous_attempt int,
    previous_started_at timestamptz,
    retention interval,
    created_at timestamptz,
    started_at timestamptz,
    updated_at timestamptz,
    lease_until timestamptz,
    expires_at timestamptz,
    failure text,
    code int,
    withheld smallint,
    headers bytea,
    body bytea
);

-- Writes a record in the epoch day's partition, wherever the one that it replaces was.
CREATE FUNCTION {schema}.put(was date, r {schema}.records)
RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF was IS DISTINCT FROM r.day THEN
        DELETE FROM {schema}.records o WHERE o.scope = r.scope AND o.id = r.id AND o.day = was;
        INSERT INTO {schema}.records SELECT r.*;
        RETURN;
    END IF;
    UPDATE {schema}.records o
    SET state = r.state, attempt = r.attempt, token = r.token, fingerprint = r.fingerprint, origin = r.origin,
        previous_token = r.previous_token, previous_attempt = r.previous_attempt,
        previous_started_at = r.previous_started_at, retention = r.retention, created_at = r.created_at,
        started_at = r.started_at, updated_at = r.updated_at, lease_until = r.lease_until, expires_at = r.expires_at,
        failure = r.failure, code = r.code, withheld = r.withheld, headers = r.headers, body = r.body
    WHERE o.scope = r.scope AND o.id = r.id AND o.day = r.day;
END
$$;

-- `reserve` and `settle` begin alike. With the lock, nobody changes the day until the transaction is over, and the
-- epoch row that is read behind the lock is of a snapshot taken after it: without this, a key could be reserved in two
-- days' partitions. From then on they wait for others' transactions no longer than p_patience, if that is given.
--
-- Both get the calls of a batch in the order of id and scope, so that two batches wait for each other in one direction
-- only.

-- Reserves the keys of a batch. Durations are in microseconds.
--
-- The first row answers for all keys that were absent: its `acquired` holds their places in the batch, from 1. Then comes
-- a row for each of the others.
CREATE FUNCTION {schema}.reserve(
    p_scopes text[], p_ids text[], p_tokens uuid[], p_fingerprints bytea[], p_leases bigint[], p_retentions bigint[],
    p_refusals bool[], p_patience text
)
RETURNS SETOF {schema}.answer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    v_day date;
    v_now timestamptz;
    v_set text;
    answer {schema}.answer;
    v_scopes text[];
    v_ids text[];
    v_tokens uuid[];
    v_next int := 1;
    v_acquired int[] := '{}';
    v_rest int[];
    v_place int;
BEGIN
    -- A statement that sees by the snapshot of its transaction's beginning would not see what others have reserved since.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RETURN;
    END IF;
    v_set := pg_advisory_xact_lock_shared({lock})::text;
    SELECT e.day, clock_timestamp() + e.shift INTO STRICT v_day, v_now FROM {schema}.epoch e;
    IF p_patience IS NOT NULL THEN
        v_set := set_config('lock_timeout', p_patience, true);
    END IF;
    IF cardinality(p_ids) = 1 THEN
        -- A key that comes alone, without the machinery of a set. Only its own record is a duplicate: the violation of
        -- another unique index, which somebody may add, is an error.
        INSERT INTO {schema}.records (day, scope, id, state, attempt, token, fingerprint, origin, retention,
            created_at, started_at, updated_at, lease_until, expires_at)
        SELECT v_day, p_scopes[1], p_ids[1], 'in progress', 1, p_tokens[1], p_fingerprints[1], 'fresh',
            p_retentions[1] * interval '1 us', v_now, v_now, v_now, v_now + p_leases[1] * interval '1 us',
            v_now + p_retentions[1] * interval '1 us'
        WHERE NOT EXISTS (
            SELECT FROM {schema}.records r WHERE r.scope = p_scopes[1] AND r.id = p_ids[1] AND r.day < v_day OFFSET 0
        )
        ON CONFLICT (id, scope, day) DO NOTHING;
        IF FOUND THEN
            answer.acquired := '{1}';
            RETURN NEXT answer;
            RETURN;
        END IF;
        RETURN NEXT {schema}.reserve_one(v_day, v_now, 1, p_scopes[1], p_ids[1], p_tokens[1], p_fingerprints[1],
            p_leases[1] * interval '1 us', p_retentions[1] * interval '1 us', p_refusals[1]);
        RETURN;
    END IF;
    WITH inserted AS (
        INSERT INTO {schema}.records AS n (day, scope, id, state, attempt, token, fingerprint, origin, retention,
            created_at, started_at, updated_at, lease_until, expires_at)
        SELECT v_day, u.scope, u.id, 'in progress', 1, u.token, u.fingerprint, 'fresh', u.retention * interval '1 us',
            v_now, v_now, v_now, v_now + u.lease * interval '1 us', v_now + u.retention * interval '1 us'
        FROM unnest(p_scopes, p_ids, p_tokens, p_fingerprints, p_leases, p_retentions)
            AS u(scope, id, token, fingerprint, lease, retention)
        -- The epoch day's partition has a unique index; the older ones are looked through, key by key: without the OFFSET
        -- it would be a join, for which a plan that was made while they were empty reads them from end to end.
        WHERE NOT EXISTS (
            SELECT FROM {schema}.records r WHERE r.scope = u.scope AND r.id = u.id AND r.day < v_day OFFSET 0
        )
        ON CONFLICT (id, scope, day) DO NOTHING
        RETURNING n.scope, n.id, n.token
    )
    SELECT array_agg(i.scope), array_agg(i.id), array_agg(i.token) INTO v_scopes, v_ids, v_tokens FROM inserted i;
    IF cardinality(v_ids) = cardinality(p_ids) THEN
        answer.acquired := ARRAY(SELECT generate_series(1, cardinality(p_ids)));
        RETURN NEXT answer;
        RETURN;
    END IF;
    -- Which these are: they come in the order of the batch. By key and token, since a caller may use one token for several
    -- keys.
    FOR v_place IN 1 .. cardinality(p_ids) LOOP
        IF v_tokens[v_next] = p_tokens[v_place] AND v_ids[v_next] = p_ids[v_place] AND v_scopes[v_next] = p_scopes[v_place]
        THEN
            v_next := v_next + 1;
            v_acquired := v_acquired || v_place;
        ELSE
            v_rest := v_rest || v_place;
        END IF;
    END LOOP;
    answer.acquired := v_acquired;
    RETURN NEXT answer;
    -- A completed record is final, so it needs no lock. Key by key, as above.
    FOR answer IN
        SELECT NULL::int[], u.place, 'completed'::text, v_now, r.state::text, r.attempt, r.token, r.fingerprint,
            r.origin::text, r.previous_token, r.previous_attempt, r.previous_started_at, r.retention, r.created_at,
            r.started_at, r.updated_at, r.lease_until, r.expires_at, r.failure, r.code, r.withheld, r.headers, r.body
        FROM unnest(v_rest) AS u(place)
        CROSS JOIN LATERAL (
            SELECT o.* FROM {schema}.records o
            WHERE o.scope = p_scopes[u.place] AND o.id = p_ids[u.place] AND o.state = 'completed' AND o.expires_at > v_now
            OFFSET 0
        ) r
    LOOP
        v_rest := array_remove(v_rest, answer.place);
        IF answer.fingerprint <> p_fingerprints[answer.place] THEN
            answer.verdict := 'mismatch';
            -- Not the caller's to see.
            answer.headers := NULL;
            answer.body := NULL;
        END IF;
        RETURN NEXT answer;
    END LOOP;
    FOREACH v_place IN ARRAY v_rest LOOP
        RETURN NEXT {schema}.reserve_one(v_day, v_now, v_place, p_scopes[v_place], p_ids[v_place], p_tokens[v_place],
            p_fingerprints[v_place], p_leases[v_place] * interval '1 us', p_retentions[v_place] * interval '1 us',
            p_refusals[v_place]);
    END LOOP;
END
$$;

-- Reserves a key that was not absent a moment ago: the whole table of the contract.
CREATE FUNCTION {schema}.reserve_one(
    v_day date, v_now timestamptz, v_place int, v_scope text, v_id text, v_token uuid, v_fingerprint bytea,
    v_lease interval, v_retention interval, v_refuse bool
)
RETURNS {schema}.answer
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_was date;
    a {schema}.answer;
    v_locked bool := false;
BEGIN
    -- What changes nothing takes no lock: a lock takes a transaction id, whose commit waits for the disk. The rest is
    -- decided once more behind the lock.
    LOOP
        SELECT NULL::int[], v_place, NULL::text, v_now, o.state::text, o.attempt, o.token, o.fingerprint, o.origin::text,
            o.previous_token, o.previous_attempt, o.previous_started_at, o.retention, o.created_at, o.started_at, o.updated_at,
            o.lease_until, o.expires_at, o.failure, o.code, o.withheld, o.headers, o.body
        INTO a
        FROM {schema}.records o
        WHERE o.scope = v_scope AND o.id = v_id;
        IF a.expires_at > v_now THEN
            IF a.fingerprint <> v_fingerprint THEN
                a.verdict := 'mismatch';
                a.headers := NULL;
                a.body := NULL;
                RETURN a;
            END IF;
            IF a.state = 'completed' THEN
                a.verdict := 'completed';
                RETURN a;
            END IF;
            IF a.state = 'in progress' AND a.token <> v_token AND a.lease_until > v_now THEN
                a.verdict := 'in progress';
                RETURN a;
            END IF;
        END IF;
        EXIT WHEN v_locked;
        SELECT o.day INTO v_was FROM {schema}.records o WHERE o.scope = v_scope AND o.id = v_id FOR UPDATE;
        v_locked := FOUND;
        CONTINUE WHEN v_locked;
        -- It has gone since, or has been moved to the epoch day's partition.
        INSERT INTO {schema}.records (day, scope, id, state, attempt, token, fingerprint, origin, retention,
            created_at, started_at, updated_at, lease_until, expires_at)
        VALUES (v_day, v_scope, v_id, 'in progress', 1, v_token, v_fingerprint, 'fresh', v_retention,
            v_now, v_now, v_now, v_now + v_lease, v_now + v_retention)
        ON CONFLICT (id, scope, day) DO NOTHING;
        -- Then it is found in progress, with this call's token.
        v_locked := FOUND;
    END LOOP;
    IF a.expires_at > v_now THEN
        IF a.state = 'failed' AND a.token = v_token THEN
            a.verdict := 'lease lost';
            RETURN a;
        END IF;
        IF a.state = 'in progress' AND a.token = v_token THEN
            a.verdict := 'acquired';
            RETURN a;
        END IF;
        IF a.state = 'in progress' AND v_refuse THEN
            a.verdict := 'abandoned';
            RETURN a;
        END IF;
    END IF;
    IF a.expires_at <= v_now THEN
        a.attempt := 1;
        a.origin := 'fresh';
        a.fingerprint := v_fingerprint;
        a.created_at := v_now;
        a.previous_token := NULL;
        a.previous_attempt := NULL;
        a.previous_started_at := NULL;
    ELSIF a.state = 'failed' THEN
        a.attempt := a.attempt + 1;
        a.origin := 'retry';
        a.previous_token := NULL;
        a.previous_attempt := NULL;
        a.previous_started_at := NULL;
    ELSE
        a.previous_token := a.token;
        a.previous_attempt := a.attempt;
        a.previous_started_at := a.started_at;
        a.attempt := a.attempt + 1;
        a.origin := 'takeover';
    END IF;
    a.verdict := 'acquired';
    a.state := 'in progress';
    a.token := v_token;
    a.retention := v_retention;
    a.started_at := v_now;
    a.updated_at := v_now;
    a.lease_until := v_now + v_lease;
    a.expires_at := v_now + v_retention;
    a.failure := NULL;
    a.code := NULL;
    a.withheld := NULL;
    a.headers := NULL;
    a.body := NULL;
    PERFORM {schema}.put(v_was, (v_day, v_scope, v_id, a.state, a.attempt, a.token, a.fingerprint, a.origin,
        a.previous_token, a.previous_attempt, a.previous_started_at, a.retention, a.created_at, a.started_at, a.updated_at,
        a.lease_until, a.expires_at, a.failure, a.code, a.withheld, a.headers, a.body)::{schema}.records);
    RETURN a;
END
$$;

-- The calls of a batch under a lease. The kinds: 'c' completes, 'f' fails, 'r' renews.
-- Durations, in microseconds, are the retention, and for a renewal the extension.
--
-- Answers a letter for each call: 'o' is ok, 'l' lease lost, 'c' already completed.
CREATE FUNCTION {schema}.settle(
    p_kinds "char"[], p_scopes text[], p_ids text[], p_tokens uuid[], p_durations bigint[], p_codes int[],
    p_withhelds smallint[], p_headers bytea[], p_bodies bytea[], p_failures text[], p_patience text
)
RETURNS text
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    v_day date;
    v_now timestamptz;
    v_set text;
    v_places bigint[];
    v_next int := 1;
    v_verdicts text := '';
BEGIN
    -- A statement that sees by the snapshot of its transaction's beginning would not see what others have reserved since.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RETURN NULL;
    END IF;
    v_set := pg_advisory_xact_lock_shared({lock})::text;
    SELECT e.day, clock_timestamp() + e.shift INTO STRICT v_day, v_now FROM {schema}.epoch e;
    IF p_patience IS NOT NULL THEN
        v_set := set_config('lock_timeout', p_patience, true);
    END IF;
    -- What is to be expected: completes of this day's records. First of one alone, without the machinery of a set.
    IF cardinality(p_ids) = 1 THEN
        IF p_kinds[1] = 'c' THEN
            UPDATE {schema}.records r
            SET state = 'completed', code = p_codes[1], withheld = p_withhelds[1], headers = p_headers[1],
                body = p_bodies[1], updated_at = v_now, retention = p_durations[1] * interval '1 us',
                expires_at = v_now + p_durations[1] * interval '1 us'
            WHERE r.scope = p_scopes[1] AND r.id = p_ids[1] AND r.day = v_day
                AND r.token = p_tokens[1] AND r.state = 'in progress' AND r.expires_at > v_now;
            IF FOUND THEN
                RETURN 'o';
            END IF;
        END IF;
        RETURN {schema}.settle_one(v_day, v_now, p_kinds[1], p_scopes[1], p_ids[1], p_tokens[1],
            p_durations[1] * interval '1 us', p_codes[1], p_withhelds[1], p_headers[1], p_bodies[1], p_failures[1]);
    END IF;
    WITH updated AS (
        UPDATE {schema}.records r
        SET state = 'completed', code = u.code, withheld = u.withheld, headers = u.headers, body = u.body,
            updated_at = v_now, retention = u.duration * interval '1 us',
            expires_at = v_now + u.duration * interval '1 us'
        FROM unnest(p_kinds, p_scopes, p_ids, p_tokens, p_durations, p_codes, p_withhelds, p_headers, p_bodies)
            WITH ORDINALITY AS u(kind, scope, id, token, duration, code, withheld, headers, body, place)
        -- Key by key, as in `reserve`. One that somebody changes meanwhile is judged by what it has become.
        CROSS JOIN LATERAL (
            SELECT o.ctid AS at FROM {schema}.records o WHERE o.scope = u.scope AND o.id = u.id AND o.day = v_day OFFSET 0
        ) o
        WHERE u.kind = 'c' AND r.ctid = o.at AND r.day = v_day
            AND r.token = u.token AND r.state = 'in progress' AND r.expires_at > v_now
        RETURNING u.place
    )
    SELECT array_agg(u.place) INTO v_places FROM updated u;
    IF cardinality(v_places) = cardinality(p_ids) THEN
        RETURN repeat('o', cardinality(p_ids));
    END IF;
    FOR v_place IN 1 .. cardinality(p_ids) LOOP
        -- They come in the order of the batch.
        IF v_places[v_next] = v_place THEN
            v_next := v_next + 1;
            v_verdicts := v_verdicts || 'o';
        ELSE
            v_verdicts := v_verdicts || {schema}.settle_one(v_day, v_now, p_kinds[v_place], p_scopes[v_place],
                p_ids[v_place], p_tokens[v_place], p_durations[v_place] * interval '1 us', p_codes[v_place], p_withhelds[v_place],
                p_headers[v_place], p_bodies[v_place], p_failures[v_place]);
        END IF;
    END LOOP;
    RETURN v_verdicts;
END
$$;

-- One call under a lease: the rest of the contract. Answers its letter.
CREATE FUNCTION {schema}.settle_one(
    v_day date, v_now timestamptz, v_kind "char", v_scope text, v_id text, v_token uuid, v_duration interval,
    v_code int, v_withheld smallint, v_headers bytea, v_body bytea, v_failure text
)
RETURNS text
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    r {schema}.records;
    was date;
BEGIN
    -- Once more when it is not found: it may have been moved to the epoch day's partition while its lock was waited for.
    FOR v_look IN 1 .. 2 LOOP
        SELECT * INTO r FROM {schema}.records o WHERE o.scope = v_scope AND o.id = v_id FOR UPDATE;
        EXIT WHEN FOUND;
    END LOOP;
    -- Not `FOUND`, which the loop has set.
    IF r.token IS NULL OR r.expires_at <= v_now OR r.token <> v_token THEN
        RETURN 'l';
    END IF;
    IF r.state = 'completed' THEN
        IF v_kind = 'c' AND (r.code, r.withheld, r.headers, r.body)
            IS NOT DISTINCT FROM (v_code, v_withheld, v_headers, v_body)
        THEN
            RETURN 'o';
        END IF;
        RETURN 'c';
    END IF;
    IF r.state = 'failed' THEN
        IF v_kind = 'f' AND r.failure = v_failure THEN
            RETURN 'o';
        END IF;
        RETURN 'l';
    END IF;
    was := r.day;
    r.day := v_day;
    r.updated_at := v_now;
    IF v_kind = 'r' THEN
        IF r.lease_until >= v_now + v_duration THEN
            RETURN 'o';
        END IF;
        r.lease_until := v_now + v_duration;
        r.expires_at := greatest(r.expires_at, r.lease_until);
    ELSE
        r.retention := v_duration;
        r.expires_at := v_now + v_duration;
        IF v_kind = 'c' THEN
            r.state := 'completed';
            r.code := v_code;
            r.withheld := v_withheld;
            r.headers := v_headers;
            r.body := v_body;
        ELSE
            r.state := 'failed';
            r.failure := v_failure;
        END IF;
    END IF;
    PERFORM {schema}.put(was, r);
    RETURN 'o';
END
$$;

-- Makes the partition of a day and attaches it, without blocking callers: attaching locks the parent against other
-- changes of its partitions only.
CREATE FUNCTION {schema}.make_partition(v_day date)
RETURNS bool
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_name name := 'records_' || pg_catalog.to_char(v_day, 'YYYYMMDD');
BEGIN
    IF EXISTS (SELECT FROM {schema}.partitions p WHERE p.day = v_day) THEN
        RETURN false;
    END IF;
    EXECUTE pg_catalog.format(
        'CREATE TABLE {schema}.%I (LIKE {schema}.records INCLUDING DEFAULTS INCLUDING STORAGE) '
        -- Room for the outcomes: a completed record stays on its page, and its index entries need no change.
        'WITH (fillfactor = 30)', v_name);
    EXECUTE pg_catalog.format(
        'ALTER TABLE {schema}.records ATTACH PARTITION {schema}.%I FOR VALUES FROM (%L) TO (%L)', v_name, v_day, v_day + 1);
    INSERT INTO {schema}.partitions (day, name) VALUES (v_day, v_name);
    RETURN true;
END
$$;

-- The day by the database's clock, in UTC.
CREATE FUNCTION {schema}.today()
RETURNS date
LANGUAGE sql STABLE
AS $$
    SELECT ((pg_catalog.clock_timestamp() + coalesce((SELECT e.shift FROM {schema}.epoch e), '0')) AT TIME ZONE 'UTC')::date
$$;

-- Changes the day to a later one, if it is not there yet: alone, since the lock keeps out everybody who writes. The
-- partition is there already. The days before are closed: what they hold has expired after the longest retention, or lease,
-- that anybody could ask for until now. An hour more is for a clock that is set back meanwhile.
CREATE FUNCTION {schema}.change_day(v_day date)
RETURNS bool
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_end timestamptz;
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock({lock});
    UPDATE {schema}.epoch e SET day = v_day WHERE e.day < v_day;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT pg_catalog.clock_timestamp() + e.shift + greatest(e.longest, interval '24 hours') + interval '1 hour'
    INTO v_end FROM {schema}.epoch e;
    UPDATE {schema}.partitions p SET expires_at = v_end WHERE p.day < v_day AND p.expires_at IS NULL;
    RETURN true;
END
$$;

SELECT {schema}.make_partition({schema}.today());
SELECT {schema}.make_partition({schema}.today() + 1);
INSERT INTO {schema}.epoch (day) VALUES ({schema}.today());

-- Maintenance. Nothing of it lives in a session, which may be another client's a moment later behind a pooler.

-- Who does the maintenance, and how long the others leave it to it, by the database's own clock.
CREATE TABLE {schema}.maintenance (
    only_row bool PRIMARY KEY DEFAULT true CHECK (only_row),
    leader uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    until timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO {schema}.maintenance DEFAULT VALUES;

-- Becomes or stays the one who does the maintenance, unless another is. In a transaction with a step of it, the row's lock
-- keeps others out until that step is done.
CREATE FUNCTION {schema}.lead(p_leader uuid, p_for interval)
RETURNS bool
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    UPDATE {schema}.maintenance m
    SET leader = p_leader, until = pg_catalog.clock_timestamp() + p_for
    WHERE m.leader = p_leader OR m.until <= pg_catalog.clock_timestamp();
    RETURN FOUND;
END
$$;

-- Drops the partition of a day that is over, once it is detached.
CREATE FUNCTION {schema}.drop_partition(v_name name)
RETURNS bool
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF EXISTS (
        SELECT FROM pg_catalog.pg_inherits i
        JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
        WHERE c.relname = v_name AND c.relnamespace = '{schema}'::regnamespace
    ) THEN
        RETURN false;
    END IF;
    EXECUTE pg_catalog.format('DROP TABLE IF EXISTS {schema}.%I', v_name);
    DELETE FROM {schema}.partitions p WHERE p.name = v_name;
    RETURN FOUND;
END
$$;

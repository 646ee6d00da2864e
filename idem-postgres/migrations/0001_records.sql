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

-- What the functions answer for one call. For a reserve: 'acquired', 'in progress', 'completed', 'abandoned', 'mismatch',
-- 'lease lost'. For a call under a lease: 'ok', 'lease lost', 'already completed'.
CREATE TYPE {schema}.verdict AS ENUM (
    'acquired', 'in progress', 'completed', 'abandoned', 'mismatch', 'lease lost', 'already completed', 'ok'
);

CREATE TYPE {schema}.answer AS (
    -- The call's place in the batch, from 1.
    place int,
    verdict {schema}.verdict,
    -- The time of the answer.
    now timestamptz,
    record {schema}.records
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

-- `reserve` and `settle` begin alike. With the first step nobody changes the day until the transaction is over, and the
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
    p_refusals bool[], p_patience text,
    OUT acquired int[], OUT answer {schema}.answer
)
RETURNS SETOF record
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
    v_hit record;
    v_old {schema}.records;
    v_scopes text[];
    v_ids text[];
    v_tokens uuid[];
    v_next int := 1;
    v_rest int[];
    v_place int;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({lock});
    SELECT e.day, clock_timestamp() + e.shift INTO STRICT v_day, v_now FROM {schema}.epoch e;
    IF p_patience IS NOT NULL THEN
        v_set := set_config('lock_timeout', p_patience, true);
    END IF;
    IF cardinality(p_ids) = 1 THEN
        -- A key that comes alone, without the machinery of a set.
        PERFORM FROM {schema}.records r WHERE r.scope = p_scopes[1] AND r.id = p_ids[1] AND r.day < v_day;
        IF NOT FOUND THEN
            INSERT INTO {schema}.records (day, scope, id, state, attempt, token, fingerprint, origin, retention,
                created_at, started_at, updated_at, lease_until, expires_at)
            VALUES (v_day, p_scopes[1], p_ids[1], 'in progress', 1, p_tokens[1], p_fingerprints[1], 'fresh',
                p_retentions[1] * interval '1 us', v_now, v_now, v_now, v_now + p_leases[1] * interval '1 us',
                v_now + p_retentions[1] * interval '1 us')
            ON CONFLICT (id, scope, day) DO NOTHING;
            IF FOUND THEN
                acquired := '{1}';
                RETURN NEXT;
                RETURN;
            END IF;
        END IF;
        SELECT * INTO answer FROM {schema}.reserve_one(v_day, v_now, 1, p_scopes[1], p_ids[1], p_tokens[1],
            p_fingerprints[1], p_leases[1] * interval '1 us', p_retentions[1] * interval '1 us', p_refusals[1]);
        RETURN NEXT;
        RETURN;
    END IF;
    WITH inserted AS (
        INSERT INTO {schema}.records (day, scope, id, state, attempt, token, fingerprint, origin, retention,
            created_at, started_at, updated_at, lease_until, expires_at)
        SELECT v_day, u.scope, u.id, 'in progress', 1, u.token, u.fingerprint, 'fresh', u.retention * interval '1 us',
            v_now, v_now, v_now, v_now + u.lease * interval '1 us', v_now + u.retention * interval '1 us'
        FROM unnest(p_scopes, p_ids, p_tokens, p_fingerprints, p_leases, p_retentions)
            AS u(scope, id, token, fingerprint, lease, retention)
        -- The epoch day's partition has a unique index; the older ones are looked through.
        WHERE NOT EXISTS (
            SELECT FROM {schema}.records r WHERE r.scope = u.scope AND r.id = u.id AND r.day < v_day
        )
        ON CONFLICT (id, scope, day) DO NOTHING
        RETURNING scope, id, token
    )
    SELECT array_agg(i.scope), array_agg(i.id), array_agg(i.token) INTO v_scopes, v_ids, v_tokens FROM inserted i;
    IF cardinality(v_ids) = cardinality(p_ids) THEN
        acquired := ARRAY(SELECT generate_series(1, cardinality(p_ids)));
        RETURN NEXT;
        RETURN;
    END IF;
    -- Which these are: they come in the order of the batch. By key and token, since a caller may use one token for several
    -- keys.
    acquired := '{}';
    FOR v_place IN 1 .. cardinality(p_ids) LOOP
        IF v_tokens[v_next] = p_tokens[v_place] AND v_ids[v_next] = p_ids[v_place] AND v_scopes[v_next] = p_scopes[v_place]
        THEN
            v_next := v_next + 1;
            acquired := acquired || v_place;
        ELSE
            v_rest := v_rest || v_place;
        END IF;
    END LOOP;
    RETURN NEXT;
    acquired := NULL;
    -- A completed record is final, so it needs no lock.
    FOR v_hit IN
        SELECT u.place, r AS found
        FROM unnest(v_rest) AS u(place)
        JOIN {schema}.records r ON r.scope = p_scopes[u.place] AND r.id = p_ids[u.place]
        WHERE r.state = 'completed' AND r.expires_at > v_now
    LOOP
        v_rest := array_remove(v_rest, v_hit.place);
        v_old := v_hit.found;
        IF v_old.fingerprint <> p_fingerprints[v_hit.place] THEN
            answer := (v_hit.place, 'mismatch', v_now, NULL)::{schema}.answer;
        ELSE
            answer := (v_hit.place, 'completed', v_now, v_old)::{schema}.answer;
        END IF;
        RETURN NEXT;
    END LOOP;
    FOREACH v_place IN ARRAY v_rest LOOP
        SELECT * INTO answer FROM {schema}.reserve_one(v_day, v_now, v_place, p_scopes[v_place], p_ids[v_place],
            p_tokens[v_place], p_fingerprints[v_place], p_leases[v_place] * interval '1 us',
            p_retentions[v_place] * interval '1 us', p_refusals[v_place]);
        RETURN NEXT;
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
    r {schema}.records;
    was date;
BEGIN
    -- What changes nothing takes no lock: a lock takes a transaction id, whose commit waits for the disk.
    SELECT * INTO r FROM {schema}.records o WHERE o.scope = v_scope AND o.id = v_id;
    IF FOUND AND r.expires_at > v_now THEN
        IF r.fingerprint <> v_fingerprint THEN
            RETURN (v_place, 'mismatch', v_now, NULL)::{schema}.answer;
        END IF;
        IF r.state = 'completed' THEN
            RETURN (v_place, 'completed', v_now, r)::{schema}.answer;
        END IF;
        IF r.state = 'in progress' AND r.token <> v_token AND r.lease_until > v_now THEN
            RETURN (v_place, 'in progress', v_now, r)::{schema}.answer;
        END IF;
    END IF;
    LOOP
        SELECT * INTO r FROM {schema}.records o WHERE o.scope = v_scope AND o.id = v_id FOR UPDATE;
        EXIT WHEN FOUND;
        -- It has gone since, or has been moved to the epoch day's partition.
        INSERT INTO {schema}.records (day, scope, id, state, attempt, token, fingerprint, origin, retention,
            created_at, started_at, updated_at, lease_until, expires_at)
        VALUES (v_day, v_scope, v_id, 'in progress', 1, v_token, v_fingerprint, 'fresh', v_retention,
            v_now, v_now, v_now, v_now + v_lease, v_now + v_retention)
        ON CONFLICT (id, scope, day) DO NOTHING
        RETURNING * INTO r;
        IF FOUND THEN
            RETURN (v_place, 'acquired', v_now, r)::{schema}.answer;
        END IF;
    END LOOP;
    IF r.expires_at > v_now THEN
        IF r.fingerprint <> v_fingerprint THEN
            RETURN (v_place, 'mismatch', v_now, NULL)::{schema}.answer;
        END IF;
        IF r.state = 'completed' THEN
            RETURN (v_place, 'completed', v_now, r)::{schema}.answer;
        END IF;
        IF r.state = 'failed' AND r.token = v_token THEN
            RETURN (v_place, 'lease lost', v_now, NULL)::{schema}.answer;
        END IF;
        IF r.state = 'in progress' THEN
            IF r.token = v_token THEN
                RETURN (v_place, 'acquired', v_now, r)::{schema}.answer;
            END IF;
            IF r.lease_until > v_now THEN
                RETURN (v_place, 'in progress', v_now, r)::{schema}.answer;
            END IF;
            IF v_refuse THEN
                RETURN (v_place, 'abandoned', v_now, r)::{schema}.answer;
            END IF;
        END IF;
    END IF;
    was := r.day;
    IF r.expires_at <= v_now THEN
        r.attempt := 1;
        r.origin := 'fresh';
        r.fingerprint := v_fingerprint;
        r.created_at := v_now;
        r.previous_token := NULL;
        r.previous_attempt := NULL;
        r.previous_started_at := NULL;
    ELSIF r.state = 'failed' THEN
        r.attempt := r.attempt + 1;
        r.origin := 'retry';
        r.previous_token := NULL;
        r.previous_attempt := NULL;
        r.previous_started_at := NULL;
    ELSE
        r.previous_token := r.token;
        r.previous_attempt := r.attempt;
        r.previous_started_at := r.started_at;
        r.attempt := r.attempt + 1;
        r.origin := 'takeover';
    END IF;
    r.day := v_day;
    r.state := 'in progress';
    r.token := v_token;
    r.retention := v_retention;
    r.started_at := v_now;
    r.updated_at := v_now;
    r.lease_until := v_now + v_lease;
    r.expires_at := v_now + v_retention;
    r.failure := NULL;
    r.code := NULL;
    r.withheld := NULL;
    r.headers := NULL;
    r.body := NULL;
    PERFORM {schema}.put(was, r);
    RETURN (v_place, 'acquired', v_now, r)::{schema}.answer;
END
$$;

-- The calls of a batch under a lease. The kinds: 'c' completes, 'f' fails, 'r' renews.
-- Durations, in microseconds, are the retention, and for a renewal the extension.
--
-- Answers a verdict for each call.
CREATE FUNCTION {schema}.settle(
    p_kinds "char"[], p_scopes text[], p_ids text[], p_tokens uuid[], p_durations bigint[], p_codes int[],
    p_withhelds smallint[], p_headers bytea[], p_bodies bytea[], p_failures text[], p_patience text
)
RETURNS {schema}.verdict[]
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
    v_verdicts {schema}.verdict[];
BEGIN
    PERFORM pg_advisory_xact_lock_shared({lock});
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
                RETURN '{ok}';
            END IF;
        END IF;
        RETURN ARRAY[{schema}.settle_one(v_day, v_now, p_kinds[1], p_scopes[1], p_ids[1], p_tokens[1],
            p_durations[1] * interval '1 us', p_codes[1], p_withhelds[1], p_headers[1], p_bodies[1], p_failures[1])];
    END IF;
    WITH updated AS (
        UPDATE {schema}.records r
        SET state = 'completed', code = u.code, withheld = u.withheld, headers = u.headers, body = u.body,
            updated_at = v_now, retention = u.duration * interval '1 us',
            expires_at = v_now + u.duration * interval '1 us'
        FROM unnest(p_kinds, p_scopes, p_ids, p_tokens, p_durations, p_codes, p_withhelds, p_headers, p_bodies)
            WITH ORDINALITY AS u(kind, scope, id, token, duration, code, withheld, headers, body, place)
        WHERE u.kind = 'c' AND r.scope = u.scope AND r.id = u.id AND r.day = v_day
            AND r.token = u.token AND r.state = 'in progress' AND r.expires_at > v_now
        RETURNING u.place
    )
    SELECT array_agg(u.place) INTO v_places FROM updated u;
    IF cardinality(v_places) = cardinality(p_ids) THEN
        RETURN array_fill('ok'::{schema}.verdict, ARRAY[cardinality(p_ids)]);
    END IF;
    FOR v_place IN 1 .. cardinality(p_ids) LOOP
        -- They come in the order of the batch.
        IF v_places[v_next] = v_place THEN
            v_next := v_next + 1;
            v_verdicts[v_place] := 'ok';
        ELSE
            v_verdicts[v_place] := {schema}.settle_one(v_day, v_now, p_kinds[v_place], p_scopes[v_place], p_ids[v_place],
                p_tokens[v_place], p_durations[v_place] * interval '1 us', p_codes[v_place], p_withhelds[v_place],
                p_headers[v_place], p_bodies[v_place], p_failures[v_place]);
        END IF;
    END LOOP;
    RETURN v_verdicts;
END
$$;

-- One call under a lease: the rest of the contract.
CREATE FUNCTION {schema}.settle_one(
    v_day date, v_now timestamptz, v_kind "char", v_scope text, v_id text, v_token uuid, v_duration interval,
    v_code int, v_withheld smallint, v_headers bytea, v_body bytea, v_failure text
)
RETURNS {schema}.verdict
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
        RETURN 'lease lost';
    END IF;
    IF r.state = 'completed' THEN
        IF v_kind = 'c' AND (r.code, r.withheld, r.headers, r.body)
            IS NOT DISTINCT FROM (v_code, v_withheld, v_headers, v_body)
        THEN
            RETURN 'ok';
        END IF;
        RETURN 'already completed';
    END IF;
    IF r.state = 'failed' THEN
        IF v_kind = 'f' AND r.failure = v_failure THEN
            RETURN 'ok';
        END IF;
        RETURN 'lease lost';
    END IF;
    was := r.day;
    r.day := v_day;
    r.updated_at := v_now;
    IF v_kind = 'r' THEN
        IF r.lease_until >= v_now + v_duration THEN
            RETURN 'ok';
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
    RETURN 'ok';
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
